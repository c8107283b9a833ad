"""Rank<->daemon connection, streamed files.

Files of a save that is larger than the keeper's memory: they come through a few slots of it.

The keeper asks for a file, its rank copies the file into a slot, the keeper writes it and the
slot is free again. So what is written at once is bounded by the slots, and training waits: the
rank must not change its state before the keeper has a verdict. A file may be asked for again, for
parity or a signature; it is the same then.

A rank's talk with the keeper of its host: it may ask on before it reads the answers.
"""

from __future__ import annotations

import math
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from resilient.distributed.coordination import RankFailure, capture_failure
from resilient.distributed.kv_store import JsonLineSocket, MalformedMessage
from resilient.errors import DeadlineExceeded, PeerFailed, ResilientError, SaveFailed
from resilient.format.safetensors_file import StreamedFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from resilient.format.manifest import TensorEntry
    from resilient.format.safetensors_file import FileContent

SLOTS_MAX = 4


@dataclass(frozen=True, slots=True, eq=False)
class StreamBuffer:
    """Memory for one file at a time, as the keeper sees it.

    Attributes:
        name: what the rank knows it by.
        memory: the keeper's own view of it.
    """

    name: str
    memory: memoryview


@dataclass(slots=True, eq=False)
class _Wanted:
    """A file that the rank shall copy into a slot."""

    number: int
    file: str
    slot: StreamBuffer
    is_there: threading.Event = field(default_factory=threading.Event)

    def to_json(self) -> list[Any]:
        """Return a JSON-able value."""
        return [self.number, self.file, self.slot.name]


class FileStream:
    """The slots of one save in flight; the threads that write it ask, and the rank's answers.

    Args:
        slots: of one rank, each long enough for any of its files.
        within_seconds: how long a file may take to come.
    """

    def __init__(self, slots: Sequence[StreamBuffer], within_seconds: float) -> None:
        self._free = deque(slots)
        self._within_seconds = within_seconds
        self._wanted: deque[_Wanted] = deque()
        self._asked: dict[int, _Wanted] = {}
        self._count = 0
        self._failure: RankFailure | None = None
        self._is_over = False
        self._changed = threading.Condition()

    @contextmanager
    def lend(self, file: str, size_bytes: int) -> Iterator[memoryview]:
        """Yield a file's content, which the rank copies into a slot now.

        Raises:
            PeerFailed: the rank is gone.
            DeadlineExceeded: it did not come in time.
            ResilientError: the rank could not copy it.
        """
        slot = self._take()
        try:
            self._ask(_Wanted(self._number(), file, slot))
            yield slot.memory[:size_bytes]
        finally:
            with self._changed:
                self._free.append(slot)
                self._changed.notify_all()

    def next(self, within_seconds: float) -> _Wanted | None:
        """Return what the rank shall copy next; None if nothing is wanted for so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._wanted or self._is_over, within_seconds)
            if not self._wanted:
                return None
            wanted = self._wanted.popleft()
            self._asked[wanted.number] = wanted
            return wanted

    def came(self, number: int) -> None:
        """Take note that a file is in its slot."""
        with self._changed:
            wanted = self._asked.pop(number, None)
        if wanted is not None:
            wanted.is_there.set()

    def fail(self, failure: RankFailure) -> None:
        """Let everyone who waits for a file fail: no more will come."""
        with self._changed:
            self._failure = self._failure or failure
            for wanted in (*self._wanted, *self._asked.values()):
                wanted.is_there.set()
            self._wanted.clear()
            self._changed.notify_all()

    def close(self) -> None:
        """Let the rank stop to wait for what is wanted next."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _number(self) -> int:
        with self._changed:
            self._count += 1
            return self._count

    def _take(self) -> StreamBuffer:
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._free or self._failure, self._within_seconds
            ):
                raise DeadlineExceeded("no slot of the keeper's memory became free in time")
            self._require()
            return self._free.popleft()

    def _ask(self, wanted: _Wanted) -> None:
        with self._changed:
            self._require()
            self._wanted.append(wanted)
            self._changed.notify_all()
        if not wanted.is_there.wait(self._within_seconds):
            raise DeadlineExceeded(f"`{wanted.file}` was not copied in time")
        self._require()

    def _require(self) -> None:
        if self._failure is not None:
            raise self._failure.to_error(1)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a rank that comes through a stream, as the keeper sees it.

    Attributes:
        name: file name inside the checkpoint's folder.
        size_bytes: its length.
        tensors: what it holds, with offsets into the content.
        stream: where it comes through.
    """

    name: str
    size_bytes: int
    tensors: tuple[TensorEntry, ...]
    stream: FileStream

    @contextmanager
    def lend(self) -> Iterator[memoryview]:
        """Yield the content, in memory that is another file's afterwards."""
        with self.stream.lend(self.name, self.size_bytes) as data:
            yield data


