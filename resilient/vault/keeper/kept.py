"""A near tier that the keeper saves to: it promotes what it persisted, and the trainer the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from resilient.vault.keeper.link import KeeperPersister

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from resilient.format.names import CheckpointId
    from resilient.vault.desk import Desk, Onward, Orders
    from resilient.vault.saving.persister import Persister


class KeptPromoter:
    """Has the keeper finish what it persisted, and does the rest itself.

    What the trainers persist without a keeper they promote too: a keeper that was bypassed or is
    gone owes nothing.

    Args:
        own: promotes in this process.
        finish: asks the keeper; returns False if the last save was not its, or it is gone.
    """

    def __init__(self, own: Onward, finish: Callable[[float], bool]) -> None:
        self._own = own
        self._finish = finish

    def begin(self, desk: Desk, mine: int, parent: CheckpointId | None) -> None:
        """Note which life this is; the keeper hears of it with the first save.

        Crash: nothing changed.
        """
        self._own.begin(desk, mine, parent)

    def plan(self, desk: Desk, checkpoint: CheckpointId, keep: Collection[CheckpointId]) -> Orders:
        """Return what follows on what this process persisted.

        Crash: nothing changed.
        """
        return self._own.plan(desk, checkpoint, keep)

    def committed(self, desk: Desk, checkpoint: CheckpointId, orders: Orders) -> None:
        """Promote what this process persisted.

        Crash: either tier is consistent; what is not promoted yet is near.
        """
        self._own.committed(desk, checkpoint, orders)

    def note(self, checkpoint: CheckpointId, keep: Collection[CheckpointId]) -> None:
        """Take what the keeper committed for the newest.

        Crash: nothing changed.
        """
        self._own.note(checkpoint, keep)

    def finish(self, desk: Desk, within_seconds: float) -> None:
        """Return when what was committed last is durable, whoever brings it there.

        Crash: either tier is consistent; what is not promoted yet is near.

        Raises:
            Fenced: a newer life began.
            SaveFailed: the near tier alone has it.
        """
        if not self._finish(within_seconds):
            self._own.finish(desk, within_seconds)

    def close(self) -> None:
        """Let go of the thread.

        Crash: either tier is consistent; what is not promoted yet is near.
        """
        self._own.close()


def promoted_by(desk: Desk, persister: Persister) -> tuple[Desk, Persister]:
    """Return both, so that the keeper promotes what it persists, if that is who persists.

    Crash: nothing changes.
    """
    if not isinstance(persister, KeeperPersister) or desk.promoter is None:
        return desk, persister
    return replace(desk, promoter=KeptPromoter(desk.promoter, persister.finish)), persister
