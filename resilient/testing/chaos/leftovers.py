"""What a run has left in its repository: what is whole, what is not, and how it differs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from resilient.errors import KeyNotFound, ResilientError
from resilient.format.names import parse_checkpoint
from resilient.testing.chaos.evidence import is_comparable, is_same_world
from resilient.vault.health.verify import verify
from resilient.vault.ledger.audit import audit
from resilient.vault.ledger.segments import list_segments
from resilient.vault.registry.catalog import committed, lineage, read_manifest

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from resilient.format.names import CheckpointId
    from resilient.storage.store import Store
    from resilient.testing.chaos.evidence import Ended, Struck
    from resilient.testing.chaos.job import Job

_DIFFERENCES_MAX = 20


def newest_whole(store: Store) -> CheckpointId | None:
    """Return the newest committed checkpoint of which every byte is what was committed."""
    return next((one for one in committed(store) if not _damage(store, one)), None)


def saved_steps(job: Job) -> tuple[int, ...]:
    """Return the steps of the checkpoints that a job has committed, in the order of time."""
    facts = (one for one in job.facts() if one["event"] == "CheckpointCommitted")
    found = (parse_checkpoint(one["checkpoint"]) for one in facts)
    return tuple(one.step for one in found if one)


def measure(job: Job, ended: Ended) -> Ended:
    """Return an end with what its bits depend on: how many ranks made it, and in which order."""
    newest = newest_whole(job.store)
    if newest is None:
        return ended
    manifest = read_manifest(job.store, newest)
    line = lineage(job.store).candidates
    has_ledger = bool(line) and bool(list_segments(job.store))
    worlds = audit(job.store, line).ranks if has_ledger else ()
    return replace(
        ended,
        worlds=worlds or job.worlds() or (int(manifest.world["size"]),),
        is_canonical=manifest.config.get("reduction") == "canonical",
    )


def examine(
    job: Job, ended: Ended, struck: Sequence[Struck], calm: Ended, calm_store: Store
) -> Ended:
    """Return an end with what is left of it: damages, differences, what the ledger proves."""
    store = job.store
    newest = job.newest()
    done = not ended.code and not ended.problem
    ended = measure(job, ended)
    return replace(
        ended,
        step=newest.step if newest else 0,
        damages=_damages(store, {one.damaged for one in struck if one.damaged}),
        differences=_differences(calm_store, store, calm, ended) if done else (),
        flaws=_flaws(store),
    )


def _damages(store: Store, ours: set[CheckpointId]) -> dict[str, str]:
    """Return what is wrong with checkpoints that were not damaged on purpose."""
    found = {one.folder: _damage(store, one, ours) for one in committed(store) if one not in ours}
    return {name: problem for name, problem in found.items() if problem}


def _damage(store: Store, checkpoint: CheckpointId, ours: Collection[CheckpointId] = ()) -> str:
    folders = tuple(f"{one.folder}/" for one in ours)
    try:
        findings = verify(store, checkpoint)
    except KeyNotFound:
        return ""  # rotated away meanwhile
    hits = [
        one
        for one in findings
        if one.severity == "damaged" and not (folders and one.file.startswith(folders))
    ]
    return "; ".join(f"{one.file}: {one.problem}" for one in hits)


def _differences(calm: Store, struck: Store, calmly: Ended, ended: Ended) -> tuple[str, ...]:
    # Torch takes seconds to load, and nobody else here needs it.
    from resilient.testing.endings import differences, ending

    if not is_comparable(calmly, ended):
        return ()
    # What each rank has of its own, other ranks have otherwise.
    with_own = is_same_world(calmly, ended)
    try:
        one, other = (ending(store, with_own=with_own) for store in (calm, struck))
        found = differences(one, other)
    except ResilientError as error:
        return (f"the end cannot be read: {error.message}",)
    more = len(found) - _DIFFERENCES_MAX
    return tuple(found[:_DIFFERENCES_MAX] + ([f"and {more} more"] if more > 0 else []))


def _flaws(store: Store) -> tuple[str, ...] | None:
    line = lineage(store).candidates
    if not line or not list_segments(store):
        return None
    return tuple(f"{one.key}: {one.problem}" for one in audit(store, line).flaws)