def feed(
    talk: DaemonConnection,
    files: Sequence[FileContent],
    slots: Mapping[str, memoryview],
    is_urgent: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Copy every file that the keeper asks for, until it has a verdict.

    Crash: the save is not committed, unless it was.

    Args:
        talk: with the keeper, which has taken the save.
        files: of this rank.
        slots: the memory that it may ask to be filled, by name.
        is_urgent: whether somebody waits for the save, so that it shall rest no more; asked and
            told again and again, for a job that has not begun can be hastened by nobody.

    Returns:
        What it says besides.

    Raises:
        PeerFailed: the keeper is gone.
        ResilientError: its verdict.
    """
    named = {file.name: file for file in files if isinstance(file, StreamedFile)}
    note: dict[str, object] = {}
    while (answer := talk.ask("wait", is_urgent=is_urgent(), **note)).get("is_pending"):
        note = {}
        if "wanted" in answer:
            number, name, slot = answer["wanted"]
            done = capture_failure(partial(_fill, named.get(name), slots.get(slot)))
            note = {"came": number}
            if isinstance(done, RankFailure):
                note = {"failed": done.to_json()["failure"]}
    return answer


def _fill(file: StreamedFile | None, slot: memoryview | None) -> None:
    if file is None or slot is None or len(slot) < file.size_bytes:
        raise SaveFailed("the keeper asked for what was not handed over")
    file.fill(slot[: file.size_bytes])


def is_gone() -> RankFailure:
    """Return the failure of a rank that ended before its bytes were stored."""
    return RankFailure(PeerFailed.code, "it ended before its bytes were stored")


def read_failure(value: Mapping[str, str]) -> RankFailure:
    """Return the failure that a rank told."""
    code = str(value.get("code", ResilientError.code))
    return RankFailure(code, str(value.get("message", "")), str(value.get("hint", "")))


# The keeper answers within a slice, so silence for much longer means that it is stuck.
SILENCE_SECONDS = 15.0
# One that is only slow answers sooner than this, however little time is left.
_SILENCE_SECONDS_MIN = 2.0
_SILENT_SHARE = 1 / 3
_LOOK_SECONDS = 0.5
_CREDENTIALS = "3i"
_CLOSED = "it closed the connection"
_CONVERSATIONS: WeakSet[DaemonConnection] = WeakSet()


def no_deadline() -> float:
    """Return how long a process has that nobody has told to end."""
    return math.inf


class DaemonConnection:
    """Requests and their answers, in order; used by one thread at a time.

    What was told is the keeper's, whatever becomes of this process; only the answer says
    whether the keeper took it. After an error of the connection nothing can be told any more.

    Args:
        path: of the keeper's socket.
        left_seconds: until this process must be gone, asked again and again while the keeper is
            silent: a stop may come meanwhile.

    Attributes:
        is_over: whether nothing can be told any more.
        is_silent: whether that is because no answer came in time; else the keeper ended.

    Raises:
        PeerFailed: nobody listens there.
    """

    def __init__(self, path: str, left_seconds: Callable[[], float] = no_deadline) -> None:
        self._left_seconds = left_seconds
        self._connection = _unix_socket()
        self._connection.settimeout(SILENCE_SECONDS)
        self._lines = JsonLineSocket(self._connection)
        self._there = select.poll()
        self._there.register(self._connection, select.POLLIN)
        self._unread = 0
        self.is_over = self.is_silent = False
        try:
            self._connection.connect(path)
        except OSError as error:
            self.close()
            raise PeerFailed(f"no keeper at {path}: {error}") from error
        _CONVERSATIONS.add(self)

    def tell(self, verb: str, **message: Any) -> None:
        """Send a request and leave its answer for later.

        Raises:
            PeerFailed: the keeper is gone.
        """
        try:
            self._connection.settimeout(self._silence_seconds)
            self._lines.send({"verb": verb, **message})
        except OSError as error:
            self.is_silent = isinstance(error, TimeoutError)
            raise self._gone(str(error)) from error
        self._unread += 1

    def hear(self) -> dict[str, Any]:
        """Read every answer that is due and return the last.

        Raises:
            PeerFailed: the keeper is gone.
            ResilientError: the first answer that is a failure, as an error of its kind.
        """
        answer: dict[str, Any] = {}
        failed: ResilientError | None = None
        while self._unread:
            answer = self._next()
            if "failure" in answer and failed is None:
                failed = RankFailure(**answer["failure"]).to_error(1)
        if failed is not None:
            raise failed
        return answer

    def ask(self, verb: str, **message: Any) -> dict[str, Any]:
        """Send a request and return its answer.

        Raises:
            PeerFailed: the keeper is gone.
            ResilientError: this answer or one before it is a failure.
        """
        self.tell(verb, **message)
        return self.hear()

    def require_there(self) -> None:
        """Look whether the keeper is there, and wait for nothing. One that is stuck is there.

        Raises:
            PeerFailed: it is gone.
        """
        try:
            # Asked for nothing else: what there is to read is nothing, or the end.
            if not self._there.poll(0) or self._connection.recv(1, socket.MSG_PEEK):
                return
        except OSError as error:
            raise self._gone(str(error)) from error
        raise self._gone(_CLOSED)

    def leave_to_parent(self) -> None:
        """In a process that was forked: let go of the connection, which goes on in the parent.

        Whoever keeps it open, a worker that loads data too, would be taken for the rank.
        """
        self.is_over = True
        self._connection.close()

    @property
    def peer_pid(self) -> int:
        """The process that listens at the socket, as this one sees it; 0 if it does not.

        From SO_PEERCRED, see unix(7): who called listen().
        """
        size = struct.calcsize(_CREDENTIALS)
        said = self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        return int(struct.unpack(_CREDENTIALS, said)[0])

    def close(self) -> None:
        """Leave, and wake a thread that listens."""
        self.is_over = True
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _next(self) -> dict[str, Any]:
        self._unread -= 1
        try:
            answer = self._receive()
        except (OSError, MalformedMessage) as error:
            raise self._gone(str(error)) from error
        if answer is None:
            raise self._gone(_CLOSED)
        return answer

    def _receive(self) -> dict[str, Any] | None:
        silent_seconds = 0.0
        while True:
            began_seconds = time.monotonic()
            self._connection.settimeout(_LOOK_SECONDS)
            try:
                return self._lines.receive()
            except TimeoutError:
                # Where this process did not run, suspended as the keeper was, nobody was silent.
                looked_seconds = time.monotonic() - began_seconds
                silent_seconds += min(looked_seconds, 2 * _LOOK_SECONDS)
                if silent_seconds >= self._silence_seconds:
                    self.is_silent = True
                    raise

    @property
    def _silence_seconds(self) -> float:
        return silence_seconds_max(self._left_seconds())

    def _gone(self, why: str) -> PeerFailed:
        # A late answer would be taken for that of another question.
        self.close()
        self._unread = 0
        return PeerFailed(f"the keeper is gone: {why}")


def _unix_socket() -> socket.socket:
    try:
        return socket.socket(socket.AF_UNIX)
    except OSError as error:
        raise PeerFailed(f"no way to the keeper: {error}") from error


def silence_seconds_max(left_seconds: float) -> float:
    """Return how long to wait for a silent keeper, so that what it was to do can be done after all.

    Args:
        left_seconds: until this process must be gone; infinite if nobody says so.
    """
    return max(min(left_seconds * _SILENT_SHARE, SILENCE_SECONDS), _SILENCE_SECONDS_MIN)


def tell_once(path: str, verb: str, **message: Any) -> None:
    """Tell the keeper what needs no answer, on a way of its own; one that is gone is passed over.

    Args:
        path: of its socket.
        verb: what it shall do.
        message: what it must know for that.
    """
    with suppress(PeerFailed):
        talk = DaemonConnection(path)
        try:
            talk.tell(verb, **message)
        finally:
            talk.close()


def _leave_to_parent() -> None:
    for one in tuple(_CONVERSATIONS):
        one.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
