"""What a LocalStore really asks of the file system: each operation done, and written down in order.

The operations are carried out by the files that it stands on, the machine's own for example, so
the record is of what happened and not of what was meant. A record can be replayed into
:class:`resilient.testing.diskstates.Disk`, which says what a power loss may leave of it.
"""

from __future__ import annotations

import errno
import threading
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from resilient.testing.faults import Crash

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from resilient.storage.buffers import Room
    from resilient.storage.files import Files, Handle, Item
    from resilient.storage.filling import Arrived
    from resilient.testing.turns import Turns


class Act(Enum):
    """What a file system may be asked to change."""

    MAKE_FOLDER = "mkdir"
    REMOVE_FOLDER = "rmdir"
    CREATE = "open"
    WRITE = "write"
    SYNC = "fsync"
    REPLACE = "rename"
    LINK = "link"
    UNLINK = "unlink"
    SYNC_FOLDER = "fsync of a folder"


@dataclass(frozen=True, slots=True)
class Op:
    """One operation that succeeded.

    Attributes:
        act: which.
        path: names below the machine's top; empty for the top itself.
        target: the new name, of a rename or a link.
        file: number of the file, of what is done to a file and not to a name.
        data: what was appended.
    """

    act: Act
    path: tuple[str, ...] = ()
    target: tuple[str, ...] = ()
    file: int = -1
    data: bytes = b""


@dataclass(slots=True)
class Record:
    """What happened, in order: operations, and between them what the user of a store noted.

    Attributes:
        steps: operations and notes.
        operations: how many of them are operations.
    """

    steps: list[Op | Any] = field(default_factory=list)
    operations: int = 0


class RecordingFiles:
    """``Files`` that do the work with others and write down what succeeded.

    Args:
        inner: who does the work.
        top: the folder that stands for the machine's root; what happens outside is not recorded.
        record: where it is written down.
        turns: decides which thread comes next; None for a process with one thread.
    """

    def __init__(self, inner: Files, top: Path, record: Record, turns: Turns | None = None) -> None:
        self.record = record
        self.dies_after: int | None = None
        self.full_in: int | None = None
        self._inner = inner
        self._depth = len(top.parts)
        self._top = top.parts
        self._turns = turns
        self._lock = threading.RLock()
        self._dead = False
        self._files = 0

    def create(self, path: Path) -> RecordingHandle:
        """Create a file; writing to it is recorded too."""
        with self._step():
            handle = self._inner.create(path)
            number = self._files
            self._files += 1
            self._did(Act.CREATE, path, file=number)
        return RecordingHandle(self, handle, number)

    def read(self, path: Path, start: int, length: int | None) -> bytes:
        """Read."""
        with self._look():
            return self._inner.read(path, start, length)

    def read_into(self, path: Path, start: int, room: Room, arrived: Arrived) -> int:
        """Read into memory."""
        with self._look():
            return self._inner.read_into(path, start, room, arrived)

    def size_bytes(self, path: Path) -> int:
        """Ask for a file's length."""
        with self._look():
            return self._inner.size_bytes(path)

    def items(self, path: Path) -> Iterable[Item]:
        """List a folder."""
        with self._look():
            return self._inner.items(path)

    def replace(self, source: Path, target: Path) -> None:
        """Rename."""
        with self._step():
            self._inner.replace(source, target)
            self._did(Act.REPLACE, source, target)

    def link(self, source: Path, target: Path) -> None:
        """Add a name."""
        with self._step():
            self._inner.link(source, target)
            self._did(Act.LINK, source, target)

    def unlink(self, path: Path) -> None:
        """Remove a name."""
        with self._step():
            self._inner.unlink(path)
            self._did(Act.UNLINK, path)

    def make_folder(self, path: Path) -> None:
        """Create a folder."""
        with self._step():
            self._inner.make_folder(path)
            self._did(Act.MAKE_FOLDER, path)

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        with self._step():
            self._inner.remove_folder(path)
            self._did(Act.REMOVE_FOLDER, path)

    def sync_folder(self, path: Path) -> None:
        """Make names durable."""
        with self._step():
            self._inner.sync_folder(path)
            self._did(Act.SYNC_FOLDER, path)

    def note(self, what: Any) -> None:
        """Write down what the user of the store knows at this moment."""
        with self._lock:
            self.record.steps.append(what)

    def die_in(self, operations: int) -> None:
        """Let the process die right after so many more operations."""
        self.dies_after = self.record.operations + operations

    def revive(self) -> None:
        """Begin the next process, on the disk as the dead one left it."""
        self._dead, self.dies_after, self.full_in = False, None, None

    def _live(self) -> None:
        if self._dead:
            raise Crash("dead since an earlier operation")

    @contextmanager
    def _look(self) -> Iterator[None]:
        """Read, which is a turn too: what comes after it depends on whether the process lives."""
        with self._turns.turn() if self._turns else nullcontext():
            self._live()
            yield

    @contextmanager
    def _step(self) -> Iterator[None]:
        if self._turns is None:
            with self._lock:
                self._live()
                yield
            return
        with self._turns.turn(), self._lock:
            self._live()
            yield

    def _did(self, act: Act, path: Path | None, target: Path | None = None, **more: Any) -> None:
        names = self._below(path) if path else ()
        if names is None:
            return
        new = self._below(target) if target else ()
        self.record.steps.append(Op(act, names, new or (), **more))
        self.record.operations += 1
        if self.record.operations == self.dies_after:
            self._dead = True
            raise Crash(f"after operation {self.dies_after}, {act.value} {'/'.join(names)}")

    def _below(self, path: Path) -> tuple[str, ...] | None:
        parts = path.parts
        return parts[self._depth :] if parts[: self._depth] == self._top else None


class RecordingHandle:
    """A file of ``RecordingFiles`` that is being written."""

    def __init__(self, files: RecordingFiles, inner: Handle, number: int) -> None:
        self._files = files
        self._inner = inner
        self._number = number

    def write(self, data: memoryview) -> int:
        """Append, and record as much as was appended."""
        files = self._files
        with files._step():  # noqa: SLF001 - one recorder in two classes
            if files.full_in is not None:
                files.full_in -= 1
                if files.full_in < 0:
                    files.full_in = None
                    raise OSError(errno.ENOSPC, "No space left on device")
            written = self._inner.write(data)
            content = bytes(data[:written])
            files._did(Act.WRITE, None, file=self._number, data=content)  # noqa: SLF001
        return written

    def sync(self) -> None:
        """Make the content durable."""
        with self._files._step():  # noqa: SLF001 - one recorder in two classes
            self._inner.sync()
            self._files._did(Act.SYNC, None, file=self._number)  # noqa: SLF001

    def close(self) -> None:
        """Close; that changes nothing on the disk."""
        self._inner.close()
