"""A rank's talk with the keeper of its host: it may ask on before it reads the answers."""

from __future__ import annotations

import math
import os
import select
import socket
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from resilient.errors import PeerFailed, ResilientError
from resilient.world.agreement import Failure
from resilient.world.lines import BadLine, Lines

if TYPE_CHECKING:
    from collections.abc import Callable

# The keeper answers within a slice, so silence for much longer means that it is stuck.
SILENCE_SECONDS = 15.0
# One that is only slow answers sooner than this, however little time is left.
_SILENCE_SECONDS_MIN = 2.0
_SILENT_SHARE = 1 / 3
_LOOK_SECONDS = 0.5
_CREDENTIALS = "3i"
_CLOSED = "it closed the connection"
_CONVERSATIONS: WeakSet[Conversation] = WeakSet()


def never() -> float:
    """Return how long a process has that nobody has told to end."""
    return math.inf


class Conversation:
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

    def __init__(self, path: str, left_seconds: Callable[[], float] = never) -> None:
        self._left_seconds = left_seconds
        self._connection = _unix_socket()
        self._connection.settimeout(SILENCE_SECONDS)
        self._lines = Lines(self._connection)
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
                failed = Failure(**answer["failure"]).to_error(1)
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
        except (OSError, BadLine) as error:
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
        talk = Conversation(path)
        try:
            talk.tell(verb, **message)
        finally:
            talk.close()


def _leave_to_parent() -> None:
    for one in tuple(_CONVERSATIONS):
        one.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
