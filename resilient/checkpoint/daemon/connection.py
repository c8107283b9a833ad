"""Connection of a rank to its saver daemon, and streaming of saves beyond the daemon's memory.

The saver daemon is a process per host that writes checkpoints in the background. A save that does
not fit into the daemon's memory is streamed through a few buffers in shared memory (slots). The
daemon requests a file, the rank copies the file into a slot, and the daemon writes the file from
the slot to the store. Then the slot is free for another file. The number of slots therefore limits
the bytes in flight. Training waits until the daemon reports the result of the save. Until then, the
rank must not change its state. The daemon may request the same file again, to compute parity
(redundant data for repairs) or a signature. The content of the file must then be unchanged.

A rank may send several requests to the daemon before it reads the daemon's answers to them.
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
    """Memory for one file at a time, as the daemon sees it.

    Attributes:
        name: Name of the memory at the rank.
        memory: The daemon's own view of the memory.
    """

    name: str
    memory: memoryview


@dataclass(slots=True, eq=False)
class _FileRequest:
    """File that the rank is to copy into a slot."""

    number: int
    file: str
    slot: StreamBuffer
    is_copied: threading.Event = field(default_factory=threading.Event)

    def to_json(self) -> list[Any]:
        """Return a JSON-able value."""
        return [self.number, self.file, self.slot.name]


class FileStream:
    """Slots of one save in flight; writer threads request files, and the rank's thread answers.

    Args:
        slots: Slots of one rank, each long enough for any of its files.
        within_seconds: Deadline for a file to arrive.
    """

    def __init__(self, slots: Sequence[StreamBuffer], within_seconds: float) -> None:
        self._free = deque(slots)
        self._within_seconds = within_seconds
        self._queue: deque[_FileRequest] = deque()
        self._requests: dict[int, _FileRequest] = {}
        self._count = 0
        self._failure: RankFailure | None = None
        self._is_over = False
        self._condition = threading.Condition()

    @contextmanager
    def lend(self, file: str, size_bytes: int) -> Iterator[memoryview]:
        """Yield a file's content in a slot, after the rank has copied it there.

        Raises:
            PeerFailed: The rank is gone.
            DeadlineExceeded: The file did not arrive in time.
            ResilientError: The rank could not copy the file.
        """
        slot = self._take_slot()
        try:
            self._ask(_FileRequest(self._number(), file, slot))
            yield slot.memory[:size_bytes]
        finally:
            with self._condition:
                self._free.append(slot)
                self._condition.notify_all()

    def next(self, within_seconds: float) -> _FileRequest | None:
        """Return the next file for the rank to copy; None if the daemon requests none in time."""
        with self._condition:
            self._condition.wait_for(lambda: self._queue or self._is_over, within_seconds)
            if not self._queue:
                return None
            request = self._queue.popleft()
            self._requests[request.number] = request
            return request

    def file_arrived(self, number: int) -> None:
        """Record that a file is in its slot."""
        with self._condition:
            request = self._requests.pop(number, None)
        if request is not None:
            request.is_copied.set()

    def fail(self, failure: RankFailure) -> None:
        """Make all requests for files fail, because no more files will arrive."""
        with self._condition:
            self._failure = self._failure or failure
            for request in (*self._queue, *self._requests.values()):
                request.is_copied.set()
            self._queue.clear()
            self._condition.notify_all()

    def close(self) -> None:
        """Stop the rank's wait for further requests."""
        with self._condition:
            self._is_over = True
            self._condition.notify_all()

    def _number(self) -> int:
        with self._condition:
            self._count += 1
            return self._count

    def _take_slot(self) -> StreamBuffer:
        with self._condition:
            if not self._condition.wait_for(
                lambda: self._free or self._failure, self._within_seconds
            ):
                raise DeadlineExceeded("no slot of the saver daemon's memory became free in time")
            self._require()
            return self._free.popleft()

    def _ask(self, request: _FileRequest) -> None:
        with self._condition:
            self._require()
            self._queue.append(request)
            self._condition.notify_all()
        if not request.is_copied.wait(self._within_seconds):
            raise DeadlineExceeded(f"`{request.file}` was not copied in time")
        self._require()

    def _require(self) -> None:
        if self._failure is not None:
            raise self._failure.to_error(1)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """File of a rank that arrives through a stream, as the daemon sees it.

    Attributes:
        name: File name inside the checkpoint's folder.
        size_bytes: Length.
        tensors: Tensors in the file, with offsets into the content.
        stream: Stream through which the file arrives.
    """

    name: str
    size_bytes: int
    tensors: tuple[TensorEntry, ...]
    stream: FileStream

    @contextmanager
    def lend(self) -> Iterator[memoryview]:
        """Yield the content, in memory that is reused for another file afterwards."""
        with self.stream.lend(self.name, self.size_bytes) as data:
            yield data


