"""Repositories and references on a command line, and the completion of references.

Completion reads only the names of objects, never a manifest. The user waits for the completion
after the Tab key. If the store does not answer within 2 s, the completion is empty.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from resilient.checkpoint.catalog import committed, lineage
from resilient.checkpoint.generations import list_numbers
from resilient.checkpoint.refs import list_tags
from resilient.checkpoint.signed_store import reading_signed
from resilient.checkpoint.signing import read_signing
from resilient.clock import SystemClock
from resilient.distributed.launch_env import read_storage_options
from resilient.errors import RepositoryNotFound, ResilientError, UsageError
from resilient.format.keys import parse_checkpoint
from resilient.redaction import shell_quote
from resilient.storage.open import open_store
from resilient_cli import durations
from resilient_cli.liveness import require_no_live_writer
from resilient_cli.output import Format, Waiting

if TYPE_CHECKING:
    from resilient.format.keys import CheckpointId
    from resilient.format.signature import SigningPolicy
    from resilient.storage.store import Store
    from resilient_cli.output import Output

LOOK_SECONDS = 2.0


def complete_ref(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the references that begin with ``incomplete``, each with a description.

    The repository is that of ``--repo``, of a REPO before the reference, or of RESILIENT_REPO.
    """
    url = ctx.params.get("repo") or ctx.params.get("place") or os.environ.get("RESILIENT_REPO")
    if not url:
        return []
    # The shell would show an error among the completions, so a failed store offers no completions.
    with suppress(ResilientError):
        options = read_storage_options(os.environ)
        store = open_store(url, within_seconds=LOOK_SECONDS, storage_options=options)
        return [reference for reference in references(store) if reference[0].startswith(incomplete)]
    return []


def references(store: Store) -> list[tuple[str, str]]:
    """Return every short name of a checkpoint in a repository, newest first, with a description."""
    checkpoints = committed(store)
    if not checkpoints:
        return []
    steps = dict.fromkeys(checkpoint_id.step for checkpoint_id in checkpoints)
    return [
        ("latest", "first choice of a resume"),
        *((tag, "tag") for tag in list_tags(store)),
        *(
            (
                checkpoint_id.folder,
                f"step {checkpoint_id.step}, generation {checkpoint_id.generation}",
            )
            for checkpoint_id in checkpoints
        ),
        *((f"step:{step}", "the newest with this step") for step in steps),
    ]


Ref = Annotated[
    str | None,
    typer.Argument(
        metavar="REF",
        help="latest, latest~2, step:120, checkpoint-120-g3, a tag, best:loss, @{1} (reflog), "
        "@2026-11-20T10:00, a prefix of an id, or the URL of a checkpoint.",
        show_default=False,
        autocompletion=complete_ref,
    ),
]
Place = Annotated[str | None, typer.Argument(metavar="REPO", help="URL or path of the repository.")]
Repo = Annotated[
    str | None,
    typer.Option("-r", "--repo", envvar="RESILIENT_REPO", help="Same as REPO, as an option."),
]
TakeOver = Annotated[
    bool,
    typer.Option(
        "--take-over",
        help="Ignore a live writer, which ends at its next save and loses unsaved steps.",
    ),
]


def output_of(ctx: typer.Context) -> Output:
    """Return the output settings of a command."""
    output: Output = ctx.find_root().obj
    return output


def is_interactive(output: Output) -> bool:
    """Return whether a user would see a question and could answer it."""
    return (
        sys.stdin.isatty()
        and sys.stderr.isatty()
        and output.format is Format.HUMAN
        and output.asks
        and not output.quiet
    )


def open_repository(place: str | None, repo: str | None, *, reads_unsigned: bool = False) -> Store:
    """Open the repository that the argument, the option or the environment names.

    Args:
        place: Argument of the command.
        repo: Option of the command; its default comes from RESILIENT_REPO.
        reads_unsigned: Whether to return unsigned checkpoints even if
            ``RESILIENT_REQUIRE_SIGNATURE`` is set. For commands that maintain or diagnose a
            repository.

    Raises:
        ConfigError: A signature is required and there is no key.
        UsageError: No repository is named.
    """
    url = place or repo
    if not url:
        raise UsageError(
            "no repository was named: give its URL, --repo or RESILIENT_REPO",
            hint="export RESILIENT_REPO=s3://bucket/run",
        )
    options = read_storage_options(os.environ)
    store = open_store(url, within_seconds=durations.WITHIN_SECONDS.get(), storage_options=options)
    return store if reads_unsigned else reading_signed(store, signing_policy(is_required=False))


def signing_policy(*, is_required: bool) -> SigningPolicy:
    """Return the signing key of the environment, and whether a signature is required.

    Args:
        is_required: Whether an option requires a signature, as ``RESILIENT_REQUIRE_SIGNATURE`` can.

    Raises:
        ConfigError: A signature is required and there is no key, or the key cannot be read.
    """
    return read_signing(os.environ, require_signature=is_required)


def ref_and_place(
    ref: str | None, place: str | None, repo: str | None
) -> tuple[str | None, str | None]:
    """Return the reference and the repository that the arguments mean.

    A lone argument is a location if it has a slash, or if no repository is known yet. The path of
    one of our checkpoints names both the checkpoint and its repository.
    """
    if ref and not place and ("/" in ref or not repo):
        folder, slash, name = ref.rstrip("/").rpartition("/")
        is_ours = parse_checkpoint(name) is not None
        return (name, folder + slash or ".") if is_ours else (None, ref)
    return ref, place


def refuse_beside_writer(store: Store, words: str) -> None:
    """Refuse a command that starts an attempt in a repository with a live writer.

    Args:
        store: Repository.
        words: The command with ``--take-over``.

    Raises:
        WriterAlive: Another process is proven alive and writes to the repository.
    """
    with Waiting("waiting for a heartbeat"):
        require_no_live_writer(store, SystemClock(), words)


def local_path(path: Path, option: str, instead: str) -> Path:
    """Return the local path that a command writes to, without a leading ``file:``.

    Args:
        path: Path of the option; if it was a URL, it has lost one slash.
        option: Name of the option.
        instead: Command that writes to a path, for the hint.

    Raises:
        UsageError: The path is a URL, which would become a folder with the name ``s3:``.
    """
    match = re.match(r"([a-z][a-z0-9+.-]+):/", str(path), re.IGNORECASE)
    if match is None:
        return path
    if match[1].lower() == "file":
        return Path(str(path)[len("file:") :])
    raise UsageError(
        f"{option} takes a path of this machine, and `{path}` is a URL; nothing was written",
        hint=instead,
    )


def committed_checkpoints(store: Store) -> list[CheckpointId]:
    """Return the committed checkpoints of a location that must be a repository.

    Raises:
        RepositoryNotFound: No run ever started there.
    """
    checkpoints = committed(store)
    if not checkpoints and not list_numbers(store) and not lineage(store).skipped:
        raise RepositoryNotFound(
            f"no repository at `{store.url}`: no run was ever started there",
            url=store.url,
            hint=f"resilient doctor --repo {shell_quote(store.url)}",
        )
    return checkpoints
