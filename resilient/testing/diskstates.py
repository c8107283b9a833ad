"""A model of what POSIX allows a power loss to leave, fed with recorded operations.

* What was written to a file and not synced may be there, or not, or in part: each block of it may
  be missing, zero or garbage, in any order (metadata before data, data before metadata).
* What was done to the names of a folder and not synced may have happened or not, each operation
  for itself and in any combination; a rename within a folder is atomic.
* What was synced is there. A folder whose own name was lost is lost with all that it holds.

A file system that orders its operations, as ext4 does, leaves a subset of these states.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Union

from resilient.testing.diskops import Act

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
    from random import Random

    from resilient.testing.diskops import Op

BLOCK_BYTES = 512
SUBSETS_OF_MAX = 5
_GARBAGE = b"\xa5"
_FOLDER = 1 << 62
"""Begins the sum of a folder, so that an empty one is no empty file."""

Tree = dict[str, Union[bytes, "Tree"]]
"""What is on a disk: content by name, a tree for a folder."""


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
Fate = bytes | Names
_Shape = tuple[int, list[tuple[str, _File | _Folder]]]


@dataclass(frozen=True, slots=True)
class DiskState:
    """What a disk may hold after a power loss.

    Attributes:
        digest: equal for equal trees within one process.
        tree: files and folders; None if the caller knows it already.
    """

    digest: int
    tree: Tree | None


class Disk:
    """A disk as recorded operations leave it, with what is durable of it.

    Args:
        tree: what is on it, all of it durable.
        lies: asked at each sync; where it says True, the disk only claims to have synced.
    """

    def __init__(self, tree: Tree | None = None, lies: Callable[[], bool] | None = None) -> None:
        self._top = _folder_of(tree or {})
        self._files: dict[int, _File] = {}
        self._homes: dict[int, Sequence[str]] = {}
        self._lies = lies or (lambda: False)

    def apply(self, op: Op) -> None:
        """Let one operation happen."""
        match op.act:
            case Act.CREATE:
                file = self._files[op.file] = _File()
                self._homes[op.file] = op.path[:-1]
                self._at(op.path[:-1]).change({op.path[-1]: file})
            case Act.WRITE:
                self._at(self._homes[op.file])
                self._files[op.file].content += op.data
            case Act.SYNC:
                self._at(self._homes[op.file])
                if not self._lies():
                    self._files[op.file].durable = self._files[op.file].content
            case Act.SYNC_FOLDER:
                if not self._lies():
                    self._at(op.path).sync()
            case _:
                self._rename(op)

    def _rename(self, op: Op) -> None:
        folder, name = self._at(op.path[:-1]), op.path[-1]
        match op.act:
            case Act.MAKE_FOLDER:
                folder.change({name: _Folder()})
            case Act.REMOVE_FOLDER | Act.UNLINK:
                folder.change({name: None})
            case Act.REPLACE | Act.LINK:
                if op.path[:-1] != op.target[:-1]:
                    raise NotImplementedError("this model renames within one folder only")
                gone: Change = {name: None} if op.act is Act.REPLACE else {}
                folder.change(gone | {op.target[-1]: folder.names[name]})

    def states(
        self, draw: Random, limit: int, known: Container[int] = frozenset()
    ) -> Iterator[DiskState]:
        """Return what may be left if the power goes now: all of it, or ``limit`` drawn ones.

        Each comes once; the last is that all of it is there, and the first that nothing
        unsynced is, if that differs.

        Args:
            draw: draws, where there are too many.
            limit: how many are too many.
            known: digests of states whose trees need not be built.
        """
        unsettled: list[_File | _Folder] = []
        settled: dict[int, tuple[int, Tree]] = {}
        _find(self._top, unsettled, settled)
        fates = [_fates(node, draw) for node in unsettled]
        keys = [id(node) for node in unsettled]
        shapes: dict[int, _Shape] = {}
        found: dict[int, Mapping[int, Fate]] = {}
        last = 0
        for choice in _choices(fates, draw, limit):
            chosen: Mapping[int, Fate] = dict(zip(keys, choice, strict=True))
            last = _digest(self._top, chosen, settled, shapes)
            found.setdefault(last, chosen)
        found[last] = found.pop(last)
        for digest, chosen in found.items():
            tree = None if digest in known else _built(self._top, chosen, settled)
            yield DiskState(digest, tree)

    def _at(self, names: Sequence[str]) -> _Folder:
        """Return a folder in which something changes, and with it all that it lies in."""
        folder = self._top
        folder.settled = None
        for name in names:
            found = folder.names[name]
            assert isinstance(found, _Folder), "recorded operations succeeded"  # noqa: S101
            folder = found
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


def _find(
    folder: _Folder, unsettled: list[_File | _Folder], settled: dict[int, tuple[int, Tree]]
) -> bool:
    """Gather what may have several fates; say whether nothing at or below ``folder`` has."""
    if folder.settled is not None:
        settled[id(folder)] = folder.settled
        return True
    is_settled = not folder.pending
    if folder.pending:
        unsettled.append(folder)
    for node in _reached(folder):
        if isinstance(node, _Folder):
            is_settled &= _find(node, unsettled, settled)
        elif node.content != node.durable:
            if all(node is not one for one in unsettled):
                unsettled.append(node)
            is_settled = False
    if is_settled:
        digest, tree = _digest(folder, {}, settled, {}), _built(folder, {}, settled)
        settled[id(folder)] = folder.settled = (digest, tree)
    return is_settled


def _reached(folder: _Folder) -> Iterable[_File | _Folder]:
    """Return what may be in a folder: a name may come back; what has none has a fate no more."""
    reached = {id(node): node for node in folder.durable.values()}
    for change in folder.pending:
        reached |= {id(node): node for node in change.values() if node is not None}
    return reached.values()


def _digest(
    folder: _Folder,
    fates: Mapping[int, Fate],
    settled: Mapping[int, tuple[int, Tree]],
    shapes: dict[int, _Shape],
) -> int:
    """Return a number that equal folders share: a sum over names, so that most is added once."""
    if id(folder) in settled:
        return settled[id(folder)][0]
    names = fates.get(id(folder), folder.names)
    assert isinstance(names, dict), "a folder's fate is its names"  # noqa: S101
    shape = shapes.get(id(names))
    if shape is None:
        shape = shapes[id(names)] = _shape(names, fates, settled)
    total, unsettled = shape
    for name, node in unsettled:
        if isinstance(node, _Folder):
            total += _spread(name, _digest(node, fates, settled, shapes))
        else:
            total += _spread(name, hash(fates[id(node)]))
    return hash(total)


def _spread(name: str, digest: int) -> int:
    """Return a number that adds up well: hashes of tuples are almost linear, squares are not."""
    mixed = hash((name, digest))
    return mixed * mixed


def _shape(
    names: Names, fates: Mapping[int, Fate], settled: Mapping[int, tuple[int, Tree]]
) -> _Shape:
    """Return the sum over those names whose fate is known, and the others."""
    total, unsettled = _FOLDER, list[tuple[str, _File | _Folder]]()
    for name, node in names.items():
        if id(node) in fates or (isinstance(node, _Folder) and id(node) not in settled):
            unsettled.append((name, node))
        elif isinstance(node, _Folder):
            total += _spread(name, settled[id(node)][0])
        else:
            total += _spread(name, hash(node.content))
    return total, unsettled


def _built(
    folder: _Folder, fates: Mapping[int, Fate], settled: Mapping[int, tuple[int, Tree]]
) -> Tree:
    if id(folder) in settled:
        return settled[id(folder)][1]
    names = fates.get(id(folder), folder.names)
    assert isinstance(names, dict), "a folder's fate is its names"  # noqa: S101
    tree: Tree = {}
    for name, node in names.items():
        if isinstance(node, _Folder):
            tree[name] = _built(node, fates, settled)
        else:
            content = fates.get(id(node), node.content)
            assert isinstance(content, bytes), "a file's fate is its content"  # noqa: S101
            tree[name] = content
    return tree


def _fates(node: _File | _Folder, draw: Random) -> Sequence[Fate]:
    return _names_left(node, draw) if isinstance(node, _Folder) else _contents_left(node, draw)


def _names_left(folder: _Folder, draw: Random) -> list[Names]:
    """Return which names may be left: of few changes every subset, of many some."""
    count = len(folder.pending)
    if count <= SUBSETS_OF_MAX:
        masks = list(range(1 << count))
    else:
        full = (1 << count) - 1
        some = draw.sample(range(count), SUBSETS_OF_MAX)
        masks = [0, *(full ^ (1 << at) for at in some), *(1 << at for at in some)]
        masks += [(1 << at) - 1 for at in some]
        masks += [draw.getrandbits(count) for _ in range(2 * SUBSETS_OF_MAX)] + [full]
    found: dict[frozenset[tuple[str, int]], Names] = {}
    for mask in masks:
        names = dict(folder.durable)
        for at, change in enumerate(folder.pending):
            if mask >> at & 1:
                _apply(names, change)
        key = frozenset((name, id(node)) for name, node in names.items())
        found.pop(key, None)  # so that the last one is that everything happened
        found[key] = names
    return list(found.values())


def _contents_left(file: _File, draw: Random) -> list[bytes]:
    """Return what may be left of a file, from nothing unsynced to all of it."""
    kept, whole = file.durable, file.content
    size = len(whole) - len(kept)
    starts = range(len(kept), len(whole), BLOCK_BYTES)
    cuts = starts[1:] if len(starts) <= SUBSETS_OF_MAX else sorted(draw.sample(starts[1:], 4))
    found = [kept, *(whole[:cut] for cut in cuts), whole[: len(kept) + size // 2]]
    found += [kept + bytes(size), kept + _GARBAGE * size]
    for _ in range(min(len(starts), SUBSETS_OF_MAX)):
        fill = draw.choice((b"\0", _GARBAGE))
        blocks = [
            whole[at : at + BLOCK_BYTES]
            if draw.random() < 0.5  # noqa: PLR2004 - an even chance
            else fill * len(whole[at : at + BLOCK_BYTES])
            for at in starts
        ]
        found.append(kept + b"".join(blocks))
    return list(dict.fromkeys([*found, whole]))


def _choices(
    fates: Sequence[Sequence[Fate]], draw: Random, limit: int
) -> Iterator[tuple[Fate, ...]]:
    if math.prod(map(len, fates)) <= limit:
        yield from product(*fates)
        return
    yield tuple(one[0] for one in fates)
    for _ in range(limit - 2):
        yield tuple(draw.choice(one) for one in fates)
    yield tuple(one[-1] for one in fates)
