"""Recorded file operations of a store, and the disk states that a power loss may leave.

The recorder passes each operation to an inner file system, for example the machine's own, and
records the operation if it succeeded. The record therefore contains only executed operations. A
record can be replayed into :class:`resilient.testing.disk_model.Disk`, which computes the possible
states.

The model follows POSIX:

* Unsynced content of a file may be present, absent or partial. Each of its blocks may be missing,
  zero or garbage, because data and metadata may reach the disk in any order.
* Any combination of the unsynced name changes in a folder may have happened. A rename within a
  folder is atomic.
* Synced content is present. A folder whose own name was lost is lost with its whole content.

A file system that orders its operations, such as ext4, leaves a subset of these states.

With a scheduler, only one thread executes an operation at a time, in an order drawn from a seed. A
test run can therefore be repeated.
"""

from __future__ import annotations

import errno
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from itertools import product
from typing import TYPE_CHECKING, Any, Union

from resilient.testing.fault_store import Crash

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path
    from random import Random

    from resilient.storage.posix import DirEntry, FileSystem, WritableFile
    from resilient.storage.transfer import Arrived, ScatterBuffer


class FileOpKind(Enum):
    """Kind of a change to a file system."""

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
class FileOp:
    """Operation that succeeded.

    Attributes:
        act: Kind of the operation.
        path: Names below the machine's root; empty for the root itself.
        target: New name of a rename or a link.
        file: Number of the file, for operations on a file and not on a name.
        data: Appended bytes.
    """

    act: FileOpKind
    path: tuple[str, ...] = ()
    target: tuple[str, ...] = ()
    file: int = -1
    data: bytes = b""


@dataclass(slots=True)
class FileOpLog:
    """Operations in order, and between them the facts that the user of the store recorded.

    Attributes:
        steps: Operations, and facts from :meth:`RecordingFileSystem.note`.
        operations: Number of operations.
    """

    steps: list[FileOp | Any] = field(default_factory=list)
    operations: int = 0


