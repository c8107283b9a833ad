"""How a save ended whose keeper is gone: the ruling on the board says, or else the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.errors import Fenced, KeyNotFound, PeerFailed, SaveFailed
from resilient.showing import quoted
from resilient.storage.space import free_bytes
from resilient.vault.rotation.rotate import discard
from resilient.vault.saving.space import space_topic
from resilient.world.agreement import Failure, attempt, hear
from resilient.world.sockets import SocketBoard

if TYPE_CHECKING:
    from resilient.format.names import CheckpointId
    from resilient.storage.store import Store
    from resilient.vault.desk import Desk
    from resilient.vault.saving.persist import Job
    from resilient.world.serving import Address


def find_verdict(desk: Desk, job: Job, board: Address | None, gone: str) -> None:
    """Return if the job is committed, though the keeper that would say so is gone.

    Args:
        desk: the repository and the ranks.
        job: what was handed over.
        board: of the keepers; None if there is none.
        gone: how the keeper ended.

    Raises:
        SaveFailed: it is not committed.
        Fenced: a newer life began, so nothing was committed.
    """
    checkpoint = job.about.checkpoint
    found = attempt(lambda: is_committed(desk.store, checkpoint) or _hear(desk, job, board))
    if isinstance(found, Failure) and found.code == Fenced.code:
        raise found.to_error(1)
    # The keeper may have put the manifest and died before anybody heard the ruling.
    landed = found is True or attempt(lambda: is_committed(desk.store, checkpoint)) is True
    if not landed:
        raise SaveFailed(
            f"{checkpoint} was not saved: {gone}; older checkpoints are intact",
            hint=f"resilient ckpt ls {quoted(desk.store.url)}",
        )


def _hear(desk: Desk, job: Job, address: Address | None) -> bool:
    if desk.world.is_coordinator or address is None:
        raise PeerFailed("the keeper that would have ruled is gone")
    board = SocketBoard(address)
    try:
        # A save that there is no room for, or that a rank never handed over, ends at the first.
        for topic in (space_topic(job.topic), job.topic):
            hear(desk.comms.over(board), topic, desk.limits.within_seconds)
    finally:
        board.close()
    return True


def is_committed(store: Store, checkpoint: CheckpointId) -> bool:
    """Say whether the store has a checkpoint's manifest.

    Crash: reads only.

    Raises:
        StoreError: the store does not say.
    """
    try:
        store.stat(checkpoint.manifest_key)
    except KeyNotFound:
        return False
    return True


def free(desk: Desk, job: Job) -> None:
    """Delete what a save left that every keeper gave up, where room is bounded.

    All keepers have answered, so none of them writes any more; a bucket's answer may come late.
    """
    if desk.leads and free_bytes(desk.store) is not None:
        attempt(lambda: discard(desk.store, job.about.checkpoint, desk.token))
