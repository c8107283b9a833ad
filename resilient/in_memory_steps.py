"""Each step in the keeper's memory: staged beside the next pass, and saved only if ranks die.

::

    capture -> copy what a forward pass changes -> | copy the rest -> | say that it is whole
    training waits                                 | forward          | backward, before_update()

Nothing is written and nothing is agreed on, so it costs what a copy costs. To say that it is whole
takes the interpreter, which a forward pass needs too and torch's backward pass does not, so it
waits for that if training tells when it begins. Why a step that all ranks hold is always there:
:mod:`resilient.checkpoint.daemon.session`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.checkpoint.daemon.step_cache import StepCacheClient, holder_for
from resilient.checkpoint.daemon.step_slots import SLOTS
from resilient.checkpoint.events import StepCacheDisabled
from resilient.checkpoint.save.metadata import draft_manifest
from resilient.checkpoint.save.persist import SaveJob
from resilient.checkpoint.throttle import usable_cores
from resilient.checkpoint_engine import BackgroundStaging
from resilient.clock import Stopwatch
from resilient.distributed.coordination import RankFailure, agree, capture_failure
from resilient.distributed.host_sum import PAGE_BYTES, HostLocalSum
from resilient.environment import read_integer
from resilient.format.keys import CheckpointId
from resilient.state_dict.capture_cache import CaptureCache
from resilient.state_dict.snapshot import capture
from resilient.state_dict.staging import StableStorageCache, StagingBuffers, has_idle_core, stage
from resilient.storage.shared_memory import map_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from resilient.checkpoint.context import CheckpointContext
    from resilient.checkpoint.generations import Generation
    from resilient.checkpoint.save.dedup import DedupBase
    from resilient.checkpoint.save.metadata import CheckpointInfo
    from resilient.checkpoint_engine import CheckpointEngine
    from resilient.state_dict.host_copy import DeferredCopies
    from resilient.state_dict.snapshot import Part

# What is copied within a backward pass; to begin earlier takes the interpreter from the forward
# pass at every tensor.
_LULL_BYTES_MAX = 64 << 20
_Settle = Callable[[str, Any, Callable[[list[Any]], Any]], Any]


class StepCache:
    """Holds the newest steps of one life in the memory of every rank's keeper, or none does.

    Args:
        checkpointer: of the life; it has resumed.
        holder: of this rank.
        lull: set by training whenever it does not need the interpreter for a while.
        near_sums: as in the attribute.

    Attributes:
        near_sums: adds numbers of all ranks up if they are on one host.
    """

    def __init__(
        self,
        checkpointer: CheckpointEngine,
        holder: StepCacheClient,
        lull: threading.Event | None = None,
        near_sums: HostLocalSum | None = None,
    ) -> None:
        self.near_sums = near_sums
        self._checkpointer = checkpointer
        self._holder = holder
        self._arenas = [StagingBuffers(partial(holder.buffer, slot)) for slot in range(SLOTS)]
        self._recall = CaptureCache()
        self._steadiness = StableStorageCache()
        self._overlap = BackgroundStaging()
        self._lull = lull or threading.Event()
        self._cores = usable_cores()
        # What is not known yet may be long.
        self._size_bytes, self._turns = _LULL_BYTES_MAX + 1, 0
        self._unproved: tuple[int, DeferredCopies] | None = None
        self._failure: RankFailure | None = None

    def hold(
        self, step: int, parts: Mapping[str, Part], about: CheckpointInfo, *, overlap: bool
    ) -> None:
        """Copy the state of a step to host memory; with ``overlap`` some of it beside training.

        When it returns (with ``overlap``: when ``before_update`` did) the step comes back though
        every rank is killed, as long as the keepers live. It is a checkpoint only then.

        Collective: every rank, same step; they do not talk.
        Crash: the step before is held whole, or what was saved is newer.

        Args:
            step: names the checkpoint that it would become.
            parts: what to hold.
            about: what the manifest would say besides.
            overlap: as in ``Checkpointer.save``.

        Raises:
            ResilientError: the keeper is gone, or has no room.
        """
        desk, life, bases, has_saved = _lent(self._checkpointer)
        began_seconds = desk.clock.monotonic_seconds()
        stall, slot = Stopwatch(desk.clock), self._turns % SLOTS
        with stall.running():
            self.before_update()
            if self._failure is not None:
                raise self._failure.to_error(1)
            self._turns += 1
            self._holder.void(slot)
            about = self._checkpointer.with_setup(about)
            about = about.closing(CheckpointId(life.number, step), life)
            snapshot = capture(step, parts, desk.world.rank, self._recall)
            is_beside = overlap and self._has_room_beside()
            steady = self._steadiness.of(parts, snapshot) if is_beside else ()
            staged = stage(snapshot, desk.world, self._arenas[slot], *steady)
            job = SaveJob(
                about=draft_manifest(desk, life, step, about, ()),
                files=staged.files,
                parts=staged.parts,
                keep=(),
                is_first=not has_saved,
                topic="",
                began_seconds=began_seconds,
                stall_seconds=stall.seconds,
                bases=bases if desk.limits.save_unchanged == "refer" else (),
                segment=about.segment,
                token=life.token,
            )
            self._size_bytes = staged.size_bytes
            if staged.rest:
                self._lull.clear()
                begin = self._lull if staged.size_bytes <= _LULL_BYTES_MAX else None
                say = partial(self._say_late, slot, job, staged.rest)
                self._unproved = slot, staged.rest
                self._overlap.copy(staged.rest, say, begin)
            else:
                self._say(slot, job, None)

    def before_update(self) -> None:
        """Wait until the live state may change: call it before each optimizer step.

        Crash: as in ``hold``.
        """
        self._lull.set()
        self._overlap.settle()
        unproved, self._unproved = self._unproved, None
        if unproved is not None:
            self._prove(*unproved)

    def drop(self) -> None:
        """Forget what is held: training goes back, on purpose.

        Crash: what is held may land.
        """
        self.before_update()
        capture_failure(self._holder.drop)

    def close(self) -> None:
        """Let go; what is held lands if it is newer than what is saved.

        Crash: as in ``hold``.
        """
        self.before_update()
        self._overlap.close()
        self._holder.close()
        for arena in self._arenas:
            arena.close()

    def _has_room_beside(self) -> bool:
        """Say whether to copy beside training is better than to have it wait for the copy.

        Where training has a thread on every core a copy beside it takes its time from one of them
        all the same, and threads that wake each other take more. It may be too long to wait for.
        """
        ranks = read_integer(os.environ, "LOCAL_WORLD_SIZE", 1, least=1)
        return self._size_bytes > _LULL_BYTES_MAX or has_idle_core(ranks, self._cores)

    def _say_late(
        self, slot: int, job: SaveJob, copies: DeferredCopies, spoiled: RankFailure | None
    ) -> None:
        self._lull.wait()
        # torch counts a change once it is made: those of the forward pass are, by now.
        late = spoiled or capture_failure(copies.require_unchanged)
        self._say(slot, job, late if isinstance(late, RankFailure) else None)

    def _prove(self, slot: int, copies: DeferredCopies) -> None:
        """Void a slot whose sources were being changed when they were last looked at."""
        late = capture_failure(copies.require_unchanged)
        if isinstance(late, RankFailure):
            self._failure = late
            capture_failure(partial(self._holder.void, slot))

    def _say(self, slot: int, job: SaveJob, spoiled: RankFailure | None) -> None:
        """Say that a step is whole; one that was changed while it was copied is not."""
        said = spoiled or capture_failure(lambda: self._holder.hold(slot, job))
        self._failure = said if isinstance(said, RankFailure) else None


def start_step_cache(
    checkpointer: CheckpointEngine, lull: threading.Event | None = None
) -> StepCache | None:
    """Return what holds the steps of this life if every rank can; else tell why not. Collective.

    Crash: nothing was stored.

    Args:
        checkpointer: of the life; it has resumed.
        lull: as in ``Holding``.
    """
    desk, *_ = _lent(checkpointer)
    persister = checkpointer._persister  # noqa: SLF001 - who has the address
    found = capture_failure(lambda: holder_for(persister, desk))
    with _agreeing(desk) as settle:
        reason = settle("begin", _why_not(found), _first_reason)
        if isinstance(found, StepCacheClient) and not reason:
            return StepCache(checkpointer, found, lull, _near_sums(found, desk, settle))
    if isinstance(found, StepCacheClient):
        found.close()
    desk.tell(StepCacheDisabled(reason))
    return None


def _why_not(found: Any) -> str:
    """Return why there is no holder; nothing if there is one."""
    if isinstance(found, RankFailure):
        return found.message
    return found if isinstance(found, str) else ""


def _near_sums(
    holder: StepCacheClient, desk: CheckpointContext, settle: _Settle
) -> HostLocalSum | None:
    """Return what adds numbers of all ranks up if they are on one host. Collective."""
    if (
        desk.world.size == 1
        or read_integer(os.environ, "LOCAL_WORLD_SIZE", 0, least=0) != desk.world.size
    ):
        return None
    own: Any = capture_failure(lambda: holder.page(PAGE_BYTES))
    path = "" if isinstance(own, RankFailure) else str(own[0])
    paths = settle("pages", path, lambda paths: paths if all(paths) else [])
    pages: Any = capture_failure(lambda: [_page(Path(one)) for one in paths])
    is_there = bool(paths) and not isinstance(pages, RankFailure)
    if not settle("mapped", is_there, all):
        return None
    pages[desk.world.rank] = own[1]
    return HostLocalSum(pages, desk.world.rank)


def _page(path: Path) -> memoryview:
    return map_file(path, PAGE_BYTES, writable=False)


def _lent(
    checkpointer: CheckpointEngine,
) -> tuple[CheckpointContext, Generation, tuple[DedupBase, ...], bool]:
    """Return what the saves of this life are made with, as of now."""
    # The other half of the spine: it makes the same jobs, for another place.
    one = checkpointer
    return one._desk, one._begun(), one._bases, one._has_saved  # noqa: SLF001


@contextmanager
def _agreeing(desk: CheckpointContext) -> Iterator[_Settle]:
    """Inside, ranks rule over what they show: by a topic, what is shown, and the rule."""
    # The desk's own comms may be at work for a save in flight.
    comms = desk.comms.apart("hold", desk.world)

    def settle(topic: str, mine: Any, rule: Callable[[list[Any]], Any]) -> Any:
        return agree(comms, topic, mine, rule, desk.limits.within_seconds)

    try:
        yield settle
    finally:
        comms.close()


def _first_reason(reasons: list[str]) -> str:
    return next(filter(None, reasons), "")
