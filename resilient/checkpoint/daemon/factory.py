"""Choice of the save executor (saver daemon or thread), and promotion of saves without the daemon.

The saver daemon is a process per host that writes checkpoints in the background. Promotion copies a
checkpoint from a fast local store (near tier) to the durable store. The daemon promotes the saves
that it wrote, and the trainers promote all other saves.
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
    """Promoter for saves without the daemon; the daemon promotes its own saves.

    Trainers also promote the saves that they persist without a daemon. A daemon that was bypassed
    or is gone has nothing to finish.

    Args:
        own: Promoter in this process.
        finish: Callback to the daemon. Returns False if the daemon did not make the last save, or
            is gone.
    """

    def __init__(self, own: Promoter, finish: Callable[[float], bool]) -> None:
        self._promoter = own
        self._finish = finish

    def begin(
        self, context: CheckpointContext, generation: int, parent: CheckpointId | None
    ) -> None:
        """Record the generation; the daemon receives its number with the first save.

        Crash: nothing changed.
        """
        self._promoter.begin(context, generation, parent)

    def plan(
        self, context: CheckpointContext, checkpoint: CheckpointId, keep: Collection[CheckpointId]
    ) -> PostCommitPlan:
        """Return the actions after a commit by this process.

        Crash: nothing changed.
        """
        return self._promoter.plan(context, checkpoint, keep)

    def committed(
        self, context: CheckpointContext, checkpoint: CheckpointId, post_commit_plan: PostCommitPlan
    ) -> None:
        """Promote a checkpoint that this process persisted.

        Crash: either tier is consistent; checkpoints not promoted yet are near.
        """
        self._promoter.committed(context, checkpoint, post_commit_plan)

    def note(self, checkpoint: CheckpointId, keep: Collection[CheckpointId]) -> None:
        """Record the daemon's commit as newest.

        Crash: nothing changed.
        """
        self._promoter.note(checkpoint, keep)

    def finish(self, context: CheckpointContext, within_seconds: float) -> None:
        """Wait until one of the two promoters has made the last commit durable.

        Crash: either tier is consistent; checkpoints not promoted yet are near.

        Raises:
            Fenced: A newer generation exists.
            SaveFailed: Only the near tier has the last commit.
        """
        if not self._finish(within_seconds):
            self._promoter.finish(context, within_seconds)

    def close(self) -> None:
        """Stop the thread.

        Crash: either tier is consistent; checkpoints not promoted yet are near.
        """
        self._promoter.close()


def use_daemon_promotion(
    context: CheckpointContext, persister: SaveExecutor
) -> tuple[CheckpointContext, SaveExecutor]:
    """Return a context and an executor with which a saver daemon promotes its own saves.

    Crash: nothing changes.
    """
    if not isinstance(persister, DaemonSaveExecutor) or context.promoter is None:
        return context, persister
    return replace(context, promoter=DaemonPromoter(context.promoter, persister.finish)), persister


def make_save_executor(
    daemon: DaemonAddress | None,
    url: str,
    storage_options: Mapping[str, Any],
    host_bytes_max: int | None = None,
) -> SaveExecutor:
    """Return the save executor for ``url``: the saver daemon if there is one, else a thread.

    Args:
        daemon: Address of the daemon, which has a memory limit of its own; None for no daemon.
        url: Repository.
        storage_options: Access to the repository.
        host_bytes_max: Memory limit of the thread.

    Raises:
        ConfigError: The limit is not a number of bytes.
    """
    thread = ThreadSaveExecutor(MemoryBudget(host_bytes_max))
    if daemon is None:
        return thread
    address = replace(daemon, url=url, storage_options=storage_options)
    return DaemonSaveExecutor(address, thread)