class RecordingFileSystem:
    """File system that executes operations on an inner one and records the successful ones.

    Args:
        inner: Inner file system.
        top: Folder that represents the machine's root; operations outside are not recorded.
        record: Log of the operations.
        scheduler: Scheduler of the threads; None for a process with one thread.
    """

    def __init__(
        self,
        inner: FileSystem,
        top: Path,
        record: FileOpLog,
        scheduler: ThreadScheduler | None = None,
    ) -> None:
        self.record = record
        self.dies_after: int | None = None
        self.full_in: int | None = None
        self._inner = inner
        self._depth = len(top.parts)
        self._top = top.parts
        self._scheduler = scheduler
        self._lock = threading.RLock()
        self._dead = False
        self._files = 0

    def create(self, path: Path) -> RecordingHandle:
        """Create a file; writes to the file are recorded too."""
        with self._write_turn():
            handle = self._inner.create(path)
            number = self._files
            self._files += 1
            self._record(FileOpKind.CREATE, path, file=number)
        return RecordingHandle(self, handle, number)

    def read(self, path: Path, start: int, length: int | None) -> bytes:
        """Read bytes of a file."""
        with self._read_turn():
            return self._inner.read(path, start, length)

    def read_into(self, path: Path, start: int, room: ScatterBuffer, arrived: Arrived) -> int:
        """Read bytes of a file into memory."""
        with self._read_turn():
            return self._inner.read_into(path, start, room, arrived)

    def size_bytes(self, path: Path) -> int:
        """Return the length of a file."""
        with self._read_turn():
            return self._inner.size_bytes(path)

    def items(self, path: Path) -> Iterable[DirEntry]:
        """List a folder."""
        with self._read_turn():
            return self._inner.items(path)

    def replace(self, source: Path, target: Path) -> None:
        """Rename a file."""
        with self._write_turn():
            self._inner.replace(source, target)
            self._record(FileOpKind.REPLACE, source, target)

    def link(self, source: Path, target: Path) -> None:
        """Add a name to a file."""
        with self._write_turn():
            self._inner.link(source, target)
            self._record(FileOpKind.LINK, source, target)

    def unlink(self, path: Path) -> None:
        """Remove a name of a file."""
        with self._write_turn():
            self._inner.unlink(path)
            self._record(FileOpKind.UNLINK, path)

    def make_folder(self, path: Path) -> None:
        """Create a folder."""
        with self._write_turn():
            self._inner.make_folder(path)
            self._record(FileOpKind.MAKE_FOLDER, path)

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        with self._write_turn():
            self._inner.remove_folder(path)
            self._record(FileOpKind.REMOVE_FOLDER, path)

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""
        with self._write_turn():
            self._inner.sync_folder(path)
            self._record(FileOpKind.SYNC_FOLDER, path)

    def note(self, subject: Any) -> None:
        """Record a fact that the user of the store knows at this moment."""
        with self._lock:
            self.record.steps.append(subject)

    def die_in(self, operations: int) -> None:
        """Make the process die right after ``operations`` more operations."""
        self.dies_after = self.record.operations + operations

    def revive(self) -> None:
        """Start the next process on the disk of the dead one."""
        self._dead, self.dies_after, self.full_in = False, None, None

    def _require_alive(self) -> None:
        if self._dead:
            raise Crash("dead since an earlier operation")

    @contextmanager
    def _read_turn(self) -> Iterator[None]:
        """Take a turn for a read too, because a read checks whether the process is alive."""
        with self._scheduler.turn() if self._scheduler else nullcontext():
            self._require_alive()
            yield

    @contextmanager
    def _write_turn(self) -> Iterator[None]:
        if self._scheduler is None:
            with self._lock:
                self._require_alive()
                yield
            return
        with self._scheduler.turn(), self._lock:
            self._require_alive()
            yield

    def _record(
        self, act: FileOpKind, path: Path | None, target: Path | None = None, **more: Any
    ) -> None:
        names = self._below(path) if path else ()
        if names is None:
            return
        new = self._below(target) if target else ()
        self.record.steps.append(FileOp(act, names, new or (), **more))
        self.record.operations += 1
        if self.record.operations == self.dies_after:
            self._dead = True
            raise Crash(f"after operation {self.dies_after}, {act.value} {'/'.join(names)}")

    def _below(self, path: Path) -> tuple[str, ...] | None:
        parts = path.parts
        return parts[self._depth :] if parts[: self._depth] == self._top else None


class RecordingHandle:
    """Open file of a :class:`RecordingFileSystem`."""

    def __init__(self, files: RecordingFileSystem, inner: WritableFile, number: int) -> None:
        self._files = files
        self._inner = inner
        self._number = number

    def write(self, data: memoryview) -> int:
        """Append to the file, and record the bytes that were appended."""
        files = self._files
        with files._write_turn():  # noqa: SLF001 - one recorder in two classes
            if files.full_in is not None:
                files.full_in -= 1
                if files.full_in < 0:
                    files.full_in = None
                    raise OSError(errno.ENOSPC, "No space left on device")
            written_bytes = self._inner.write(data)
            content = bytes(data[:written_bytes])
            files._record(FileOpKind.WRITE, None, file=self._number, data=content)  # noqa: SLF001
        return written_bytes

    def sync(self) -> None:
        """Make the content durable."""
        with self._files._write_turn():  # noqa: SLF001 - one recorder in two classes
            self._inner.sync()
            self._files._record(FileOpKind.SYNC, None, file=self._number)  # noqa: SLF001

    def close(self) -> None:
        """Close the file, without an effect on the disk."""
        self._inner.close()


BLOCK_BYTES = 512
SUBSETS_OF_MAX = 5
_GARBAGE = b"\xa5"
_FOLDER = 1 << 62
"""Start value of a folder's digest, so that an empty folder differs from an empty file."""

Tree = dict[str, Union[bytes, "Tree"]]
"""Content of a disk: bytes by file name, a tree by folder name."""


@dataclass(slots=True)
class _File:
    content: bytes = b""
    durable: bytes = b""


@dataclass(slots=True)
class _Folder:
    names: dict[str, _File | _Folder] = field(default_factory=dict)
    durable: dict[str, _File | _Folder] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)
    settled: tuple[int, Tree] | None = None

    def change(self, change: Change) -> None:
        self.pending.append(change)
        _apply(self.names, change)

    def sync(self) -> None:
        self.durable = dict(self.names)
        self.pending = []


