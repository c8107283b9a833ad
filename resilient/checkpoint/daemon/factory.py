"""Daemon or thread executor; promotion by the daemon.

A near tier that the keeper saves to: it promotes what it persisted, and the trainer the rest.

Who persists: the keeper of this host, or a thread where there is none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from resilient.checkpoint.daemon.client import DaemonSaveExecutor
from resilient.checkpoint.save.executor import MemoryBudget, ThreadSaveExecutor

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from resilient.checkpoint.context import CheckpointContext, PostCommitPlan, Promoter
    from resilient.checkpoint.daemon.messages import DaemonAddress
    from resilient.checkpoint.save.executor import SaveExecutor
    from resilient.format.keys import CheckpointId


class DaemonPromoter:
    """Has the keeper finish what it persisted, and does the rest itself.

    What the trainers persist without a keeper they promote too: a keeper that was bypassed or is
    gone owes nothing.

    Args:
        own: promotes in this process.
        finish: asks the keeper; returns False if the last save was not its, or it is gone.
    """

    def __init__(self, own: Promoter, finish: Callable[[float], bool]) -> None:
        self._own = own
        self._finish = finish

    def begin(self, desk: CheckpointContext, mine: int, parent: CheckpointId | None) -> None:
        """Note which life this is; the keeper hears of it with the first save.

        Crash: nothing changed.
        """
        self._own.begin(desk, mine, parent)

    def plan(
        self, desk: CheckpointContext, checkpoint: CheckpointId, keep: Collection[CheckpointId]
    ) -> PostCommitPlan:
        """Return what follows on what this process persisted.

        Crash: nothing changed.
        """
        return self._own.plan(desk, checkpoint, keep)

    def committed(
        self, desk: CheckpointContext, checkpoint: CheckpointId, orders: PostCommitPlan
    ) -> None:
        """Promote what this process persisted.

        Crash: either tier is consistent; what is not promoted yet is near.
        """
        self._own.committed(desk, checkpoint, orders)

    def note(self, checkpoint: CheckpointId, keep: Collection[CheckpointId]) -> None:
        """Take what the keeper committed for the newest.

        Crash: nothing changed.
        """
        self._own.note(checkpoint, keep)

    def finish(self, desk: CheckpointContext, within_seconds: float) -> None:
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


def use_daemon_promotion(
    desk: CheckpointContext, persister: SaveExecutor
) -> tuple[CheckpointContext, SaveExecutor]:
    """Return both, so that the keeper promotes what it persists, if that is who persists.

    Crash: nothing changes.
    """
    if not isinstance(persister, DaemonSaveExecutor) or desk.promoter is None:
        return desk, persister
    return replace(desk, promoter=DaemonPromoter(desk.promoter, persister.finish)), persister


def make_save_executor(
    keeper: DaemonAddress | None,
    url: str,
    storage_options: Mapping[str, Any],
    host_bytes_max: int | None = None,
) -> SaveExecutor:
    """Return who persists jobs for ``url``: the keeper if there is one, else a thread.

    Args:
        keeper: where it is; it has a bound of its own.
        url: of the repository.
        storage_options: the way there.
        host_bytes_max: how much memory the thread may take.

    Raises:
        ConfigError: that is no number of bytes.
    """
    thread = ThreadSaveExecutor(MemoryBudget(host_bytes_max))
    if keeper is None:
        return thread
    address = replace(keeper, url=url, storage_options=storage_options)
    return DaemonSaveExecutor(address, thread)
