"""DaemonSaveExecutor: hand a job over, hear the result.

What the ranks' answers about their keepers amount to: pure, called by the coordinator.

End a keeper that says nothing, so that it never goes on with what others do in its place.

A process that only sleeps would wake in the middle of a save that was persisted without it, put
its own files over those that are committed, and rotate by what it was told before it slept.

Who listens, while training goes on, for what became of a save that the keeper took over.

How a save ended whose keeper is gone: the ruling on the board says, or else the store.

A rank's side of the keeper: stage into shared memory, hand the job over, hear the verdict.

Nothing waits for the keeper on the way: it is told of a job while its bytes are copied, and a
thread listens for the verdict. All ranks hand over, or none does: after each copy they agree
whether every one of them reached its keeper. If one did not, this save is persisted by a thread
in each rank, as without a keeper.
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
from resilient.checkpoint.daemon.connection import DaemonConnection, feed, tell_once
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


def first_if_all(boards: list[Any]) -> Any:
    """Return the first rank's board if every rank has one."""
    return boards[0] if all(boards) else None


def choose_route(shown: list[Any]) -> dict[str, Any]:
    """Return why not all can hand over, if so, and whether any has to be streamed."""
    reasons = [
        f"rank {rank}: {one['why_not']}" if len(shown) > 1 else one["why_not"]
        for rank, one in enumerate(shown)
        if one["why_not"]
    ]
    return {"why_not": next(iter(reasons), ""), "streams": any(one["streams"] for one in shown)}


def is_any_gone(shown: list[Any]) -> bool:
    """Say whether any rank has lost its keeper."""
    return any(one["gone"] for one in shown)


_GONE_SECONDS = 2.0


