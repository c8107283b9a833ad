"""``resilient ckpt sign``: signature for a checkpoint that was saved without the signing key."""

from __future__ import annotations

import typer  # noqa: TC002 - Typer reads the annotations when it runs

from resilient.checkpoint.catalog import folders_of, read_manifest
from resilient.checkpoint.refs import resolve
from resilient.checkpoint.signing import Signature, digests_stored, put_signature
from resilient.checkpoint.verify import verify
from resilient.errors import ConfigError, IntegrityError
from resilient.redaction import shell_quote
from resilient_cli.output import CommandResult, KeyValues, Progress, show
from resilient_cli.repositories import (
    Place,
    Ref,
    Repo,
    open_repository,
    output_of,
    ref_and_place,
    signing_policy,
)
from resilient_cli.store_wrappers import ProgressStore


def sign(ctx: typer.Context, ref: Ref = None, place: Place = None, repo: Repo = None) -> None:
    """Sign a checkpoint with the key of RESILIENT_SIGNING_KEY or RESILIENT_SIGNING_KEY_FILE.

    Use the command for checkpoints saved without the key or with an older key. Every byte is read
    first, and a damaged checkpoint is not signed. An existing signature is replaced.

    Example: RESILIENT_SIGNING_KEY_FILE=signing.key resilient ckpt sign latest runs/gpt2
    """
    key = signing_policy(is_required=False).key
    if key is None:
        raise ConfigError(
            "no signing key is set",
            hint="export RESILIENT_SIGNING_KEY_FILE=signing.key",
        )
    ref, place = ref_and_place(ref, place, repo)
    store = open_repository(place, repo, reads_unsigned=True)
    checkpoint = resolve(store, ref or "latest")
    with Progress("reading") as progress:
        of_bytes = sum(folders_of(store).get(checkpoint, {}).values())
        reader = ProgressStore(store, progress, of_bytes)
        damage = [
            finding for finding in verify(reader, checkpoint) if finding.severity == "damaged"
        ]
    if damage:
        raise IntegrityError(
            f"cannot sign {checkpoint}: `{damage[0].file}` is damaged: {damage[0].problem}",
            hint=f"resilient ckpt verify {checkpoint} {shell_quote(store.url)}",
        )
    manifest = read_manifest(store, checkpoint)
    root = manifest.root
    put_signature(store, checkpoint, root, Signature(key, digests_stored(store, manifest)))
    document = {"id": checkpoint.folder, "root": root, "key_id": key.key_id}
    facts = KeyValues(
        (("signed", checkpoint.folder), ("root", root), ("key", f"{key.key_id} (its fingerprint)"))
    )
    show(
        CommandResult("ckpt.sign", "signature", document, (facts,), (checkpoint.folder,)),
        output_of(ctx),
    )
