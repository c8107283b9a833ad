"""Collective start of an attempt: the coordinator claims a generation number for all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilient import events
from resilient.checkpoint.catalog import committed, folders_of
from resilient.checkpoint.fencing import check_store_capabilities
from resilient.checkpoint.generations import Generation, claim
from resilient.checkpoint.tiers.tiered_store import (
    TieredStore,
    adopt_manifests,
    copy_generation_record,
    nearest_store,
    require_same_run,
)
from resilient.distributed.coordination import agree, capture_failure
from resilient.errors import Fenced, KeyNotFound, ResilientError
from resilient.format.keys import is_file_name, parse_checkpoint
from resilient.redaction import shell_quote
from resilient.storage.local import TEMPORARY
from resilient.storage.posix import fsync_leftovers
from resilient.storage.store import Sweepable

if TYPE_CHECKING:
    from resilient.checkpoint.context import CheckpointContext
    from resilient.checkpoint.resume_selection import ResumeChoice
    from resilient.distributed.start_identity import StartIdentity
    from resilient.processes import ProcessIdentity
    from resilient.storage.store import Store


def start_generation(
    context: CheckpointContext,
    choice: ResumeChoice,
    cause: str,
    start: StartIdentity | None = None,
    process: ProcessIdentity | None = None,
) -> Generation:
    """Claim the next generation for an attempt that starts from ``choice``, and emit its events.

    Collective: every rank, once per attempt.
    Crash: the number is used up; nothing else changed.

    Args:
        context: Context: repository and ranks.
        choice: Checkpoint from which the attempt starts, and the skipped ones.
        cause: Cause of the attempt.
        start: Identity of the start that the generation belongs to.
        process: Process that claims the number; None for a tool.

    Raises:
        Fenced: Another job uses this repository, and has deleted the checkpoint that this attempt
            loaded.
        NotExclusive: The store cannot fence and the user did not set ``single_writer``.
        StoreError: The store failed.
    """

    def check_near_tier() -> None:
        if isinstance(context.store, TieredStore) and context.is_near_tier_leader:
            require_same_run(context.store)

    def claim_generation(_shown: list[Any]) -> dict[str, Any]:
        check_store_capabilities(
            context.store, context.clock, single_writer=context.limits.single_writer
        )
        fsync_leftovers(context.store)
        highest_generation = _highest_generation(context.store)
        _require_parent(context.store, choice)
        return claim(
            context.store,
            choice.checkpoint,
            cause=cause,
            clock=context.clock,
            above=highest_generation,
            single_writer=context.limits.single_writer,
            start=start,
            process=process,
        ).to_json()

    ruling = agree(
        context.comms,
        "resume/claim",
        capture_failure(check_near_tier),
        claim_generation,
        context.limits.within_seconds,
    )
    generation = Generation.from_json(ruling)
    _share_near_tier(context, generation)
    new_context = context.for_generation(generation)
    for skip in choice.skipped:
        new_context.emit_once(events.CheckpointSkipped(skip.name, skip.reason))
    if generation.parent is None and context.world.is_coordinator:
        _report_unused_checkpoints(new_context)
    parent = generation.parent.folder if generation.parent else ""
    new_context.emit_once(events.GenerationClaimed(generation.number, parent, cause))
    if context.is_near_tier_leader:
        sweep_uploads(new_context, generation.number)
    return generation


def _require_parent(store: Store, choice: ResumeChoice) -> None:
    """Refuse a missing parent checkpoint, because the next attempt would report it as lost."""
    if choice.checkpoint is None:
        return
    try:
        store.stat(choice.checkpoint.manifest_key)
    except KeyNotFound as error:
        raise Fenced(
            f"{choice.checkpoint} at {store.url} was deleted while this generation loaded it: "
            "another job of this run is active there, and its checkpoints are intact",
            hint=f"resilient ckpt reflog {shell_quote(store.url)}",
        ) from error


def _highest_generation(store: Store) -> int:
    """Return the highest generation number of any checkpoint folder, 0 if there is none.

    In a near tier the folders of unknown generations count too, because the name of a save must be
    free there.
    """
    near_folders = folders_of(store.near) if isinstance(store, TieredStore) else ()
    folders = [*folders_of(store), *near_folders]
    return max((folder.generation for folder in folders), default=0)


def _share_near_tier(context: CheckpointContext, generation: Generation) -> None:
    """Make the near tier of every place accept the saves of this generation. Collective."""
    tiers = context.store
    if not isinstance(tiers, TieredStore):
        return

    def share() -> None:
        if context.is_near_tier_leader:
            adopt_manifests(tiers)
            copy_generation_record(tiers, generation.number)

    agree(
        context.comms,
        "resume/near",
        capture_failure(share),
        lambda _: None,
        context.limits.within_seconds,
    )
    if context.promoter and context.is_near_tier_leader:
        context.promoter.begin(context, generation.number, generation.parent)


def _report_unused_checkpoints(context: CheckpointContext) -> None:
    existing_checkpoints = committed(context.store)
    if existing_checkpoints:
        context.emit_once(
            events.RunRestartedFromScratch(
                len(existing_checkpoints), existing_checkpoints[0].folder
            )
        )


def sweep_uploads(context: CheckpointContext, generation: int) -> None:
    """Remove unfinished uploads and temporary files of killed processes of older generations.

    The age of a leftover does not matter, because an older generation can commit nothing. Leftovers
    cost only storage, so a failure is only an event.

    Crash: some uploads are aborted; none of them was ever an object.
    """
    store = context.store if context.world.is_coordinator else nearest_store(context.store)
    if not isinstance(store, Sweepable):
        return

    def is_of_older_generation(key: str) -> bool:
        folder, _, name = key.partition("/")
        checkpoint = parse_checkpoint(folder)
        is_known = is_file_name(name) or name.startswith(TEMPORARY)
        return is_known and checkpoint is not None and checkpoint.generation < generation

    try:
        aborted_uploads = store.sweep(is_of_older_generation, 0.0, context.clock)
    except ResilientError as error:
        context.emit(events.UploadCleanupFailed(error.message, error.hint))
        return
    if aborted_uploads:
        context.emit(events.UploadsAborted(len(aborted_uploads)))
