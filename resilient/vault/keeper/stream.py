"""Files of a save that is larger than the keeper's memory: they come through a few slots of it.

The keeper asks for a file, its rank copies the file into a slot, the keeper writes it and the
slot is free again. So what is written at once is bounded by the slots, and training waits: the
rank must not change its state before the keeper has a verdict. A file may be asked for again, for
parity or a signature; it is the same then.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from resilient.errors import DeadlineExceeded, PeerFailed, ResilientError, SaveFailed
from resilient.format.shard import StreamedFile
from resilient.world.agreement import Failure, attempt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from resilient.format.manifest import TensorEntry
    from resilient.format.shard import Lending
    from resilient.vault.keeper.conversation import Conversation

SLOTS_MAX = 4


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
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
    slot: Slot
    is_there: threading.Event = field(default_factory=threading.Event)

    def to_json(self) -> list[Any]:
        """Return a JSON-able value."""
        return [self.number, self.file, self.slot.name]


class Stream:
    """The slots of one save in flight; the threads that write it ask, and the rank's answers.

    Args:
        slots: of one rank, each long enough for any of its files.
        within_seconds: how long a file may take to come.
    """

    def __init__(self, slots: Sequence[Slot], within_seconds: float) -> None:
        self._free = deque(slots)
        self._within_seconds = within_seconds
        self._wanted: deque[_Wanted] = deque()
        self._asked: dict[int, _Wanted] = {}
        self._count = 0
        self._failure: Failure | None = None
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

    def fail(self, failure: Failure) -> None:
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

    def _take(self) -> Slot:
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
class PulledFile:
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
    stream: Stream

    @contextmanager
    def lend(self) -> Iterator[memoryview]:
        """Yield the content, in memory that is another file's afterwards."""
        with self.stream.lend(self.name, self.size_bytes) as data:
            yield data


def feed(
    talk: Conversation,
    files: Sequence[Lending],
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
            done = attempt(partial(_fill, named.get(name), slots.get(slot)))
            note = {"came": number}
            if isinstance(done, Failure):
                note = {"failed": done.to_json()["failure"]}
    return answer


def _fill(file: StreamedFile | None, slot: memoryview | None) -> None:
    if file is None or slot is None or len(slot) < file.size_bytes:
        raise SaveFailed("the keeper asked for what was not handed over")
    file.fill(slot[: file.size_bytes])


def is_gone() -> Failure:
    """Return the failure of a rank that ended before its bytes were stored."""
    return Failure(PeerFailed.code, "it ended before its bytes were stored")


def read_failure(value: Mapping[str, str]) -> Failure:
    """Return the failure that a rank told."""
    code = str(value.get("code", ResilientError.code))
    return Failure(code, str(value.get("message", "")), str(value.get("hint", "")))