Names = dict[str, _File | _Folder]
Change = dict[str, _File | _Folder | None]
NodeState = bytes | Names
_Shape = tuple[int, list[tuple[str, _File | _Folder]]]


@dataclass(frozen=True, slots=True)
class DiskState:
    """Possible content of a disk after a power loss.

    Attributes:
        digest: Number that equal trees share within one process.
        tree: Files and folders; None if the caller knows the tree already.
    """

    digest: int
    tree: Tree | None


class Disk:
    """Disk built from recorded operations, with its durable part.

    Args:
        tree: Initial content, all durable.
        lies: Function called at each sync; if it returns True, the sync has no effect.
    """

    def __init__(self, tree: Tree | None = None, lies: Callable[[], bool] | None = None) -> None:
        self._top = _folder_of(tree or {})
        self._files: dict[int, _File] = {}
        self._folder_by_file: dict[int, Sequence[str]] = {}
        self._drops_sync = lies or (lambda: False)

    def apply(self, op: FileOp) -> None:
        """Apply one operation."""
        match op.act:
            case FileOpKind.CREATE:
                file = self._files[op.file] = _File()
                self._folder_by_file[op.file] = op.path[:-1]
                self._at(op.path[:-1]).change({op.path[-1]: file})
            case FileOpKind.WRITE:
                self._at(self._folder_by_file[op.file])
                self._files[op.file].content += op.data
            case FileOpKind.SYNC:
                self._at(self._folder_by_file[op.file])
                if not self._drops_sync():
                    self._files[op.file].durable = self._files[op.file].content
            case FileOpKind.SYNC_FOLDER:
                if not self._drops_sync():
                    self._at(op.path).sync()
            case _:
                self._rename(op)

    def _rename(self, op: FileOp) -> None:
        folder, name = self._at(op.path[:-1]), op.path[-1]
        match op.act:
            case FileOpKind.MAKE_FOLDER:
                folder.change({name: _Folder()})
            case FileOpKind.REMOVE_FOLDER | FileOpKind.UNLINK:
                folder.change({name: None})
            case FileOpKind.REPLACE | FileOpKind.LINK:
                if op.path[:-1] != op.target[:-1]:
                    raise NotImplementedError("this model renames within one folder only")
                removal: Change = {name: None} if op.act is FileOpKind.REPLACE else {}
                folder.change(removal | {op.target[-1]: folder.names[name]})

    def states(
        self, draw: Random, limit: int, known_digests: Container[int] = frozenset()
    ) -> Iterator[DiskState]:
        """Yield the possible states after a power loss now: all, or ``limit`` drawn ones.

        Each state is yielded once. The first state has no unsynced data and the last state has all
        unsynced data, if the two differ.

        Args:
            draw: Random source for a sample of the states.
            limit: Largest number of states.
            known_digests: Digests of states whose trees need not be built.
        """
        unsettled: list[_File | _Folder] = []
        settled: dict[int, tuple[int, Tree]] = {}
        _collect_unsettled(self._top, unsettled, settled)
        node_states = [_possible_states(node, draw) for node in unsettled]
        keys = [id(node) for node in unsettled]
        shapes: dict[int, _Shape] = {}
        states_by_digest: dict[int, Mapping[int, NodeState]] = {}
        last_digest = 0
        for choice in _choices(node_states, draw, limit):
            state_by_node: Mapping[int, NodeState] = dict(zip(keys, choice, strict=True))
            last_digest = _digest(self._top, state_by_node, settled, shapes)
            states_by_digest.setdefault(last_digest, state_by_node)
        states_by_digest[last_digest] = states_by_digest.pop(last_digest)
        for digest, state_by_node in states_by_digest.items():
            tree = (
                None if digest in known_digests else _build_tree(self._top, state_by_node, settled)
            )
            yield DiskState(digest, tree)

    def _at(self, names: Sequence[str]) -> _Folder:
        """Return a folder that changes, and reset the caches of all folders above it."""
        folder = self._top
        folder.settled = None
        for name in names:
            node = folder.names[name]
            assert isinstance(node, _Folder), "recorded operations succeeded"  # noqa: S101
            folder = node
            folder.settled = None
        return folder


