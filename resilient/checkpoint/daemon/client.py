"""Client of the saver daemon in a rank: shared memory, hand-over of save jobs, results of saves.

The saver daemon is a process per host that writes checkpoints in the background. A save that
exceeds the daemon's memory is streamed file by file. Only then does a rank wait for the daemon
during a save.

A rank announces the job to the daemon while the bytes are copied, and a thread of the rank waits
for the result. Either all ranks hand over a save or none does. After each copy the ranks agree
whether every rank reached its daemon. If a rank did not reach its daemon, a thread in each rank
persists this save.

A daemon that does not answer is killed before the ranks take over its save. A suspended daemon
could otherwise continue in the middle of that save. The daemon would then overwrite committed files
and delete files according to an outdated plan.

If the daemon has died, the rank reads the result of the save from the key-value store of all ranks.
If this store has no result, the rank looks for the manifest (table of contents) in the repository.
The manifest exists only if the checkpoint was committed.
"""

from __future__ import annotations

import math
import os
import select
import signal
import threading
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from resilient.checkpoint import events
from resilient.checkpoint.daemon.connection import DaemonConnection, send_once, serve_files
from resilient.checkpoint.daemon.memory import LeasedBuffers, MemoryQuota
from resilient.checkpoint.daemon.messages import (
    DaemonAddress,
    encode_job,
    hello_message,
    tiers_to_json,
)
from resilient.checkpoint.garbage_collection import discard_uncommitted
from resilient.checkpoint.restore.memory_store import MemoryCachedStore, StagedFileRecord
from resilient.checkpoint.save.persist import space_topic
from resilient.distributed.coordination import RankFailure, agree, capture_failure, read_decision
from resilient.distributed.kv_store import Address, SocketKVStore
from resilient.errors import (
    ConfigError,
    DeadlineExceeded,
    Fenced,
    KeyNotFound,
    PeerFailed,
    ResilientError,
    SaveFailed,
)
from resilient.redaction import shell_quote
from resilient.storage.store import free_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from resilient.checkpoint.context import CheckpointContext
    from resilient.checkpoint.save.executor import SaveExecutor
    from resilient.checkpoint.save.persist import SaveJob
    from resilient.clock import Clock
    from resilient.format.keys import CheckpointId
    from resilient.storage.store import Store


def first_if_all(stores: list[Any]) -> Any:
    """Return the first rank's key-value store if every rank has one."""
    return stores[0] if all(stores) else None


def choose_route(answers: list[Any]) -> dict[str, Any]:
    """Return the first reason to bypass the daemon, and whether a rank must stream files."""
    reasons = [
        f"rank {rank}: {report['why_not']}" if len(answers) > 1 else report["why_not"]
        for rank, report in enumerate(answers)
        if report["why_not"]
    ]
    return {
        "why_not": next(iter(reasons), ""),
        "streams": any(report["streams"] for report in answers),
    }


def has_lost_daemon(answers: list[Any]) -> bool:
    """Return whether any rank has lost its daemon."""
    return any(report["gone"] for report in answers)


_KILL_WAIT_SECONDS = 2.0