def serve_files(
    connection: DaemonConnection,
    files: Sequence[FileContent],
    slots: Mapping[str, memoryview],
    is_urgent: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Copy every file that the daemon requests, until the result arrives.

    Crash: the save is not committed, unless the daemon already did.

    Args:
        connection: Connection to the daemon, which has accepted the save.
        files: Files of this rank.
        slots: Memory that the daemon may request to be filled, by name.
        is_urgent: Whether training waits for the save, so that pauses must end. The rank sends this
            flag with every request, because a job that has not begun cannot be hurried.

    Returns:
        Further fields of the daemon's answer.

    Raises:
        PeerFailed: The daemon is gone.
        ResilientError: The failure that the daemon reported.
    """
    file_by_name = {file.name: file for file in files if isinstance(file, StreamedFile)}
    report: dict[str, object] = {}
    while (answer := connection.request("wait", is_urgent=is_urgent(), **report)).get("is_pending"):
        report = {}
        if "wanted" in answer:
            number, name, slot = answer["wanted"]
            outcome = capture_failure(partial(_fill, file_by_name.get(name), slots.get(slot)))
            report = {"came": number}
            if isinstance(outcome, RankFailure):
                report = {"failed": outcome.to_json()["failure"]}
    return answer


def _fill(file: StreamedFile | None, slot: memoryview | None) -> None:
    if file is None or slot is None or len(slot) < file.size_bytes:
        raise SaveFailed("the saver daemon requested bytes that were not offered")
    file.fill(slot[: file.size_bytes])


def is_gone() -> RankFailure:
    """Return the failure of a rank that ended before its bytes were stored."""
    return RankFailure(PeerFailed.code, "the connection ended before all bytes were stored")


def read_failure(value: Mapping[str, str]) -> RankFailure:
    """Return the failure that a rank sent."""
    code = str(value.get("code", ResilientError.code))
    return RankFailure(code, str(value.get("message", "")), str(value.get("hint", "")))


# The daemon answers within a slice, so a much longer silence means that it is stuck.
SILENCE_SECONDS = 15.0
# A daemon that is only slow answers sooner than this, however little time is left.
_SILENCE_SECONDS_MIN = 2.0
_SILENT_SHARE = 1 / 3
_POLL_SECONDS = 0.5
_CREDENTIALS = "3i"
_CLOSED = "the connection was closed"
_OPEN_CONNECTIONS: WeakSet[DaemonConnection] = WeakSet()


def no_deadline() -> float:
    """Return infinity: the process has no deadline."""
    return math.inf


class DaemonConnection:
    """Requests and their answers, in order; used by one thread at a time.

    A sent request reaches the daemon even if this process dies. Only the answer shows whether the
    daemon accepted the request. After a connection error this process can send no more requests.

    Args:
        path: Path of the daemon's socket.
        left_seconds: Callback for the seconds until this process must end. Called repeatedly while
            the daemon is silent, because a stop request may arrive meanwhile.

    Attributes:
        is_closed: Whether this process can send no more requests.
        is_silent: True if no answer came in time, False if the daemon ended.

    Raises:
        PeerFailed: No daemon listens there.
    """

    def __init__(self, path: str, left_seconds: Callable[[], float] = no_deadline) -> None:
        self._left_seconds = left_seconds
        self._connection = _unix_socket()
        self._connection.settimeout(SILENCE_SECONDS)
        self._json_lines = JsonLineSocket(self._connection)
        self._poll = select.poll()
        self._poll.register(self._connection, select.POLLIN)
        self._outstanding = 0
        self.is_closed = self.is_silent = False
        try:
            self._connection.connect(path)
        except OSError as error:
            self.close()
            raise PeerFailed(f"no saver daemon at {path}: {error}") from error
        _OPEN_CONNECTIONS.add(self)

    def send(self, verb: str, **message: Any) -> None:
        """Send a request; its answer is read later.

        Raises:
            PeerFailed: The daemon is gone.
        """
        try:
            self._connection.settimeout(self._silence_seconds)
            self._json_lines.send({"verb": verb, **message})
        except OSError as error:
            self.is_silent = isinstance(error, TimeoutError)
            raise self._ended_error(str(error)) from error
        self._outstanding += 1

    def receive(self) -> dict[str, Any]:
        """Read all outstanding answers and return the last.

        Raises:
            PeerFailed: The daemon is gone.
            ResilientError: The first answer that is a failure, as an error of its kind.
        """
        answer: dict[str, Any] = {}
        first_error: ResilientError | None = None
        while self._outstanding:
            answer = self._next()
            if "failure" in answer and first_error is None:
                first_error = RankFailure(**answer["failure"]).to_error(1)
        if first_error is not None:
            raise first_error
        return answer

    def request(self, verb: str, **message: Any) -> dict[str, Any]:
        """Send a request and return its answer.

        Raises:
            PeerFailed: The daemon is gone.
            ResilientError: This answer or an earlier answer is a failure.
        """
        self.send(verb, **message)
        return self.receive()

    def require_alive(self) -> None:
        """Check without waiting that the daemon's process exists; a stuck daemon passes.

        Raises:
            PeerFailed: The daemon is gone.
        """
        try:
            # No request is outstanding, so there is nothing to read but the end of the connection.
            if not self._poll.poll(0) or self._connection.recv(1, socket.MSG_PEEK):
                return
        except OSError as error:
            raise self._ended_error(str(error)) from error
        raise self._ended_error(_CLOSED)

    def leave_to_parent(self) -> None:
        """Close this process's copy of the connection after a fork; the parent continues with it.

        The daemon considers the rank alive while any process has the connection open, for example a
        worker of a data loader.
        """
        self.is_closed = True
        self._connection.close()

    @property
    def peer_pid(self) -> int:
        """Process id of the listener in this PID namespace; 0 if the process is not visible.

        From SO_PEERCRED, see unix(7): the process that called listen().
        """
        size = struct.calcsize(_CREDENTIALS)
        credentials = self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        return int(struct.unpack(_CREDENTIALS, credentials)[0])

    def close(self) -> None:
        """Disconnect, and wake a thread that listens."""
        self.is_closed = True
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _next(self) -> dict[str, Any]:
        self._outstanding -= 1
        try:
            answer = self._receive()
        except (OSError, MalformedMessage) as error:
            raise self._ended_error(str(error)) from error
        if answer is None:
            raise self._ended_error(_CLOSED)
        return answer

    def _receive(self) -> dict[str, Any] | None:
        silent_seconds = 0.0
        while True:
            began_seconds = time.monotonic()
            self._connection.settimeout(_POLL_SECONDS)
            try:
                return self._json_lines.receive()
            except TimeoutError:
                # Time in which this process itself was suspended does not count as silence of the
                # daemon.
                polled_seconds = time.monotonic() - began_seconds
                silent_seconds += min(polled_seconds, 2 * _POLL_SECONDS)
                if silent_seconds >= self._silence_seconds:
                    self.is_silent = True
                    raise

    @property
    def _silence_seconds(self) -> float:
        return silence_seconds_max(self._left_seconds())

    def _ended_error(self, reason: str) -> PeerFailed:
        # A late answer would be taken for the answer to another request.
        self.close()
        self._outstanding = 0
        return PeerFailed(f"the saver daemon has ended: {reason}")


def _unix_socket() -> socket.socket:
    try:
        return socket.socket(socket.AF_UNIX)
    except OSError as error:
        raise PeerFailed(f"cannot connect to the saver daemon: {error}") from error


def silence_seconds_max(left_seconds: float) -> float:
    """Return the longest wait for a silent daemon that leaves time to persist without the daemon.

    Args:
        left_seconds: Seconds until this process must end; infinite without a stop request.
    """
    return max(min(left_seconds * _SILENT_SHARE, SILENCE_SECONDS), _SILENCE_SECONDS_MIN)


def send_once(path: str, verb: str, **message: Any) -> None:
    """Send a request that has no answer, over a separate connection; ignore a daemon that is gone.

    Args:
        path: Path of its socket.
        verb: Request.
        message: Fields of the request.
    """
    with suppress(PeerFailed):
        connection = DaemonConnection(path)
        try:
            connection.send(verb, **message)
        finally:
            connection.close()


def _leave_to_parent() -> None:
    for connection in tuple(_OPEN_CONNECTIONS):
        connection.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