def _apply(names: Names, change: Change) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def _folder_of(tree: Tree) -> _Folder:
    names: Names = {
        name: _folder_of(node) if isinstance(node, dict) else _File(node, node)
        for name, node in tree.items()
    }
    return _Folder(names, dict(names))


def _collect_unsettled(
    folder: _Folder, unsettled: list[_File | _Folder], settled: dict[int, tuple[int, Tree]]
) -> bool:
    """Collect nodes with several possible states; return whether ``folder`` has none of them."""
    if folder.settled is not None:
        settled[id(folder)] = folder.settled
        return True
    is_settled = not folder.pending
    if folder.pending:
        unsettled.append(folder)
    for node in _possible_entries(folder):
        if isinstance(node, _Folder):
            is_settled &= _collect_unsettled(node, unsettled, settled)
        elif node.content != node.durable:
            if all(node is not file_node for file_node in unsettled):
                unsettled.append(node)
            is_settled = False
    if is_settled:
        digest, tree = _digest(folder, {}, settled, {}), _build_tree(folder, {}, settled)
        settled[id(folder)] = folder.settled = (digest, tree)
    return is_settled


def _possible_entries(folder: _Folder) -> Iterable[_File | _Folder]:
    """Return the possible entries of a folder: a removed name may come back."""
    reached = {id(node): node for node in folder.durable.values()}
    for change in folder.pending:
        reached |= {id(node): node for node in change.values() if node is not None}
    return reached.values()


def _digest(
    folder: _Folder,
    node_states: Mapping[int, NodeState],
    settled: Mapping[int, tuple[int, Tree]],
    shapes: dict[int, _Shape],
) -> int:
    """Return a number that equal folders share: a sum over names, so most summands are reused."""
    if id(folder) in settled:
        return settled[id(folder)][0]
    names = node_states.get(id(folder), folder.names)
    assert isinstance(names, dict), "a folder's state is its names"  # noqa: S101
    shape = shapes.get(id(names))
    if shape is None:
        shape = shapes[id(names)] = _shape(names, node_states, settled)
    total, unsettled = shape
    for name, node in unsettled:
        if isinstance(node, _Folder):
            total += _mix(name, _digest(node, node_states, settled, shapes))
        else:
            total += _mix(name, hash(node_states[id(node)]))
    return hash(total)


def _mix(name: str, digest: int) -> int:
    """Return a number suitable for sums: hashes of tuples are almost linear, squares are not."""
    mixed = hash((name, digest))
    return mixed * mixed


def _shape(
    names: Names, node_states: Mapping[int, NodeState], settled: Mapping[int, tuple[int, Tree]]
) -> _Shape:
    """Return the sum over the names with a known state, and the other names."""
    total, unsettled = _FOLDER, list[tuple[str, _File | _Folder]]()
    for name, node in names.items():
        if id(node) in node_states or (isinstance(node, _Folder) and id(node) not in settled):
            unsettled.append((name, node))
        elif isinstance(node, _Folder):
            total += _mix(name, settled[id(node)][0])
        else:
            total += _mix(name, hash(node.content))
    return total, unsettled


def _build_tree(
    folder: _Folder, node_states: Mapping[int, NodeState], settled: Mapping[int, tuple[int, Tree]]
) -> Tree:
    if id(folder) in settled:
        return settled[id(folder)][1]
    names = node_states.get(id(folder), folder.names)
    assert isinstance(names, dict), "a folder's state is its names"  # noqa: S101
    tree: Tree = {}
    for name, node in names.items():
        if isinstance(node, _Folder):
            tree[name] = _build_tree(node, node_states, settled)
        else:
            content = node_states.get(id(node), node.content)
            assert isinstance(content, bytes), "a file's state is its content"  # noqa: S101
            tree[name] = content
    return tree


def _possible_states(node: _File | _Folder, draw: Random) -> Sequence[NodeState]:
    return (
        _possible_names(node, draw) if isinstance(node, _Folder) else _possible_contents(node, draw)
    )


