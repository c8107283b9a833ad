"""Step cache: every step in the memory of the saver daemon, for a commit if the ranks die.

The saver daemon is one process per host that survives its ranks. If the ranks die, the daemons
commit the newest cached step as a checkpoint. The next diagram shows one step.

::

    capture -> copy what a forward pass changes -> | copy the rest -> | mark the step complete
    training waits                                 | forward          | backward, before_update()

The cache writes no file, and the ranks do not communicate. A cached step therefore costs only one
copy of the state. The thread that marks a step complete needs the interpreter lock. A forward pass
needs this lock too, but torch's backward pass does not. Training may signal the start of the
backward pass. In this case the thread waits for this signal.
:mod:`resilient.checkpoint.daemon.session` explains why there is always a step that is complete on
all ranks.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.checkpoint.daemon.step_cache import StepCacheClient, make_step_cache_client
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

# Largest state that is copied within a backward pass. An earlier copy would take the interpreter
# lock from the forward pass at every tensor.
_BACKWARD_COPY_BYTES_MAX = 64 << 20
_AgreeOn = Callable[[str, Any, Callable[[list[Any]], Any]], Any]


class StepCache:
    """Cache of an attempt's newest steps, in the daemon memory of all ranks or of none.

    Args:
        checkpointer: Engine of the attempt; it has resumed.
        client: Step cache client of this rank.
        lull: Event that training sets whenever it does not need the interpreter for a while.
        near_sums: See the attribute.

    Attributes:
        near_sums: Sum of numbers over all ranks; None if the ranks are on several hosts.
    """

    def __init__(
        self,
        checkpointer: CheckpointEngine,
        client: StepCacheClient,
        lull: threading.Event | None = None,
        near_sums: HostLocalSum | None = None,
    ) -> None:
        self.near_sums = near_sums
        self._checkpointer = checkpointer
        self._client = client
        self._staging_buffers = [
            StagingBuffers(partial(client.buffer, slot)) for slot in range(SLOTS)
        ]
        self._capture_cache = CaptureCache()
        self._stable_storages = StableStorageCache()
        self._overlap = BackgroundStaging()
        self._lull = lull or threading.Event()
        self._cores = usable_cores()
        # The size of the first step is unknown, so assume that its copy is long.
        self._size_bytes, self._step_count = _BACKWARD_COPY_BYTES_MAX + 1, 0
        self._unverified: tuple[int, DeferredCopies] | None = None
        self._failure: RankFailure | None = None

    def hold(
        self, step: int, parts: Mapping[str, Part], about: CheckpointInfo, *, overlap: bool
    ) -> None:
        """Copy the state of a step to host memory; with ``overlap``, partly during training.

        When this method returns, the step survives the death of every rank while the daemons live.
        With ``overlap``, the step survives only after ``before_update`` has returned. The step
        becomes a checkpoint only if the ranks die.

        Collective: every rank, same step; the ranks do not communicate.
        Crash: the previous step is still completely cached, or the last save is newer.

        Args:
            step: Step number, for the name of a later checkpoint.
            parts: Parts to cache.
            about: Further content of the manifest.
            overlap: As in ``Checkpointer.save``.

        Raises:
            ResilientError: The saver daemon is gone, or has no memory left.
        """
        context, generation, bases, has_saved = _engine_state(self._checkpointer)
        began_seconds = context.clock.monotonic_seconds()
        stall, slot = Stopwatch(context.clock), self._step_count % SLOTS
        with stall.running():
            self.before_update()
            if self._failure is not None:
                raise self._failure.to_error(1)
            self._step_count += 1
            self._client.invalidate(slot)
            about = self._checkpointer.with_setup(about)
            snapshot = capture(step, parts, context.world.rank, self._capture_cache)
            is_background_copy = overlap and self._prefers_background_copy()
            stable_tensors = self._stable_storages.of(parts, snapshot) if is_background_copy else ()
            staged = stage(snapshot, context.world, self._staging_buffers[slot], *stable_tensors)
            job = SaveJob(
                about=draft_manifest(context, generation, step, about, ()),
                files=staged.files,
                parts=staged.parts,
                keep=(),
                is_first=not has_saved,
                topic="",
                began_seconds=began_seconds,
                stall_seconds=stall.seconds,
                bases=bases if context.limits.save_unchanged == "refer" else (),
                segment=about.segment,
                token=generation.token,
            )
            self._size_bytes = staged.size_bytes
            if staged.rest:
                self._lull.clear()
                begin = self._lull if staged.size_bytes <= _BACKWARD_COPY_BYTES_MAX else None
                mark_complete = partial(self._mark_complete_late, slot, job, staged.rest)
                self._unverified = slot, staged.rest
                self._overlap.copy(staged.rest, mark_complete, begin)
            else:
                self._mark_complete(slot, job, None)

    def before_update(self) -> None:
        """Wait until the live state may change; call it before each optimizer step.

        Crash: as in ``hold``.
        """
        self._lull.set()
        self._overlap.settle()
        unverified_copies, self._unverified = self._unverified, None
        if unverified_copies is not None:
            self._invalidate_if_changed(*unverified_copies)

    def drop(self) -> None:
        """Discard the cached steps, because training goes back on purpose.

        Crash: a cached step may still be committed.
        """
        self.before_update()
        capture_failure(self._client.drop)

    def close(self) -> None:
        """Release the cache; the daemon commits a cached step that is newer than the last save.

        Crash: as in ``hold``.
        """
        self.before_update()
        self._overlap.close()
        self._client.close()
        for arena in self._staging_buffers:
            arena.close()

    def _prefers_background_copy(self) -> bool:
        """Return whether a copy beside training is better than a copy that training waits for.

        If training has a thread on every core, a copy beside training takes time from one core
        anyway. In addition, the threads wake each other, which costs more. For a large copy,
        training would have to wait too long.
        """
        ranks = read_integer(os.environ, "LOCAL_WORLD_SIZE", 1, least=1)
        return self._size_bytes > _BACKWARD_COPY_BYTES_MAX or has_idle_core(ranks, self._cores)

    def _mark_complete_late(
        self, slot: int, job: SaveJob, copies: DeferredCopies, copy_failure: RankFailure | None
    ) -> None:
        self._lull.wait()
        # torch counts a change of a tensor after the change. All changes of the forward pass are
        # counted by now.
        outcome = copy_failure or capture_failure(copies.require_unchanged)
        self._mark_complete(slot, job, outcome if isinstance(outcome, RankFailure) else None)

    def _invalidate_if_changed(self, slot: int, copies: DeferredCopies) -> None:
        """Void a slot whose sources had changed at the last check."""
        outcome = capture_failure(copies.require_unchanged)
        if isinstance(outcome, RankFailure):
            self._failure = outcome
            capture_failure(partial(self._client.invalidate, slot))

    def _mark_complete(self, slot: int, job: SaveJob, copy_failure: RankFailure | None) -> None:
        """Mark a step complete, unless its sources changed during the copy."""
        answer = copy_failure or capture_failure(lambda: self._client.hold(slot, job))
        self._failure = answer if isinstance(answer, RankFailure) else None


def start_step_cache(
    checkpointer: CheckpointEngine, lull: threading.Event | None = None
) -> StepCache | None:
    """Start the step cache of this attempt if every rank can; else emit the reason. Collective.

    Crash: nothing was stored.

    Args:
        checkpointer: Engine of the attempt; it has resumed.
        lull: As in ``StepCache``.
    """
    context, *_ = _engine_state(checkpointer)
    persister = checkpointer._persister  # noqa: SLF001 - who has the address
    client = capture_failure(lambda: make_step_cache_client(persister, context))
    with _agreement(context) as agree_on:
        reason = agree_on("begin", _reason_without_client(client), _first_reason)
        if isinstance(client, StepCacheClient) and not reason:
            return StepCache(checkpointer, client, lull, _host_local_sum(client, context, agree_on))
    if isinstance(client, StepCacheClient):
        client.close()
    context.emit_once(StepCacheDisabled(reason))
    return None


def _reason_without_client(client: Any) -> str:
    """Return the reason for a missing client; empty if there is a client."""
    if isinstance(client, RankFailure):
        return client.message
    return client if isinstance(client, str) else ""


def _host_local_sum(
    client: StepCacheClient, context: CheckpointContext, agree_on: _AgreeOn
) -> HostLocalSum | None:
    """Return a sum over all ranks if they are on one host, else None. Collective."""
    if (
        context.world.size == 1
        or read_integer(os.environ, "LOCAL_WORLD_SIZE", 0, least=0) != context.world.size
    ):
        return None
    own_page: Any = capture_failure(lambda: client.page(PAGE_BYTES))
    path = "" if isinstance(own_page, RankFailure) else str(own_page[0])
    paths = agree_on("pages", path, lambda paths: paths if all(paths) else [])
    pages: Any = capture_failure(lambda: [_map_page(Path(page)) for page in paths])
    is_mapped = bool(paths) and not isinstance(pages, RankFailure)
    if not agree_on("mapped", is_mapped, all):
        return None
    pages[context.world.rank] = own_page[1]
    return HostLocalSum(pages, context.world.rank)


def _map_page(path: Path) -> memoryview:
    return map_file(path, PAGE_BYTES, writable=False)


def _engine_state(
    checkpointer: CheckpointEngine,
) -> tuple[CheckpointContext, Generation, tuple[DedupBase, ...], bool]:
    """Return the current state from which the engine makes its saves."""
    # The step cache makes the same jobs as the engine, for another place.
    engine = checkpointer
    return engine._context, engine._require_generation(), engine._bases, engine._has_saved  # noqa: SLF001


@contextmanager
def _agreement(context: CheckpointContext) -> Iterator[_AgreeOn]:
    """Yield a function by which the ranks agree: topic, value shown, and the rule."""
    # The context's own control group may be in use by a save in flight.
    comms = context.comms.apart("hold", context.world)

    def agree_on(topic: str, own_result: Any, rule: Callable[[list[Any]], Any]) -> Any:
        return agree(comms, topic, own_result, rule, context.limits.within_seconds)

    try:
        yield agree_on
    finally:
        comms.close()


def _first_reason(reasons: list[str]) -> str:
    return next(filter(None, reasons), "")