class DaemonProcess:
    """Handle of the daemon's process, safe against reuse of its pid.

    Args:
        pid: Process id as this process sees it; 0 if it is not visible.
    """

    def __init__(self, pid: int) -> None:
        self._handle: int | None = None
        with suppress(OSError):
            # Kernels before Linux 5.3 and some sandboxes refuse this call.
            self._handle = os.pidfd_open(pid)

    def end(self, within_seconds: float = _KILL_WAIT_SECONDS) -> bool:
        """Kill the process; return whether it is gone.

        Crash: the process is gone or unchanged.

        Args:
            within_seconds: Deadline for the end of the process; a process in state D does not end.
        """
        if self._handle is None:
            return False
        try:
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        except ProcessLookupError:
            return True
        except OSError:
            # A process of another user, or one that may not be signalled from here.
            return False
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return bool(poll.poll(within_seconds * 1000))

    def close(self) -> None:
        """Close the handle."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


_POLL_SECONDS = 0.5


class ResultListener:
    """Thread that waits for one job's result, and provides the files that the daemon requests.

    Args:
        connect: Function that returns the connection over which the job was sent. It raises
            ``PeerFailed`` if there is no connection.
        job: Job before its files were moved to shared memory.
        slots: Shared memory by slot name; the thread fills it with bytes that the daemon requests.
        left_seconds: Seconds until this process must end; finite after a stop request.
        clock: Time source.

    Attributes:
        outcome: Failure, or the daemon's answer; valid after the thread has ended.
        took_seconds: Time from the beginning of the job until its result.
        rested_seconds: Pauses of the daemon in that time.
    """

    def __init__(
        self,
        connect: Callable[[], DaemonConnection],
        job: SaveJob,
        slots: Mapping[str, memoryview],
        left_seconds: Callable[[], float],
        clock: Clock,
    ) -> None:
        self._connect, self._job, self._slots, self._clock = connect, job, slots, clock
        self._left_seconds = left_seconds
        self._is_awaited = False
        self.outcome: Any = None
        self.took_seconds = self.rested_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="resilient-listen", daemon=True)
        self._thread.start()

    @property
    def is_listening(self) -> bool:
        """True if the result is still pending."""
        return self._thread.is_alive()

    def join(self, is_called: Callable[[], bool] | None = None) -> bool:
        """Wait until the result arrives or this rank stops waiting for its daemon.

        From this call on, or from a stop request on, the daemon saves without pauses.

        Each daemon waits for the daemons of all other ranks. If a daemon is suspended, only its own
        ranks detect that. The other ranks would wait until the deadline of the save.

        Args:
            is_called: Callback that returns whether another rank has stopped waiting for its
                daemon.

        Returns:
            Whether another rank stopped waiting before the result arrived.
        """
        self._is_awaited = True
        while self._thread.is_alive():
            self._thread.join(_POLL_SECONDS)
            if (
                is_called is not None
                and capture_failure(is_called) is True
                and self._thread.is_alive()
            ):
                return True
        return False

    def _run(self) -> None:
        self.outcome = result = capture_failure(self._receive_result)
        self.took_seconds = self._clock.monotonic_seconds() - self._job.began_seconds
        if not isinstance(result, RankFailure):
            self.rested_seconds = float(result["rested_seconds"])

    def _receive_result(self) -> dict[str, Any]:
        """Return when the daemon reports that the job is durable.

        Raises:
            PeerFailed: The daemon did not accept it, or is gone.
            ResilientError: The failure that the daemon reported.
        """
        connection = self._connect()
        try:
            connection.receive()
        except ResilientError as error:
            raise PeerFailed(error.message) from error
        return serve_files(connection, self._job.streamed, self._slots, self._is_urgent)

    def _is_urgent(self) -> bool:
        return self._is_awaited or self._left_seconds() < math.inf


def resolve_outcome(
    context: CheckpointContext, job: SaveJob, kv_store: Address | None, loss: str
) -> None:
    """Check that a job is committed, after its daemon has ended without a result.

    Args:
        context: Context: repository and ranks.
        job: Job that was handed over.
        kv_store: Address of the daemons' key-value store; None if there is none.
        loss: Description of how the daemon ended.

    Raises:
        SaveFailed: The job is not committed.
        Fenced: A newer generation exists, so nothing was committed.
    """
    checkpoint = job.about.checkpoint
    outcome = capture_failure(
        lambda: is_committed(context.store, checkpoint) or _read_decision(context, job, kv_store)
    )
    if isinstance(outcome, RankFailure) and outcome.code == Fenced.code:
        raise outcome.to_error(1)
    # The daemon may have put the manifest and died before the decision arrived.
    was_committed = (
        outcome is True or capture_failure(lambda: is_committed(context.store, checkpoint)) is True
    )
    if not was_committed:
        raise SaveFailed(
            f"{checkpoint} was not saved: {loss}; older checkpoints are intact",
            hint=f"resilient ckpt ls {shell_quote(context.store.url)}",
        )


def _read_decision(context: CheckpointContext, job: SaveJob, address: Address | None) -> bool:
    if context.world.is_coordinator or address is None:
        raise PeerFailed("the saver daemon of the coordinator has ended")
    kv_store = SocketKVStore(address)
    try:
        # A save without enough space, or one that a rank never handed over, ends at the first
        # topic.
        for topic in (space_topic(job.topic), job.topic):
            read_decision(context.comms.over(kv_store), topic, context.limits.within_seconds)
    finally:
        kv_store.close()
    return True


def is_committed(store: Store, checkpoint: CheckpointId) -> bool:
    """Return whether the store has a checkpoint's manifest.

    Crash: reads only.

    Raises:
        StoreError: The store does not answer.
    """
    try:
        store.stat(checkpoint.manifest_key)
    except KeyNotFound:
        return False
    return True


def delete_failed_save(context: CheckpointContext, job: SaveJob) -> None:
    """Delete the files of a save that every daemon has abandoned, if the store's space is limited.

    All daemons have answered, so none of them still writes.
    """
    if context.is_near_tier_leader and free_bytes(context.store) is not None:
        capture_failure(
            lambda: discard_uncommitted(context.store, job.about.checkpoint, context.token)
        )


_ANSWER_SECONDS = 10.0


class DaemonSaveExecutor:
    """Save executor that uses the saver daemon of this host, or ``fallback`` if a rank has none.

    Args:
        address: Address of the daemon.
        fallback: Executor in this process.

    Attributes:
        leased: Shared memory that the daemon reserved for this rank's saves.
    """

    def __init__(self, address: DaemonAddress, fallback: SaveExecutor) -> None:
        self.address = address
        self._fallback = fallback
        self._connection: DaemonConnection | None = None
        self._process = DaemonProcess(0)
        self.kv_store_address: Address | None = None
        self._url, self._bypass_reason = "", "no verdict was requested yet"
        self._is_announced = False
        self.leased = LeasedBuffers(
            lambda verb, **message: self._require_connection().request(verb, **message)
        )
        self._current_save: tuple[CheckpointContext, SaveJob] | None = None
        self._result: Any = None
        self._listener: ResultListener | None = None
        self._is_last_by_daemon = self._was_silent = False
        self.took_seconds = self.rested_seconds = 0.0

    def open(self, context: CheckpointContext) -> Store:
        """Connect, wait for saves of past attempts, and agree on the daemons' key-value store.

        Collective: every rank, before it asks what to resume from.
        """
        settle_result = capture_failure(lambda: self._settle(context))
        self._bypass_reason = (
            settle_result.message if isinstance(settle_result, RankFailure) else ""
        )
        answer = None if isinstance(settle_result, RankFailure) else settle_result
        within_seconds = context.limits.within_seconds
        kv_store = agree(context.comms, "keeper/board", answer, first_if_all, within_seconds)
        if kv_store is None:
            self._disconnect(self._bypass_reason or "another host has no saver daemon")
        if self._connection is None:
            return context.store
        self.kv_store_address = Address.from_json(kv_store)
        return self._with_memory_copies(context, kv_store)

    def begin(self, topic: str) -> None:
        """Announce a job, so that the other ranks fail at once if this process dies."""
        self._is_announced = True
        if self._connection is None:
            return
        answer = capture_failure(lambda: self._require_connection().send("begin", topic=topic))
        self._bypass_reason = answer.message if isinstance(answer, RankFailure) else ""

    def buffer(self, name: str, size_bytes: int) -> memoryview:
        """Return shared memory, or private memory if an announced job cannot get shared memory.

        Raises:
            ConfigError: ``host_bytes_max`` is too small.
            ResilientError: No memory is free yet, because past attempts still use their memory.
        """
        if self._connection is not None and not self._bypass_reason:
            try:
                return self.leased.get(name, size_bytes)
            except ConfigError:
                raise
            except ResilientError as error:
                if not self._is_announced:
                    raise
                self._bypass_reason = error.message
        return self._fallback.buffer(name, size_bytes)

    def streams(self, sizes: Mapping[str, int]) -> bool:
        """Return whether these files exceed this rank's share of the daemon's memory.

        Raises:
            ConfigError: There is no daemon, and one of the files alone exceeds this process's
                memory limit.
        """
        if self._connection is None or self._bypass_reason:
            return self._fallback.streams(sizes)
        has_room = capture_failure(lambda: self.leased.has_room(sizes))
        return has_room is False

    def submit(self, context: CheckpointContext, job: SaveJob) -> None:
        """Hand the job over if every rank can do so; else persist the job here. Collective.

        If a rank has no memory for its files, all ranks wait here for the end of the job.
        """
        self._is_announced = False
        share_result = capture_failure(lambda: self._share_files(job))
        bypass_reason = (
            share_result.message if isinstance(share_result, RankFailure) else self._bypass_reason
        )
        report: Any = {"why_not": bypass_reason, "streams": bool(job.streamed)}
        if isinstance(share_result, RankFailure) and isinstance(share_result.cause, ConfigError):
            # The user's limit on memory is too small, so the save fails on all ranks.
            report = share_result
        route = agree(
            context.comms, f"{job.topic}/way", report, choose_route, context.limits.within_seconds
        )
        if route["why_not"] or isinstance(share_result, RankFailure):
            context.emit_once(events.DaemonBypassed(job.about.checkpoint.folder, route["why_not"]))
            self._is_last_by_daemon = False
            self._fallback.submit(context, job)
            return
        shared_job, slots = share_result
        self._current_save = (context, shared_job)
        # If the daemon is gone, the other ranks learn this from the key-value store. This rank
        # learns it in `wait`.
        capture_failure(
            lambda: self._require_connection().send(
                "save", **_save_message(context, shared_job, slots)
            )
        )
        self._listener = ResultListener(
            self._require_connection, job, slots, self.address.left_seconds, context.clock
        )
        if route["streams"]:
            self._result = capture_failure(self._complete_save)

    def wait(self) -> None:
        """Wait until the handed-over job is durable.

        If a daemon dies, its rank reads the decision from the key-value store, or else looks for
        the manifest. If neither exists, the trainers persist the job, because its bytes are still
        in their memory. Collective if the job is not durable.

        Raises:
            SaveFailed: The save could not be made durable; older checkpoints are intact.
            Fenced: A newer generation exists, so nothing was committed.
        """
        result, self._result = self._result, None
        if isinstance(result, RankFailure):
            raise result.cause or result.to_error(1)
        self._complete_save()

    def close(self) -> None:
        """Disconnect; the daemon keeps the bytes of the last commit for the next attempt."""
        self._fallback.close()
        self._disconnect("the connection was closed")
        self._process.close()

    def _complete_save(self) -> None:
        current_save, self._current_save = self._current_save, None
        listener = self._listener
        if current_save is None or listener is None:
            self._fallback.wait()
            _copy_timings(self, self._fallback)
            return
        self._is_last_by_daemon = True
        if listener.is_listening:
            send_once(self.address.path, "hurry", url=self._url)
        context, job = current_save
        if is_called := listener.join(partial(context.comms.is_called, _local_topic(job))):
            self._disconnect("another rank stopped using its saver daemon")
            listener.join()
        _copy_timings(self, listener)
        outcome = listener.outcome
        if isinstance(outcome, RankFailure) and isinstance(outcome.cause, PeerFailed):
            self._disconnect(outcome.message)
            # Kill a suspended daemon: the other daemons then detect its end and stop waiting.
            is_suspended = self._was_silent and not self._process.end()
            if is_suspended:
                capture_failure(lambda: context.comms.call(_local_topic(job)))
            # The daemon may never report its share to the others, so do not wait for a decision.
            kv_store = None if is_suspended or is_called else self.kv_store_address
            outcome = capture_failure(
                partial(resolve_outcome, context, job, kv_store, outcome.message)
            )
        if isinstance(outcome, RankFailure) and not self._persist_here(context, job, outcome):
            return
        if context.promoter and context.is_near_tier_leader:
            context.promoter.note(job.about.checkpoint, job.keep)

    def finish(self, within_seconds: float) -> bool:
        """Let the daemon promote its last commit to the durable tier.

        Args:
            within_seconds: Deadline for the daemons of other hosts to arrive.

        Returns:
            Whether the daemon promoted the commit. False if the daemon did not make the last save,
            or is gone.

        Raises:
            SaveFailed: Only the near tier has the last save.
            Fenced: A newer generation exists.
        """
        if not self._is_last_by_daemon:
            return False
        try:
            self._require_connection().request("finish", within_seconds=within_seconds)
            while self._require_connection().request("wait").get("is_pending"):
                continue
        except PeerFailed as error:
            self._disconnect(error.message)
            return False
        return True

    def _settle(self, context: CheckpointContext) -> dict[str, Any]:
        """Introduce the rank, wait for older saves, and return the key-value store's address."""
        connection = self._connection = DaemonConnection(
            self.address.path, self.address.left_seconds
        )
        self._process = DaemonProcess(connection.peer_pid)
        hello = hello_message(self.address, context)
        # The URL is resolved now, because the working folder may change later.
        self._url = hello["url"]
        welcome = connection.request("hello", **hello)
        self.leased.share = MemoryQuota(**welcome["share"])
        if welcome["is_busy"]:
            _wait_for_past_attempts(connection, context)
        kv_store: dict[str, Any] = welcome["board"]
        return kv_store | {"host": kv_store["host"] or self.address.host}

    def _with_memory_copies(self, context: CheckpointContext, kv_store: Mapping[str, Any]) -> Store:
        """Join the daemons' key-value store; return a store that also reads the daemon's memory."""
        answer = capture_failure(lambda: _join_and_recall(self._require_connection(), kv_store))
        if isinstance(answer, RankFailure):
            self._disconnect(answer.message)
            return context.store
        records = {key: StagedFileRecord.from_json(value) for key, value in answer["held"].items()}
        return MemoryCachedStore(
            context.store, records, lambda key: context.emit(events.MemoryCopyRejected(key))
        )

    def _share_files(self, job: SaveJob) -> tuple[SaveJob, dict[str, memoryview]]:
        """Return the job with all files in shared memory, and slots for streamed files.

        Small files are copied now.
        """
        if self._bypass_reason:
            raise PeerFailed(self._bypass_reason)
        # The daemon has answered the announcement while the bytes were copied.
        self._require_connection().receive()
        files = tuple(self.leased.with_memory(file) for file in job.files)
        slots = self.leased.slots(job.streamed)
        # Set the limit here, the same for the daemon and a fallback: the limit affects the content
        # of files. The daemon may only be suspended, and may put a file after the fallback.
        return replace(job, files=files, copies_bytes_max=self.leased.spare_bytes), slots

    def _persist_here(self, context: CheckpointContext, job: SaveJob, failed: RankFailure) -> bool:
        """Persist in this process if a rank's daemon is gone, else raise the failure. Collective.

        Returns:
            Whether a daemon made the save durable after all.

        Raises:
            SaveFailed: The save could not be made durable this way either.
            Fenced: A newer generation exists.
        """
        report = failed if failed.code == Fenced.code else {"gone": self._connection is None}
        # A dead rank cannot answer, so this deadline is shorter than that for a slow store.
        within_seconds = min(context.limits.within_seconds, _ANSWER_SECONDS)
        topic = _local_topic(job)
        try:
            is_gone = agree(context.comms, f"{topic}/why", report, has_lost_daemon, within_seconds)
        except (DeadlineExceeded, PeerFailed):
            # If the daemon was only slow, the ranks that still listened have its result.
            if capture_failure(lambda: is_committed(context.store, job.about.checkpoint)) is True:
                return True
            raise failed.cause or failed.to_error(1) from None
        if not is_gone:
            delete_failed_save(context, job)
            raise failed.cause or failed.to_error(1)
        context.emit_once(events.DaemonBypassed(job.about.checkpoint.folder, failed.message))
        self._is_last_by_daemon = False
        self._fallback.submit(context, replace(job, topic=topic, has_rival=True))
        self._fallback.wait()
        _copy_timings(self, self._fallback)
        return False

    def _require_connection(self) -> DaemonConnection:
        """Return the connection to the daemon.

        Raises:
            PeerFailed: There is none.
        """
        if self._connection is not None and self._connection.is_closed:
            self._disconnect("it did not answer")
        if self._connection is None:
            raise PeerFailed(f"the saver daemon has ended: {self._bypass_reason}")
        return self._connection

    def _disconnect(self, reason: str) -> None:
        self._bypass_reason = self._bypass_reason or reason
        # A suspended daemon may still read the buffers, so nothing is written there any more.
        self.leased.forget()
        if self._connection is not None:
            self._was_silent = self._connection.is_silent
            self._connection.close()
            self._connection = None


def _save_message(
    context: CheckpointContext, job: SaveJob, slots: Mapping[str, memoryview]
) -> dict[str, Any]:
    message = encode_job(job, context.world.rank, slots)
    return {"job": message, "context": dict(context.emit.context), "tiers": tiers_to_json(context)}


def _join_and_recall(connection: DaemonConnection, kv_store: Mapping[str, Any]) -> dict[str, Any]:
    connection.send("join", board=kv_store)
    return connection.request("recall")


def _wait_for_past_attempts(connection: DaemonConnection, context: CheckpointContext) -> None:
    deadline_seconds = context.clock.monotonic_seconds() + context.limits.within_seconds
    while context.clock.monotonic_seconds() < deadline_seconds:
        if not connection.request("settle")["is_busy"]:
            return


def _copy_timings(executor: DaemonSaveExecutor, last: SaveExecutor | ResultListener) -> None:
    executor.took_seconds, executor.rested_seconds = last.took_seconds, last.rested_seconds


def _local_topic(job: SaveJob) -> str:
    """Return the topic under which the ranks persist a job that a daemon does not."""
    return f"{job.topic}/here"
