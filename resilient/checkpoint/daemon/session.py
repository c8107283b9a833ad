"""Session of one rank in the saver daemon, and the commit of the rank's cached steps.

The saver daemon is a process per host that writes checkpoints in the background. A rank hands over
a save to its session. After the session has acknowledged the hand-over, the death of the rank has
no effect on the save. The session has the bytes, its own connection to the key-value store of all
ranks, and a thread that writes the save. When a rank announces a job, its session registers a
failure notice in the key-value store. If the rank dies before the hand-over, this notice makes its
peers fail at once. Only the process that reserved memory may write to this memory. A stale process
therefore never overwrites the bytes of a newer process.

A cached step is a step whose state is copied to the daemon's memory and not to the repository. The
copy needs no agreement with other ranks. If the layout is unchanged, the rank sends no message to
the daemon. Each rank has two slots of memory and swaps them, so one slot is complete while the
other is overwritten.

When the ranks have ended for any reason, their sessions read the slots. The sessions agree on the
newest step that is complete on every rank, and save this step as the trainers would. The save has
the generation (number of the attempt) of the ranks, and their record of trained samples (ledger
segment). The save is rejected if a newer attempt has begun (fence). The next attempt therefore
finds an ordinary checkpoint.
"""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.checkpoint.catalog import committed
from resilient.checkpoint.context import CheckpointContext
from resilient.checkpoint.daemon.connection import FileStream, is_gone, read_failure
from resilient.checkpoint.daemon.messages import SessionTiers, decode_job, parse_hello
from resilient.checkpoint.daemon.step_slots import SLOTS, read_step_slot, slot_memory_name
from resilient.checkpoint.events import CachedStepCommitted, CachedStepLost
from resilient.checkpoint.restore.memory_store import StagedFileRecord
from resilient.checkpoint.save.persist import SaveHistory, persist, space_topic
from resilient.checkpoint.throttle import SessionThrottle
from resilient.clock import SystemClock
from resilient.distributed.coordination import ControlGroup, RankFailure, agree, capture_failure
from resilient.distributed.kv_store import Address, SocketKVStore
from resilient.errors import UsageError
from resilient.events import Emitter, Level, console, json_lines
from resilient.format.keys import parse_checkpoint
from resilient.storage.retry import with_retry_events

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from resilient.checkpoint.daemon.memory import MemoryQuota, SharedBuffer, SharedMemoryPool
    from resilient.checkpoint.daemon.messages import SessionInfo
    from resilient.checkpoint.daemon.step_slots import StoredStep
    from resilient.checkpoint.save.persist import SaveJob
    from resilient.format.manifest import Receipt
    from resilient.storage.store import Store

_SLICE_SECONDS = 0.5


