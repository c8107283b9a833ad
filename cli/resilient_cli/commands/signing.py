"""``resilient ckpt sign``: vouch for a checkpoint that was saved without the key."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer  # noqa: TC002 - Typer reads the annotations when it runs

from resilient.errors import ConfigError, IntegrityError
from resilient.format.extents import Extents
from resilient.format.shard import HostFile
from resilient.vault.catalog import resolve
from resilient.vault.read import read
from resilient.vault.signing import Signature, digests_of, put_signature
from resilient.vault.verify import verify
from resilient_cli.places import (
    Place,
    Ref,
    Repo,
    open_repository,
    output_of,
    ref_and_place,
    signing_of,
)
from resilient_cli.render import Answer, Facts, show

if TYPE_CHECKING:
    from resilient.vault.read import Proved


def sign(ctx: typer.Context, ref: Ref = None, place: Place = None, repo: Repo = None) -> None:
    """Sign a checkpoint with the key of RESILIENT_SIGNING_KEY or RESILIENT_SIGNING_KEY_FILE.

    For checkpoints that were saved without the key, or with an older one. Every byte is read
    first; what is damaged is not signed. A signature that is there is replaced.

    Example: RESILIENT_SIGNING_KEY_FILE=signing.key resilient ckpt sign latest runs/gpt2
    """
    key = signing_of(is_required=False).key
    if key is None:
        raise ConfigError(
            "there is no key to sign with",
            hint="export RESILIENT_SIGNING_KEY_FILE=signing.key (or RESILIENT_SIGNING_KEY)",
        )
    ref, place = ref_and_place(ref, place, repo)
    store = open_repository(place, repo)
    checkpoint = resolve(store, ref or "latest")
    damage = [one for one in verify(store, checkpoint) if one.severity == "damaged"]
    if damage:
        raise IntegrityError(
            f"cannot sign {checkpoint}: `{damage[0].file}` is damaged: {damage[0].problem}",
            hint=f"resilient ckpt verify {checkpoint} {store.url}",
        )
    proved = read(store, checkpoint)
    root = proved.manifest.root
    put_signature(store, checkpoint, root, Signature(key, digests_of(_whole(proved))))
    document = {"id": checkpoint.folder, "root": root, "key_id": key.key_id}
    facts = Facts(
        (("signed", checkpoint.folder), ("root", root), ("key", f"{key.key_id} (its fingerprint)"))
    )
    show(Answer("ckpt.sign", "signature", document, (facts,), (checkpoint.folder,)), output_of(ctx))


def _whole(proved: Proved) -> list[HostFile]:
    """Return the files that were proved just now; nothing was read in part."""
    return [
        HostFile(name, data) for name, data in proved.files.items() if not isinstance(data, Extents)
    ]
