"""``resilient ckpt verify``: whether checkpoints are whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from resilient.errors import (
    IncompatibleCheckpoint,
    NoIntactCheckpoint,
    NothingToResume,
    RepositoryNotFound,
    UsageError,
)
from resilient.showing import quoted
from resilient.vault.health.records import verify_records
from resilient.vault.registry.catalog import folders_of, lineage
from resilient.vault.registry.references import resolve
from resilient_cli.foreign import look_if_known
from resilient_cli.partly import Wish, read_some
from resilient_cli.places import (
    Place,
    Ref,
    Repo,
    committed_of,
    open_repository,
    output_of,
    ref_and_place,
    signing_of,
)
from resilient_cli.progress import Progress
from resilient_cli.render import show
from resilient_cli.runs import in_run
from resilient_cli.survey import Level, Survey, first_intact, survey
from resilient_cli.told import ToldStore
from resilient_cli.views.foreign import proved
from resilient_cli.views.verification import verification

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.format.names import CheckpointId
    from resilient.storage.store import Store

DAMAGE_FOUND = 1


def verify(  # noqa: PLR0913 - the options of a command
    ctx: typer.Context,
    ref: Ref = None,
    place: Place = None,
    repo: Repo = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="All checkpoints.")] = False,
    level: Annotated[
        Level,
        typer.Option(
            help="quick: presence and sizes; full: every byte; deep: also regions, headers, "
            "documents, and whether records, tags and checkpoints fit each other."
        ),
    ] = Level.FULL,
    require_signature: Annotated[
        bool,
        typer.Option(
            "--require-signature",
            help="What the key of RESILIENT_SIGNING_KEY or RESILIENT_SIGNING_KEY_FILE has not "
            "signed counts as damaged. RESILIENT_REQUIRE_SIGNATURE asks for the same.",
        ),
    ] = False,
    sample: Annotated[
        str,
        typer.Option(metavar="5%", help="Read only this share of the bytes, other ones each time."),
    ] = "",
    max_duration: Annotated[
        str, typer.Option(metavar="10m", help="Read for so long at most, in random order.")
    ] = "",
) -> int:
    """Hold the latest, one or all checkpoints against what was committed.

    A lone path or URL may also be a checkpoint of another tool (docs/layouts.md): its checksums
    are proved and its numbers looked at, and the answer is whether training can go on from it.

    With --sample or --max-duration some of the bytes are read, chosen at random; presence and sizes
    of all files are looked at first. 5 % of all each night have seen nearly everything in a year.

    Exit code 0: intact. 1: damage was found, and an intact checkpoint remains to resume from, or
    a resume of another tool's stops or loses a state that was saved. 3: none remains. 65: not
    damaged, but of a newer release.

    Example: resilient ckpt verify --all runs/gpt2 --level quick
    """
    if every and ref and place:
        raise UsageError("`--all` takes no REF", hint="resilient ckpt verify --all REPO")
    ref, place = (None, ref or place) if every else ref_and_place(ref, place, repo)
    signing = signing_of(is_required=require_signature)
    wish = Wish.of(sample, max_duration, level)
    alone = ref is None and not every and not signing.is_required and not wish.is_some
    if alone and (looked := look_if_known(place or repo, is_read=level is not Level.QUICK)):
        show(proved(looked), output_of(ctx))
        return DAMAGE_FOUND if looked.is_damaged else 0
    store = open_repository(place, repo, reads_unsigned=True)
    try:
        found = committed_of(store)
    except RepositoryNotFound:
        path = in_run(ref, place or repo)
        if path is None:
            raise
        return verify(
            ctx,
            None,
            path,
            level=level,
            require_signature=signing.is_required,
            sample=sample,
            max_duration=max_duration,
        )
    chosen = found if every or not found else [resolve(store, ref or "latest")]
    folders = folders_of(store)
    of_bytes = sum(sum(folders.get(one, {}).values()) for one in chosen)
    with Progress("reading") as told:
        reader = ToldStore(store, told, of_bytes)
        surveys = survey(reader, chosen, Level.QUICK if wish.is_some else level, signing)
    part = read_some(store, surveys, wish) if wish.is_some else None
    surveys = part.surveys if part else surveys
    states = {one.checkpoint: one.intact for one in surveys}
    others = Level.QUICK if wish.is_some else level
    resume = first_intact(store, states, others, signing)
    records = verify_records(store, level.value)
    show(verification(store.url, surveys, resume, level, records, part), output_of(ctx))
    is_damaged = any(one.severity == "damaged" for one in records)
    return _verdict(store, surveys, resume) or (DAMAGE_FOUND if is_damaged else 0)


def _verdict(store: Store, surveys: Sequence[Survey], resume: CheckpointId | None) -> int:
    """Return the exit code when something intact remains, and raise when nothing does."""
    # Lost parity hurts no resume, and yet it is damage that somebody has to hear of.
    if not any(one.findings for one in surveys) and (surveys or resume):
        return 0
    if resume:
        return DAMAGE_FOUND
    if not surveys and not lineage(store).lost:
        raise NothingToResume(f"no checkpoint was committed in `{store.url}` yet")
    if surveys and not any(one.damaged for one in surveys):
        newer = next(one for one in surveys if not one.intact).findings[0]
        raise IncompatibleCheckpoint(newer.problem, hint=newer.fix)
    raise NoIntactCheckpoint(
        f"no checkpoint in `{store.url}` is left that training could resume from",
        hint=f"resilient ckpt repair latest {quoted(store.url)} --from COPY",
    )
