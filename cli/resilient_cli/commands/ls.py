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
from resilient.format.signature import UNSIGNED
from resilient.redaction import shell_quote
from resilient.storage.open import open_store
from resilient_cli.output import show
from resilient_cli.repositories import (
    Place,
    Repo,
    committed_checkpoints,
    open_repository,
    output_of,
    signing_policy,
)
from resilient_cli.store_wrappers import CachedListingStore
from resilient_cli.survey import VerifyLevel, survey, tags_of
from resilient_cli.views.listing import Listing, build_list_result

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from resilient.format.keys import CheckpointId
    from resilient.format.signature import SigningPolicy
    from resilient.storage.store import Store
    from resilient_cli.output import CommandResult
    from resilient_cli.survey import Survey


class State(StrEnum):
    """State of a checkpoint, as a value of ``--state``."""

    OK = "ok"
    WARNING = "warning"
    DAMAGED = "damaged"
    UNSIGNED = "unsigned"
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
    later generation started from an older checkpoint. STATE is UNSIGNED if only a required
    signature is missing. `ckpt verify` also reads the content.

    Options choose the checkpoints to show. The checkpoint to resume from and the sizes always refer
    to all checkpoints.

    For a folder of another tool the list is made from file names alone: step, age, size, layout,
    the checkpoint that `latest` means, and the checkpoint that the run points at.

    Example: resilient ckpt ls s3://bucket/run --state damaged

    Example: resilient ckpt ls theirs/output --last 3
    """
    signing = signing_policy(is_required=False)
    store = open_repository(place, repo, reads_unsigned=True)
    try:
        checkpoints = committed_checkpoints(store)
    except RepositoryNotFound:
        answer = _build_foreign_result(place or repo or "", last, is_choosing=bool(state or tag))
        if answer is None:
            raise
        show(answer, output_of(ctx))
        return
    repository = list_repository(store, checkpoints, signing)
    surveys = _select_surveys(
        repository, {state_name.value for state_name in state or ()}, set(tag or ())
    )[:last]
    show(build_list_result(repository, SystemClock().now_iso(), surveys), output_of(ctx))


def _build_foreign_result(url: str, last: int | None, *, is_choosing: bool) -> CommandResult | None:
    """Build the answer about a run of another tool; None if there is no such run."""
    # Import late: the list of our own repository does not need these modules.
    from resilient_cli.foreign import find_foreign_run
    from resilient_cli.views.foreign import build_run_result

    run = find_foreign_run(url)
    if run is not None and is_choosing:
        raise UsageError(
            "checkpoints of another tool have no tags, and their state is unknown before a read: "
            "`--state` and `--tag` choose no checkpoint",
            hint=f"resilient ckpt inspect latest {shell_quote(run.url)}",
        )
    now_iso = SystemClock().now_iso()
    return build_run_result(run, run.checkpoints[:last], now_iso) if run else None


def _select_surveys(contents: Listing, states: set[str], tags: set[str]) -> list[Survey]:
    return [
        survey
        for survey in contents.surveys
        if not states or contents.state(survey).lower() in states
        if not tags or tags.intersection(contents.tags_on(survey.checkpoint))
    ]


def list_repository(
    store: Store, checkpoints: Iterable[CheckpointId], signing: SigningPolicy = UNSIGNED
) -> Listing:
    """List a repository by presence and size of its files.

    Args:
        store: The repository.
        checkpoints: Its committed checkpoints.
        signing: Whether a signature is required, and its key.
    """
    cached_store = CachedListingStore(store, CHECKPOINTS, GENERATIONS, TAGS)
    surveys = survey(cached_store, checkpoints, VerifyLevel.QUICK, signing)
    trash = trash_of(folders_of(cached_store))
    return Listing(
        store.url,
        surveys,
        lineage(cached_store),
        read_generations(cached_store),
        tags_of(cached_store),
        trash,
    )


def list_first_repository(run: Sequence[Path]) -> Listing | None:
    """List the first of the folders that is a repository; None if none is."""
    store = store_of(run)
    return list_repository(store, committed(store)) if store else None


def store_of(run: Sequence[Path]) -> Store | None:
    """Return the first of the folders that is a repository with checkpoints; None if none is."""
    for folder in run:
        if any(folder.glob("checkpoint-*")):
            store = reading_signed(open_store(str(folder)), signing_policy(is_required=False))
            if committed(store):
                return store
    return None
