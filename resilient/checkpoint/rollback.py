"""Rollback to an older checkpoint, from which the next resume continues, and undo of a rollback.

A generation is an attempt that claims the repository. A rollback or an undo is a generation that
begins from the selected checkpoint and saves nothing. So a rollback copies and deletes no file, and
costs one small object. A process of the older generation may no longer write (it is fenced), and
ends at its next save with exit code 80. Resume does not use a checkpoint that the process stores
before this check.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from resilient.checkpoint.catalog import folders_of, lineage
from resilient.checkpoint.fencing import check_store_capabilities
from resilient.checkpoint.generations import check_fence, claim
from resilient.checkpoint.reflog import ROLLBACK, UNDO, Reflog
from resilient.checkpoint.verify import verify
from resilient.errors import IntegrityError, KeyNotFound
from resilient.redaction import shell_quote

if TYPE_CHECKING:
    from resilient.clock import Clock
    from resilient.format.keys import CheckpointId
    from resilient.storage.store import Store


@dataclass(frozen=True, slots=True)
class RollbackPlan:
    """Planned move.

    Attributes:
        before: Checkpoint that resume takes now; None for a start from scratch.
        after: Checkpoint that resume will take.
        left: Checkpoints that the move abandons, newest first; they stay until they are pruned.
        undoes: Generation of the rollback that is undone; 0 for a rollback.
    """

    before: CheckpointId | None
    after: CheckpointId
    left: tuple[CheckpointId, ...] = ()
    undoes: int = 0

    @property
    def is_needed(self) -> bool:
        """True if the move changes anything."""
        return self.before != self.after or bool(self.undoes)


def plan_rollback(store: Store, target: CheckpointId) -> RollbackPlan:
    """Plan the move to ``target``.

    Crash: reads only.

    Raises:
        IntegrityError: Files of the target are missing or of the wrong size, so resume would
            skip it.
        StoreError: The store failed.
    """
    return _plan(store, target, 0)


def plan_undo(store: Store) -> RollbackPlan:
    """Plan the undo of the newest rollback in force.

    Crash: reads only.

    Raises:
        NothingToResume: There is no rollback in force, or the checkpoint that it abandoned was
            deleted.
        IntegrityError: A record is damaged, or the target is.
        StoreError: The store failed.
    """
    undoes, target = Reflog(store).undone_to()
    return _plan(store, target, undoes)


def _plan(store: Store, target: CheckpointId, undoes: int) -> RollbackPlan:
    damage_findings = [
        finding for finding in verify(store, target, "quick") if finding.severity == "damaged"
    ]
    if damage_findings:
        raise IntegrityError(
            f"{target} at {store.url} is damaged, and resume would skip it: "
            f"{damage_findings[0].file} {damage_findings[0].problem}; nothing was changed",
            key=target.manifest_key,
            hint=f"resilient ckpt repair {shell_quote(target)} {shell_quote(store.url)}",
        )
    descent = lineage(store)
    line = descent.candidates
    kept_checkpoints = set(_line_from(store, target))
    abandoned_checkpoints = tuple(
        checkpoint for checkpoint in line if checkpoint not in kept_checkpoints
    )
    return RollbackPlan(line[0] if line else None, target, abandoned_checkpoints, undoes)


def _line_from(store: Store, target: CheckpointId) -> list[CheckpointId]:
    """Return the line of descent after an attempt has begun from ``target``."""
    folders = {
        checkpoint: names for checkpoint, names in folders_of(store).items() if checkpoint <= target
    }
    older = [number for number in Reflog(store).numbers if number <= target.generation]
    return list(lineage(store, folders, older).candidates)


def apply_rollback(
    store: Store, plan: RollbackPlan, clock: Clock, *, single_writer: bool = False
) -> int | None:
    """Make the move; return its generation number, or None for a move without effect.

    Crash: the generation exists and the move is made, or nothing changed. The same command again
        has the same result.

    Args:
        store: Repository.
        plan: Planned move.
        clock: Source of the record's time.
        single_writer: Promise of the user that no other job writes here.

    Raises:
        Fenced: Another generation began at the same moment and is newer; the move has no effect.
        IntegrityError: Garbage collection deleted the target at the same moment.
        NotExclusive: The store cannot fence and the user did not set ``single_writer``.
        StoreError: The store failed; the move may be made.
    """
    if not plan.is_needed:
        return None
    check_store_capabilities(store, clock, single_writer=single_writer)
    generation = claim(
        store,
        plan.after,
        cause=UNDO if plan.undoes else ROLLBACK,
        clock=clock,
        above=max((folder.generation for folder in folders_of(store)), default=0),
        single_writer=single_writer,
    )
    check_fence(store, generation.number, generation.token)
    try:
        store.stat(plan.after.manifest_key)
    except KeyNotFound as error:
        raise IntegrityError(
            f"{plan.after} at {store.url} was deleted during the rollback; resume takes the "
            "newest earlier checkpoint",
            key=plan.after.manifest_key,
            hint=f"resilient ckpt undo {shell_quote(store.url)}",
        ) from error
    return generation.number
