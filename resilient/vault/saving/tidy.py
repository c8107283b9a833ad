"""After a commit: mark the first of a life, let old ones go. A failure here is only an event."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient import events
from resilient.errors import ResilientError
from resilient.vault.registry.generations import mark_committed
from resilient.vault.rotation.rotate import rotate
from resilient.vault.rotation.trash import Grace

if TYPE_CHECKING:
    from collections.abc import Collection

    from resilient.format.names import CheckpointId
    from resilient.storage.store import Store
    from resilient.vault.desk import Desk
    from resilient.vault.registry.planning import RotationPlan
    from resilient.vault.registry.retention import Retention


def tidy(
    desk: Desk,
    store: Store,
    retention: Retention,
    checkpoint: CheckpointId,
    keep: Collection[CheckpointId],
    *,
    is_first: bool,
) -> bool:
    """Mark the life's first commit in a repository and rotate there, and say what went.

    Crash: as in ``rotate``; without the mark the checkpoint is as safe as ever.

    Args:
        desk: whom to tell.
        store: the repository.
        retention: what stays there.
        checkpoint: what was committed there just now.
        keep: checkpoints that must not go.
        is_first: whether this life has committed nothing there before, or is not marked there yet.

    Returns:
        Whether the life is marked there; if not, the next call must say ``is_first`` again.
    """
    is_marked = not is_first
    try:
        if is_first:
            mark_committed(store, checkpoint.generation)
            is_marked = True
        plan = rotate(
            store,
            retention,
            checkpoint.generation,
            keep,
            written=checkpoint,
            sweeps=is_first,
            grace=Grace(desk.clock),
            token=desk.token,
        )
    except ResilientError as error:
        # Who leads a place may be no coordinator, and nobody else knows.
        desk.emit(events.RotationFailed(checkpoint.folder, error.message))
        return is_marked
    _tell(desk, checkpoint, plan)
    return is_marked


def _tell(desk: Desk, checkpoint: CheckpointId, plan: RotationPlan) -> None:
    if plan.kept:
        kept = {one.folder: list(reasons) for one, reasons in plan.kept.items()}
        desk.tell(events.RotationPlanned(checkpoint.folder, kept))
    for one, reason in plan.damaged.items():
        desk.tell(events.BestDamaged(one.folder, reason))
    for held in (plan.held, plan.unsure):
        if held:
            desk.tell(events.RotationHeld(checkpoint.folder, held))
    for one in plan.doomed:
        desk.tell(events.CheckpointRotated(one.folder))
