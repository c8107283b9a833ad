"""``resilient ckpt ls``: checkpoints of a repository."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from resilient.checkpoint.catalog import committed, folders_of, lineage, trash_of
from resilient.checkpoint.generations import read_generations
from resilient.checkpoint.signed_store import reading_signed
from resilient.clock import SystemClock
from resilient.errors import RepositoryNotFound, UsageError
from resilient.format.keys import CHECKPOINTS, GENERATIONS, TAGS
from resilient.redaction import shell_quote
from resilient.storage.open import open_store
from resilient_cli.output import show
from resilient_cli.repositories import (
    Place,
    Repo,
    committed_of,
    open_repository,
    output_of,
    signing_of,
)
from resilient_cli.store_wrappers import CachedListingStore
from resilient_cli.survey import VerifyLevel, survey, tags_of
from resilient_cli.views.listing import Listing, listing

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from resilient.format.keys import CheckpointId
    from resilient.storage.store import Store
    from resilient_cli.output import CommandResult
    from resilient_cli.survey import Survey


class State(StrEnum):
    """States of a checkpoint, as ``--state`` takes them."""

    OK = "ok"
    WARNING = "warning"
    DAMAGED = "damaged"
    ABANDONED = "abandoned"


def ls(
    ctx: typer.Context,
    place: Place = None,
    repo: Repo = None,
    *,
    last: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Only the newest N chosen checkpoints.")
    ] = None,
    state: Annotated[
        list[State] | None, typer.Option(help="Only checkpoints in this state; may be repeated.")
    ] = None,
    tag: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only checkpoints with one of these tags."),
    ] = None,
) -> None:
    """List checkpoints, newest first, and the generations of the run that wrote them.

    STATE is ok if every file is present with its full size, DAMAGED if not, and abandoned if a
    later generation started from an older checkpoint. `ckpt verify` also reads the content.

    Options choose the checkpoints to show. The checkpoint to resume from and the sizes always refer
    to all checkpoints.

    For a folder of another tool the list is made from file names alone: step, age, size, layout,
    the checkpoint that `latest` means, and the checkpoint that the run points at.

    Example: resilient ckpt ls s3://bucket/run --state damaged

    Example: resilient ckpt ls theirs/output --last 3
    """
    store = open_repository(place, repo)
    try:
        kept = committed_of(store)
    except RepositoryNotFound:
        answer = _of_others(place or repo or "", last, is_choosing=bool(state or tag))
        if answer is None:
            raise
        show(answer, output_of(ctx))
        return
    found = listed(store, kept)
    wanted = _chosen(found, {one.value for one in state or ()}, set(tag or ()))[:last]
    show(listing(found, SystemClock().now_iso(), wanted), output_of(ctx))


def _of_others(url: str, last: int | None, *, is_choosing: bool) -> CommandResult | None:
    """Build the answer about a run of another tool; None if there is no such run."""
    # Import late: the list of our own repository does not need these modules.
    from resilient_cli.foreign import find_foreign_run
    from resilient_cli.views.foreign import listed_run

    found = find_foreign_run(url)
    if found is not None and is_choosing:
        raise UsageError(
            "checkpoints of another tool have no tags, and their state is unknown before a read: "
            "`--state` and `--tag` choose no checkpoint",
            hint=f"resilient ckpt inspect latest {shell_quote(found.url)}",
        )
    now = SystemClock().now_iso()
    return listed_run(found, found.checkpoints[:last], now) if found else None


def _chosen(found: Listing, states: set[str], tags: set[str]) -> list[Survey]:
    return [
        one
        for one in found.surveys
        if not states or found.state(one).lower() in states
        if not tags or tags.intersection(found.tags_on(one.checkpoint))
    ]


def listed(store: Store, found: Iterable[CheckpointId]) -> Listing:
    """List a repository by presence and size of its files.

    Args:
        store: The repository.
        found: Its committed checkpoints.
    """
    seen = CachedListingStore(store, CHECKPOINTS, GENERATIONS, TAGS)
    surveys = survey(seen, found, VerifyLevel.QUICK)
    trash = trash_of(folders_of(seen))
    return Listing(store.url, surveys, lineage(seen), read_generations(seen), tags_of(seen), trash)


def stored(run: Sequence[Path]) -> Listing | None:
    """List the first of the folders that is a repository; None if none is."""
    store = store_of(run)
    return listed(store, committed(store)) if store else None


def store_of(run: Sequence[Path]) -> Store | None:
    """Return the first of the folders that is a repository with checkpoints; None if none is."""
    for folder in run:
        if any(folder.glob("checkpoint-*")):
            store = reading_signed(open_store(str(folder)), signing_of(is_required=False))
            if committed(store):
                return store
    return None