def _possible_names(folder: _Folder, draw: Random) -> list[Names]:
    """Return possible sets of names: all subsets of few changes, a sample of many."""
    count = len(folder.pending)
    if count <= SUBSETS_OF_MAX:
        masks = list(range(1 << count))
    else:
        full = (1 << count) - 1
        sample = draw.sample(range(count), SUBSETS_OF_MAX)
        masks = [0, *(full ^ (1 << at) for at in sample), *(1 << at for at in sample)]
        masks += [(1 << at) - 1 for at in sample]
        masks += [draw.getrandbits(count) for _ in range(2 * SUBSETS_OF_MAX)] + [full]
    names_by_entries: dict[frozenset[tuple[str, int]], Names] = {}
    for mask in masks:
        names = dict(folder.durable)
        for at, change in enumerate(folder.pending):
            if mask >> at & 1:
                _apply(names, change)
        key = frozenset((name, id(node)) for name, node in names.items())
        names_by_entries.pop(
            key, None
        )  # Removed first, so that the last entry is the state with all changes.
        names_by_entries[key] = names
    return list(names_by_entries.values())


def _possible_contents(file: _File, draw: Random) -> list[bytes]:
    """Return possible contents of a file, from no unsynced byte to all of them."""
    durable, full_content = file.durable, file.content
    size = len(full_content) - len(durable)
    starts = range(len(durable), len(full_content), BLOCK_BYTES)
    cuts = starts[1:] if len(starts) <= SUBSETS_OF_MAX else sorted(draw.sample(starts[1:], 4))
    contents = [
        durable,
        *(full_content[:cut] for cut in cuts),
        full_content[: len(durable) + size // 2],
    ]
    contents += [durable + bytes(size), durable + _GARBAGE * size]
    for _ in range(min(len(starts), SUBSETS_OF_MAX)):
        fill = draw.choice((b"\0", _GARBAGE))
        blocks = [
            full_content[at : at + BLOCK_BYTES]
            if draw.random() < 0.5  # noqa: PLR2004 - an even chance
            else fill * len(full_content[at : at + BLOCK_BYTES])
            for at in starts
        ]
        contents.append(durable + b"".join(blocks))
    return list(dict.fromkeys([*contents, full_content]))


def _choices(
    node_states: Sequence[Sequence[NodeState]], draw: Random, limit: int
) -> Iterator[tuple[NodeState, ...]]:
    if math.prod(map(len, node_states)) <= limit:
        yield from product(*node_states)
        return
    yield tuple(outcome[0] for outcome in node_states)
    for _ in range(limit - 2):
        yield tuple(draw.choice(outcome) for outcome in node_states)
    yield tuple(outcome[-1] for outcome in node_states)


class ThreadScheduler:
    """Scheduler that lets one of several threads do its next operation.

    A thread that ``run`` did not start never waits. A single thread never waits either.

    Args:
        draw: Random source for the next thread.
    """

    def __init__(self, draw: Random) -> None:
        self._draw = draw
        self._condition = threading.Condition()
        self._members: list[int] = []
        self._next = -1
        self._thread_state = threading.local()

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run each function in its own thread; return the results, or raise the first error.

        The end of a thread is a turn too. Otherwise the order would depend on the time at which a
        thread ends.
        """
        self._members = list(range(len(functions)))
        self._next = self._draw.choice(self._members)

        def main(number: int) -> Any:
            self._thread_state.number = number
            try:
                return functions[number]()
            finally:
                self._leave(number)

        with ThreadPoolExecutor(len(functions), thread_name_prefix="rank") as pool:
            futures = [pool.submit(main, number) for number in range(len(functions))]
        return [future.result() for future in futures]

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for the turn of this thread, and pass the turn on after the block."""
        number = getattr(self._thread_state, "number", None)
        if number is None:
            yield
            return
        self._await(number)
        try:
            yield
        finally:
            self._pass_on()

    def _await(self, number: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._next == number)

    def _pass_on(self) -> None:
        with self._condition:
            self._next = self._draw.choice(self._members) if self._members else -1
            self._condition.notify_all()

    def _leave(self, number: int) -> None:
        self._await(number)
        with self._condition:
            self._members.remove(number)
        self._pass_on()