class DaemonProcess:
    """The very process that a number was, whoever has that number later.

    Args:
        pid: as this process sees it; 0 where it sees none.
    """

    def __init__(self, pid: int) -> None:
        self._handle: int | None = None
        with suppress(OSError):
            # Refused by kernels before Linux 5.3 and some sandboxes.
            self._handle = os.pidfd_open(pid)

    def end(self, within_seconds: float = _GONE_SECONDS) -> bool:
        """Kill it; say whether it is gone.

        Crash: it is gone or as it was.

        Args:
            within_seconds: how long it may take to go: in state D it does not.
        """
        if self._handle is None:
            return False
        try:
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        except ProcessLookupError:
            return True
        except OSError:
            # Somebody else's process, or one that may not be signalled from here.
            return False
        gone = select.poll()
        gone.register(self._handle, select.POLLIN)
        return bool(gone.poll(within_seconds * 1000))

    def close(self) -> None:
        """Let the handle go."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


_LOOK_SECONDS = 0.5


class ResultListener:
    """A thread that hears the verdict on one job, and gives the keeper the files it asks for.

    Args:
        to: returns the conversation with the keeper, which was told of the job; raises
            ``PeerFailed`` if there is none.
        job: as this rank has it.
        slots: the memory that the keeper may ask to be filled, by name.
        left_seconds: until this process must be gone; finite once somebody said so.
        clock: time.

    Attributes:
        heard: a Failure, or what the keeper said besides; only once the thread ended.
        took_seconds: from the beginning of the job until the verdict.
        rested_seconds: of these the keeper rested.
    """

    def __init__(
        self,
        to: Callable[[], DaemonConnection],
        job: SaveJob,
        slots: Mapping[str, memoryview],
        left_seconds: Callable[[], float],
        clock: Clock,
    ) -> None:
        self._to, self._job, self._slots, self._clock = to, job, slots, clock
        self._left_seconds = left_seconds
        self._is_awaited = False
        self.heard: Any = None
        self.took_seconds = self.rested_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="resilient-listen", daemon=True)
        self._thread.start()

    @property
    def is_listening(self) -> bool:
        """Whether there is no verdict yet."""
        return self._thread.is_alive()

    def join(self, is_called: Callable[[], bool] | None = None) -> bool:
        """Wait until there is a verdict or the keeper is given up.

        From here on the save is urgent, as it is once this process is to end.

        A keeper waits for those of all ranks. When one of them sleeps its rank alone knows, and
        the others would hear nothing for as long as a save may take.

        Args:
            is_called: says whether another rank has given its keeper up.

        Returns:
            Whether it did before there was a verdict.
        """
        self._is_awaited = True
        while self._thread.is_alive():
            self._thread.join(_LOOK_SECONDS)
            if (
                is_called is not None
                and capture_failure(is_called) is True
                and self._thread.is_alive()
            ):
                return True
        return False

    def _run(self) -> None:
        self.heard = heard = capture_failure(self._hear)
        self.took_seconds = self._clock.monotonic_seconds() - self._job.began_seconds
        if not isinstance(heard, RankFailure):
            self.rested_seconds = float(heard["rested_seconds"])

    def _hear(self) -> dict[str, Any]:
        """Return when the keeper says that the job is durable.

        Raises:
            PeerFailed: the keeper did not take it, or is gone.
            ResilientError: its verdict.
        """
        talk = self._to()
        try:
            talk.hear()
        except ResilientError as error:
            raise PeerFailed(error.message) from error
        return feed(talk, self._job.streamed, self._slots, self._is_urgent)

    def _is_urgent(self) -> bool:
        return self._is_awaited or self._left_seconds() < math.inf


def resolve_outcome(
    desk: CheckpointContext, job: SaveJob, board: Address | None, gone: str
) -> None:
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
    found = capture_failure(lambda: is_committed(desk.store, checkpoint) or _hear(desk, job, board))
    if isinstance(found, RankFailure) and found.code == Fenced.code:
        raise found.to_error(1)
    # The keeper may have put the manifest and died before anybody heard the ruling.
    landed = found is True or capture_failure(lambda: is_committed(desk.store, checkpoint)) is True
    if not landed:
        raise SaveFailed(
            f"{checkpoint} was not saved: {gone}; older checkpoints are intact",
            hint=f"resilient ckpt ls {shell_quote(desk.store.url)}",
        )


def _hear(desk: CheckpointContext, job: SaveJob, address: Address | None) -> bool:
    if desk.world.is_coordinator or address is None:
        raise PeerFailed("the keeper that would have ruled is gone")
    board = SocketKVStore(address)
    try:
        # A save that there is no room for, or that a rank never handed over, ends at the first.
        for topic in (space_topic(job.topic), job.topic):
            read_decision(desk.comms.over(board), topic, desk.limits.within_seconds)
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


def delete_failed_save(desk: CheckpointContext, job: SaveJob) -> None:
    """Delete what a save left that every keeper gave up, where room is bounded.

    All keepers have answered, so none of them writes any more; a bucket's answer may come late.
    """
    if desk.leads and free_bytes(desk.store) is not None:
        capture_failure(lambda: discard_uncommitted(desk.store, job.about.checkpoint, desk.token))


_ANSWER_SECONDS = 10.0


class DaemonSaveExecutor:
    """Hands jobs to the keeper of this host, and to ``fallback`` when a rank has none.

    Args:
        address: where the keeper is.
        fallback: persists in this process.

    Attributes:
        leased: what the keeper has lent this rank for its saves.
    """

    def __init__(self, address: DaemonAddress, fallback: SaveExecutor) -> None:
        self.address = address
        self._fallback = fallback
        self._talk: DaemonConnection | None = None
        self._process = DaemonProcess(0)
        self.board: Address | None = None
        self._url, self._why_not = "", "it was not asked yet"
        self._is_announced = False
        self.leased = LeasedBuffers(lambda verb, **message: self._to().ask(verb, **message))
        self._handed: tuple[CheckpointContext, SaveJob] | None = None
        self._ended: Any = None
        self._listener: ResultListener | None = None
        self._is_last_kept = self._is_mute = False
        self.took_seconds = self.rested_seconds = 0.0

    def open(self, desk: CheckpointContext) -> Store:
        """Connect, wait for what past lives left in flight, and agree on the keepers' board.

        Collective: every rank, before it asks what to resume from.
        """
        mine = capture_failure(lambda: self._settle(desk))
        self._why_not = mine.message if isinstance(mine, RankFailure) else ""
        shown = None if isinstance(mine, RankFailure) else mine
        within_seconds = desk.limits.within_seconds
        board = agree(desk.comms, "keeper/board", shown, first_if_all, within_seconds)
        if board is None:
            self._lose(self._why_not or "another host has none")
        if self._talk is None:
            return desk.store
        self.board = Address.from_json(board)
        return self._recalling(desk, board)

    def begin(self, topic: str) -> None:
        """Announce a job; if this process dies now, its peers fail at once."""
        self._is_announced = True
        if self._talk is None:
            return
        begun = capture_failure(lambda: self._to().tell("begin", topic=topic))
        self._why_not = begun.message if isinstance(begun, RankFailure) else ""

    def buffer(self, name: str, size_bytes: int) -> memoryview:
        """Return shared memory, or private memory if there is none for a job announced.

        Raises:
            ConfigError: ``host_bytes_max`` is too small.
            ResilientError: there is none yet; past lives still have theirs.
        """
        if self._talk is not None and not self._why_not:
            try:
                return self.leased.get(name, size_bytes)
            except ConfigError:
                raise
            except ResilientError as error:
                if not self._is_announced:
                    raise
                self._why_not = error.message
        return self._fallback.buffer(name, size_bytes)

    def streams(self, sizes: Mapping[str, int]) -> bool:
        """Say whether this rank's share of the keeper's memory is smaller than these files.

        Raises:
            ConfigError: without a keeper, if this process may not even hold one of them.
        """
        if self._talk is None or self._why_not:
            return self._fallback.streams(sizes)
        has_room = capture_failure(lambda: self.leased.has_room(sizes))
        return has_room is False

    def submit(self, desk: CheckpointContext, job: SaveJob) -> None:
        """Hand the job over if every rank can; else persist it here. Collective.

        If a rank has no room for its files, all see this job to its end before they go on.
        """
        self._is_announced = False
        shared = capture_failure(lambda: self._all_shared(job))
        why_not = shared.message if isinstance(shared, RankFailure) else self._why_not
        shown: Any = {"why_not": why_not, "streams": bool(job.streamed)}
        if isinstance(shared, RankFailure) and isinstance(shared.cause, ConfigError):
            # What the user asked for is too little: no way around it, on any rank.
            shown = shared
        way = agree(desk.comms, f"{job.topic}/way", shown, choose_route, desk.limits.within_seconds)
        if way["why_not"] or isinstance(shared, RankFailure):
            desk.tell(events.DaemonBypassed(job.about.checkpoint.folder, way["why_not"]))
            self._is_last_kept = False
            self._fallback.submit(desk, job)
            return
        shared, slots = shared
        self._handed = (desk, shared)
        # If it is gone, the peers learn it from the keepers' board, and all of us at the next wait.
        capture_failure(lambda: self._to().tell("save", **_handover(desk, shared, slots)))
        self._listener = ResultListener(self._to, job, slots, self.address.left_seconds, desk.clock)
        if way["streams"]:
            self._ended = capture_failure(self._see_to_its_end)

    def wait(self) -> None:
        """Return when the job handed over is durable.

        A keeper that died is no verdict: the ruling on the board is, or else the store. Without
        any, the trainers persist by themselves: the bytes still lie in their memory. Collective
        if the job is not durable.

        Raises:
            SaveFailed: it could not be made so; older checkpoints are intact.
            Fenced: a newer life began, so nothing was committed.
        """
        ended, self._ended = self._ended, None
        if isinstance(ended, RankFailure):
            raise ended.cause or ended.to_error(1)
        self._see_to_its_end()

    def close(self) -> None:
        """Leave the keeper; it keeps what was committed last for the next life."""
        self._fallback.close()
        self._lose("it was closed")
        self._process.close()

    def _see_to_its_end(self) -> None:
        handed, self._handed = self._handed, None
        listener = self._listener
        if handed is None or listener is None:
            self._fallback.wait()
            _remember(self, self._fallback)
            return
        self._is_last_kept = True
        if listener.is_listening:
            tell_once(self.address.path, "hurry", url=self._url)
        desk, job = handed
        if is_called := listener.join(partial(desk.comms.is_called, _here(job))):
            self._lose("another rank gave its keeper up")
            listener.join()
        _remember(self, listener)
        failed = listener.heard
        if isinstance(failed, RankFailure) and isinstance(failed.cause, PeerFailed):
            self._lose(failed.message)
            # One that sleeps is killed: then its part is over, and its peers hear of it.
            sleeps = self._is_mute and not self._process.end()
            if sleeps:
                capture_failure(lambda: desk.comms.call(_here(job)))
            # It may never show the others its part: there is no ruling to wait for.
            board = None if sleeps or is_called else self.board
            failed = capture_failure(partial(resolve_outcome, desk, job, board, failed.message))
        if isinstance(failed, RankFailure) and not self._persist_here(desk, job, failed):
            return
        if desk.promoter and desk.leads:
            desk.promoter.note(job.about.checkpoint, job.keep)

    def finish(self, within_seconds: float) -> bool:
        """Have the keeper bring what it committed last to the durable tier.

        Args:
            within_seconds: how long the keepers of other hosts may take to come.

        Returns:
            Whether it did: not if the last save was not its, or it is gone.

        Raises:
            SaveFailed: the near tier alone has it.
            Fenced: a newer life began.
        """
        if not self._is_last_kept:
            return False
        try:
            self._to().ask("finish", within_seconds=within_seconds)
            while self._to().ask("wait").get("is_pending"):
                continue
        except PeerFailed as error:
            self._lose(error.message)
            return False
        return True

    def _settle(self, desk: CheckpointContext) -> dict[str, Any]:
        """Introduce this rank, wait for older saves, and return where the keeper's board is."""
        talk = self._talk = DaemonConnection(self.address.path, self.address.left_seconds)
        self._process = DaemonProcess(talk.peer_pid)
        hello = hello_message(self.address, desk)
        # As it was then: the working folder may be another one later.
        self._url = hello["url"]
        welcome = talk.ask("hello", **hello)
        self.leased.share = MemoryQuota(**welcome["share"])
        if welcome["is_busy"]:
            _wait_for_past_lives(talk, desk)
        board: dict[str, Any] = welcome["board"]
        return board | {"host": board["host"] or self.address.host}

    def _recalling(self, desk: CheckpointContext, board: Mapping[str, Any]) -> Store:
        """Join the keepers' board, and return a store that knows what the keeper holds."""
        answer = capture_failure(lambda: _joined(self._to(), board))
        if isinstance(answer, RankFailure):
            self._lose(answer.message)
            return desk.store
        held = {key: StagedFileRecord.from_json(one) for key, one in answer["held"].items()}
        return MemoryCachedStore(
            desk.store, held, lambda key: desk.emit(events.MemoryCopyRejected(key))
        )

    def _all_shared(self, job: SaveJob) -> tuple[SaveJob, dict[str, memoryview]]:
        """Return the job with every file in shared memory, and slots for those that are streamed.

        Small files are copied now.
        """
        if self._why_not:
            raise PeerFailed(self._why_not)
        # The announcement was heard while the bytes were copied.
        self._to().hear()
        files = tuple(self.leased.with_memory(file) for file in job.files)
        slots = self.leased.slots(job.streamed)
        # Said once: whoever persists it after all writes the very files that the keeper would,
        # which may only be asleep and put one of them later.
        return replace(job, files=files, copies_bytes_max=self.leased.spare_bytes), slots

    def _persist_here(self, desk: CheckpointContext, job: SaveJob, failed: RankFailure) -> bool:
        """Persist in this process if a rank's keeper is gone, else raise what failed. Collective.

        Returns:
            Whether a keeper made it durable after all.

        Raises:
            SaveFailed: it could not be made durable this way either.
            Fenced: a newer life began.
        """
        shown = failed if failed.code == Fenced.code else {"gone": self._talk is None}
        # A rank that died cannot answer; its peers shall not wait for it as for a slow store.
        within_seconds = min(desk.limits.within_seconds, _ANSWER_SECONDS)
        topic = _here(job)
        try:
            is_gone = agree(desk.comms, f"{topic}/why", shown, is_any_gone, within_seconds)
        except (DeadlineExceeded, PeerFailed):
            # A keeper that was only slow has told those who still listened.
            if capture_failure(lambda: is_committed(desk.store, job.about.checkpoint)) is True:
                return True
            raise failed.cause or failed.to_error(1) from None
        if not is_gone:
            delete_failed_save(desk, job)
            raise failed.cause or failed.to_error(1)
        desk.tell(events.DaemonBypassed(job.about.checkpoint.folder, failed.message))
        self._is_last_kept = False
        self._fallback.submit(desk, replace(job, topic=topic, has_rival=True))
        self._fallback.wait()
        _remember(self, self._fallback)
        return False

    def _to(self) -> DaemonConnection:
        """Return the conversation with the keeper.

        Raises:
            PeerFailed: there is none.
        """
        if self._talk is not None and self._talk.is_over:
            self._lose("it did not answer")
        if self._talk is None:
            raise PeerFailed(f"the keeper is gone: {self._why_not}")
        return self._talk

    def _lose(self, why: str) -> None:
        self._why_not = self._why_not or why
        # One that was only asleep may still read them: nobody writes there any more.
        self.leased.forget()
        if self._talk is not None:
            self._is_mute = self._talk.is_silent
            self._talk.close()
            self._talk = None


def _handover(
    desk: CheckpointContext, job: SaveJob, slots: Mapping[str, memoryview]
) -> dict[str, Any]:
    said = encode_job(job, desk.world.rank, slots)
    return {"job": said, "context": dict(desk.emit.context), "tiers": tiers_to_json(desk)}


def _joined(talk: DaemonConnection, board: Mapping[str, Any]) -> dict[str, Any]:
    talk.tell("join", board=board)
    return talk.ask("recall")


def _wait_for_past_lives(talk: DaemonConnection, desk: CheckpointContext) -> None:
    deadline_seconds = desk.clock.monotonic_seconds() + desk.limits.within_seconds
    while desk.clock.monotonic_seconds() < deadline_seconds:
        if not talk.ask("settle")["is_busy"]:
            return


def _remember(mine: DaemonSaveExecutor, last: SaveExecutor | ResultListener) -> None:
    mine.took_seconds, mine.rested_seconds = last.took_seconds, last.rested_seconds


def _here(job: SaveJob) -> str:
    """Return where the ranks meet to persist what a keeper does not."""
    return f"{job.topic}/here"