class RankSession:
    """Session of one rank, which answers its requests; used by the thread of its connection.

    Args:
        pool: Shared memory of this host.
        release_ended: Callback before the first bytes of this rank, which may release memory of
            ended ranks.

    Attributes:
        verbs: Handler of each request.
        url: Repository to which this rank saves; empty before its hello.
        scope: Name of the rank's attempt, as a scope of keys; empty before its hello.
        has_rank_left: Whether the rank is gone.
        kept_files: Files of the newest checkpoint that this session committed, without
            overwritten files.
        pacer: Throttle of its saves, which can be hurried.
    """

    def __init__(self, pool: SharedMemoryPool, release_ended: Callable[[], None]) -> None:
        self._pool = pool
        self._release_ended = release_ended
        self._info: SessionInfo | None = None
        self.url = self.scope = ""
        self._tiers: SessionTiers | None = None
        self._kv_store: SocketKVStore | None = None
        self._segments: dict[str, SharedBuffer] = {}
        self.kept_files: Mapping[str, StagedFileRecord] = {}
        self._history = SaveHistory()
        self.pacer = SessionThrottle()
        self._outcome: Any = None
        self._stream: FileStream | None = None
        self._is_idle = threading.Event()
        self._is_idle.set()
        self.has_rank_left = False
        self._lock = threading.Lock()
        self.verbs: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "hello": self._hello,
            "join": self._join,
            "reserve": self._reserve,
            "release": self._release,
            "begin": self._begin,
            "save": self._save,
            "finish": self._finish,
            "wait": self._wait,
        }

    @property
    def is_busy(self) -> bool:
        """True if a job is in flight."""
        return not self._is_idle.is_set()

    @property
    def is_promoting(self) -> bool:
        """True if a promotion of its near tier is in progress."""
        return self._tiers is not None and self._tiers.is_busy

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Execute a request and return the answer; never raises."""
        verb = self.verbs.get(str(request.get("verb")))
        if verb is None:
            return RankFailure(UsageError.code, f"no verb {request.get('verb')!r:.40}").to_json()
        outcome = capture_failure(partial(verb, request))
        return outcome.to_json() if isinstance(outcome, RankFailure) else outcome

    def leave(self) -> None:
        """Release all memory that no job in flight needs, because the rank is gone."""
        with self._lock:
            self.has_rank_left = True
            self.pacer.leave()
            if self._stream is not None:
                self._stream.fail(is_gone())
            if not self.is_busy:
                self._release_resources()

    def forget(self) -> None:
        """Release all memory; only for a session whose rank is gone and that is not busy."""
        with self._lock:
            self.kept_files = {}
            self._free_segments()

    def _hello(self, request: Mapping[str, Any]) -> dict[str, Any]:
        info = self._info = parse_hello(request)
        self.url, self.scope = info.url, info.scope
        self._tiers = SessionTiers(info, info.near) if info.near else None
        return self._pool.share.to_json()

    def _join(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self._kv_store = SocketKVStore(Address.from_json(request["board"]))
        return {}

    def _reserve(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self._refuse_if_busy()
        name, size_bytes = str(request["name"]), int(request["size_bytes"])
        segment = self._segments.get(name)
        if segment is None or segment.size_bytes < size_bytes:
            if segment is not None:
                self._pool.release(self._segments.pop(name))
            segment = self._segments[name] = self._pool.take(size_bytes)
        return {"path": str(segment.path), "size_bytes": segment.size_bytes}

    def _release(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self._refuse_if_busy()
        for name in request["names"]:
            segment = self._segments.pop(str(name), None)
            if segment is not None:
                self._pool.release(segment)
        # The memory kept for the next attempt may be among it.
        self.kept_files = {}
        return {}

    def _begin(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Record the announcement of a job; from here on this rank's silence is a failure."""
        self._refuse_if_busy()
        self._release_ended()
        self.kept_files = {}
        _, comms = self._require_joined()
        assert self._kv_store is not None, "joined"  # noqa: S101
        register_disconnect_failure(self._kv_store, comms, str(request["topic"]))
        return {}

    def _save(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self._refuse_if_busy()
        self._begin_to_save(request)
        return {}

    def _begin_to_save(self, request: Mapping[str, Any]) -> None:
        info, comms = self._require_joined()
        rank, limits = info.world.rank, info.limits
        job, stream = decode_job(request["job"], self._memory_of, rank, limits.within_seconds)
        job = _bounded(job, self._pool.share, self._segments)
        emit = emitter_of(info, request["context"])
        context = CheckpointContext(
            with_retry_events(info.store, emit),
            comms,
            limits,
            emit.clock,
            emit,
            info.signing,
            token=job.token,
        )
        if self._tiers:
            generation, parent = job.about.checkpoint.generation, job.about.parent
            context = self._tiers.context_for(context, request["tiers"], generation, parent)
        self._start(lambda: self._run(context, job), stream)

    def _finish(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Start to promote the last commit; ``wait`` reports the end."""
        self._refuse_if_busy()
        promoter, within_seconds = self._tiers, float(request["within_seconds"])

        def work() -> None:
            self._end(
                capture_failure(lambda: promoter.finish(within_seconds) if promoter else None)
            )

        self._start(work, FileStream((), 0.0))
        return {}

    def _start(self, work: Callable[[], None], stream: FileStream) -> None:
        self._outcome = None
        self._stream = stream
        self._is_idle.clear()
        threading.Thread(target=work, name="persist", daemon=True).start()

    def _wait(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result, or that it is pending and which file is requested next."""
        stream = self._stream
        if request.get("is_urgent"):
            self.pacer.hurry()
        if stream is not None:
            if "came" in request:
                stream.file_arrived(int(request["came"]))
            if "failed" in request:
                stream.fail(read_failure(request["failed"]))
            file_request = stream.next(_SLICE_SECONDS)
            if file_request is not None:
                return {"is_pending": True, "wanted": file_request.to_json()}
        if not self._is_idle.is_set():
            return {"is_pending": True}
        if isinstance(self._outcome, RankFailure):
            return self._outcome.to_json()
        return {"rested_seconds": self._history.rested_seconds}

    def _run(self, context: CheckpointContext, job: SaveJob) -> None:
        pace = self.pacer.begin(
            job.size_bytes,
            job.began_seconds,
            0.0 if job.streamed else context.limits.pause_seconds_max,
        )
        with self._pool.saving(self.url):
            verdict = capture_failure(lambda: persist(context, job, self._history, pace))
        self.pacer.end()
        if not isinstance(verdict, RankFailure):
            self.kept_files = _staged_records(verdict, job, self._segments)
        self._end(verdict)

    def _end(self, verdict: Any) -> None:
        with self._lock:
            self._outcome = verdict
            if self.has_rank_left:
                self._release_resources()
            # This must be the last step, because a caller that sees the end may request the kept
            # files.
            self._is_idle.set()
            if self._stream is not None:
                self._stream.close()

    def _release_resources(self) -> None:
        if self._tiers is not None:
            # A promotion may take long, and no caller here waits for it.
            threading.Thread(target=self._tiers.close, name="onwards", daemon=True).start()
        if self._kv_store is not None:
            self._kv_store.close()
            self._kv_store = None
        if not self.kept_files:
            self._free_segments()

    def _free_segments(self) -> None:
        while self._segments:
            self._pool.release(self._segments.popitem()[1])

    def _memory_of(self, name: str, size_bytes: int) -> memoryview:
        segment = self._segments.get(name)
        if segment is None or not 0 <= size_bytes <= segment.size_bytes:
            raise UsageError(f"`{name}` has no {size_bytes} bytes of memory here")
        return segment.memory[:size_bytes]

    def _require_joined(self) -> tuple[SessionInfo, ControlGroup]:
        if self._info is None or self._kv_store is None:
            raise UsageError("hello and join must come first")
        return self._info, ControlGroup(self._kv_store, self._info.world, self._info.scope)

    def _refuse_if_busy(self) -> None:
        if self.is_busy:
            raise UsageError("a save is in flight")


def emitter_of(info: SessionInfo, context: Mapping[str, Any]) -> Emitter:
    """Return the emitter for the events of a rank's saves.

    Crash: nothing was stored.
    """
    level = Level.INFO if info.world.is_coordinator else Level.WARNING
    sinks = [console(level), *([json_lines(Path(info.events))] if info.events else [])]
    return Emitter(SystemClock(), tuple(sinks), dict(context))


def register_disconnect_failure(kv_store: SocketKVStore, comms: ControlGroup, topic: str) -> None:
    """Register a failure notice, so that peers fail at once if this rank dies before hand-over.

    The key-value store publishes the notice on disconnect (a "last will" in MQTT terms).

    Crash: nothing was stored.
    """
    value: dict[str, Any] = is_gone().to_json()
    author: int | str = comms.world.rank
    if comms.world.is_coordinator:
        # Without the coordinator there is no decision, so its notice is the decision.
        author, value = "ruling", value | {"rank": 0}
    for agreement in (space_topic(topic), topic):
        kv_store.will(comms.key(agreement, author), json.dumps(value).encode())


def _bounded(job: SaveJob, share: MemoryQuota, segments: Mapping[str, SharedBuffer]) -> SaveJob:
    """Return a job whose copies fit into the rest of the rank's share, unless it has a limit."""
    if job.copies_bytes_max is not None:
        return job
    used_bytes = sum(segment.size_bytes for segment in segments.values())
    return replace(job, copies_bytes_max=share.spare_bytes(used_bytes))


def _staged_records(
    receipt: Receipt, job: SaveJob, segments: Mapping[str, SharedBuffer]
) -> dict[str, StagedFileRecord]:
    """Return the files that were stored as they are here; reduced files are left out."""
    staged_sizes = {file.name: len(file.data) for file in job.files}
    return {
        job.about.checkpoint.key(file.name): StagedFileRecord(
            str(segments[file.name].path), file.proof
        )
        for file in receipt.files
        if staged_sizes.get(file.name) == file.size_bytes
    }


COMMIT_STEP_SECONDS = 10.0
"""Deadline for the daemons of other hosts to report their cached steps; their ranks end too."""
_COMMIT_TOPIC = "hold/land"


class StepCacheSession(RankSession):
    """Session of one rank that caches steps; used by the thread of its connection.

    Args:
        pool: Shared memory of this host.
        wait_for_attempt: Function that waits until the ranks and the saves of an attempt on this
            host have ended. Returns whether they have ended.
    """

    def __init__(
        self, pool: SharedMemoryPool, wait_for_attempt: Callable[[StepCacheSession], bool]
    ) -> None:
        super().__init__(pool, lambda: None)
        self._wait_for_attempt = wait_for_attempt
        self._complete_steps: dict[int, StoredStep] = {}
        self._is_commit_started = False
        self.verbs = {
            "hold_hello": self._hello,
            "join": self._join,
            "reserve": self._reserve,
            "release": self._release,
        }

    @property
    def is_caching(self) -> bool:
        """True if the rank is connected and may cache a step."""
        return not self._is_commit_started and not self.has_rank_left

    def leave(self) -> None:
        """Commit the newest step that all ranks cached, if it is newer than the last save."""
        self._start_commit(is_gone=True)
        super().leave()

    def discard(self) -> None:
        """Discard the cached steps, because a newer attempt began and this rank may still write."""
        self._start_commit(is_gone=False)

    def _start_commit(self, *, is_gone: bool) -> None:
        with self._lock:
            if self._is_commit_started or self._kv_store is None:
                return
            # The order counts: an observer that sees no cached step any more must see the save.
            self._is_idle.clear()
            self._is_commit_started = True
        threading.Thread(
            target=self._commit_cached_step, kwargs={"is_gone": is_gone}, name="land", daemon=True
        ).start()

    def _commit_cached_step(self, *, is_gone: bool) -> None:
        """Agree on a step with the other daemons' sessions, and save it."""
        if is_gone:
            self._complete_steps = self._read()
        if self._complete_steps and not self._wait_for_attempt(self):
            self._complete_steps = {}
        slot = capture_failure(self._choose)
        if not isinstance(slot, int):
            self._report_lost(slot)
            self._end(slot)
            return
        started = capture_failure(lambda: self._start_save(slot))
        if isinstance(started, RankFailure):
            self._report_lost(started)
            self._end(started)

    def _read(self) -> dict[int, StoredStep]:
        """Return the steps that the slots hold whole; their writer is gone."""
        slots = {slot: read_step_slot(partial(self._slot_memory, slot)) for slot in range(SLOTS)}
        return {slot: value for slot, value in slots.items() if value is not None}

    def _slot_memory(self, slot: int, name: str) -> memoryview:
        segment = self._segments.get(slot_memory_name(slot, name))
        return memoryview(b"") if segment is None else segment.memory

    def _choose(self) -> int | None:
        """Return the slot of the step to commit, which all ranks have, or None. Collective."""
        info, comms = self._require_joined()
        parent_by_folder = {
            value.checkpoint.folder: value.previous_folder
            for value in self._complete_steps.values()
        }
        ruling = agree(
            comms,
            _COMMIT_TOPIC,
            parent_by_folder,
            lambda steps: choose_step(info.store, steps),
            COMMIT_STEP_SECONDS,
        )
        slots = [
            slot
            for slot, value in self._complete_steps.items()
            if value.checkpoint.folder == ruling["folder"]
        ]
        return slots[0] if slots else None

    def _start_save(self, slot: int) -> None:
        cached_step = self._complete_steps[slot]
        info, comms = self._require_joined()
        job = cached_step.job(info.world.rank, f"hold/{cached_step.checkpoint.step}")
        assert self._kv_store is not None, "joined"  # noqa: S101
        register_disconnect_failure(self._kv_store, comms, job["topic"])
        self._keep_only(slot)
        self._begin_to_save({"job": job, "context": cached_step.context, "tiers": {}})

    def _keep_only(self, slot: int) -> None:
        """Release all other memory; the files get their names in a save."""
        prefix = f"{slot}/"
        for name in [segment for segment in self._segments if not segment.startswith(prefix)]:
            self._pool.release(self._segments.pop(name))
        self._segments = {
            name.removeprefix(prefix): segment for name, segment in self._segments.items()
        }

    def _run(self, context: CheckpointContext, job: SaveJob) -> None:
        super()._run(context, job)
        if not isinstance(self._outcome, RankFailure):
            context.emit_once(CachedStepCommitted(job.about.checkpoint.folder))
        else:
            self._report_lost(self._outcome)

    def _report_lost(self, failure: Any) -> None:
        """Emit from the coordinator that the cached step is lost, if a failure is the reason."""
        info, cached = self._info, list(self._complete_steps.values())
        if isinstance(failure, RankFailure) and cached and info and info.world.is_coordinator:
            newest = max(cached, key=lambda step: step.checkpoint)
            emit = emitter_of(info, newest.context)
            emit(CachedStepLost(newest.checkpoint.folder, failure.message))


def choose_step(store: Store, steps_by_rank: list[Mapping[str, str]]) -> dict[str, Any]:
    """Return the cached step to commit: the newest valid step that all ranks have.

    The step must be newer than all commits of its own attempt, and no newer attempt may have begun
    to commit. The checkpoint that the step's ledger continues must exist, because a save may have
    failed after an older step.

    Crash: reads only.

    Args:
        store: Repository.
        steps_by_rank: For each rank, the checkpoint that the step's ledger continues, by the step's
            folder.
    """
    shared_folders = set.intersection(*(set(steps_of_rank) for steps_of_rank in steps_by_rank))
    steps = sorted(filter(None, map(parse_checkpoint, shared_folders)), reverse=True)
    commits = committed(store) if steps else []
    roots = {"", *(checkpoint.folder for checkpoint in commits)}
    for step in steps:
        if steps_by_rank[0][step.folder] in roots and (not commits or commits[0] < step):
            return {"folder": step.folder}
    return {"folder": ""}
