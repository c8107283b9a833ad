"""Is there room? Asked before the first byte of a save is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilient.errors import ResilientError, StoreFull
from resilient.showing import quoted
from resilient.storage.space import free_bytes
from resilient.vault.rotation.rotate import look
from resilient.vault.tiers.tiers import nearest
from resilient.world.agreement import Failure, agree, attempt

if TYPE_CHECKING:
    from resilient.format.names import CheckpointId
    from resilient.vault.desk import Desk
    from resilient.vault.reuse.refer import Division

MARGIN_BYTES = 64 << 10
_MARGIN_SHARE = 64


def with_margin(size_bytes: int) -> int:
    """Return what a save of so many bytes is said to need.

    The manifest and the file system's own records take room too: 64 KiB and a 64th.
    """
    return size_bytes + size_bytes // _MARGIN_SHARE + MARGIN_BYTES


def space_topic(topic: str) -> str:
    """Return the name of the agreement about room that comes before the save ``topic``."""
    return f"{topic}/space"


def require_space(
    desk: Desk, checkpoint: CheckpointId, division: Division | Failure, topic: str
) -> None:
    """Refuse a save that the store has no room for, on all ranks and before any has written.

    A repository is one place, so the bytes of all ranks count against the least that any of
    them sees free; with a near tier for each host, those of each host against its own. Where the
    store cannot tell, nothing is refused here.

    Collective: every rank, same topic.
    Crash: nothing was stored.

    Args:
        desk: the repository and the ranks.
        checkpoint: what is about to be saved.
        division: what this rank is about to write, or why it cannot.
        topic: names the save.

    Raises:
        StoreFull: with the numbers: needed, free, and what a rotation could free.
        ResilientError: another rank failed.
    """
    mine: Any = division
    if not isinstance(division, Failure):
        needs_bytes = division.size_bytes
        mine = attempt(lambda: {"needs": needs_bytes, "free": free_bytes(desk.store)})

    def rule(shown: list[Any]) -> None:
        ranks = range(len(shown))
        for group in desk.places.groups or (tuple(ranks),):
            here = [shown[rank] for rank in group]
            free = min((one["free"] for one in here if one["free"] is not None), default=None)
            needs = with_margin(sum(one["needs"] for one in here))
            if free is not None and needs > free:
                whose = f" of ranks {', '.join(map(str, group))}" if desk.places.groups else ""
                raise _full(desk, checkpoint, needs, free, whose)

    agree(desk.comms, space_topic(topic), mine, rule, desk.limits.within_seconds)


def _full(desk: Desk, checkpoint: CheckpointId, needs: int, free: int, whose: str) -> StoreFull:
    url = nearest(desk.store).url
    return StoreFull(
        f"no space left for it at {url}{whose}: it needs {needs} bytes with a margin, {free} are "
        f"free, and {_what_rotation_could_free(desk)}; nothing of it was written",
        key=checkpoint.folder,
        hint=f"resilient ckpt prune {quoted(url)} --keep-last 1 --grace 0 --dry-run",
    )


def _what_rotation_could_free(desk: Desk) -> str:
    """Say what the retention would let go now; that goes after a commit and never before."""
    try:
        found = look(desk.store, desk.limits.retention)
    except ResilientError as error:
        return f"what rotation could free is unknown ({error.message})"
    return f"rotation could free {found.freed_bytes}"
