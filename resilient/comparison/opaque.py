"""What no reader of a checkpoint understands, so that it can be held against another by its bytes.

Tensors, fields and random states are compared as what they are. All the rest of a checkpoint is
named here with a digest: a file that nobody opens, and of a pickle each value that no field tells,
such as an array of NumPy, a set, or a tensor that is sparse.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resilient.comparison.digests import Digests
from resilient.comparison.plainly import DEPTH_MAX
from resilient.comparison.values import Opaque
from resilient.layouts.archives import Archive, open_archive
from resilient.layouts.distributed import INDEX, SLICES
from resilient.layouts.documents import read_header
from resilient.layouts.pickled import Made, Name, TensorRef, Unordered
from resilient.layouts.values import Unreadable
from resilient.layouts.weights import SAFE, TORCH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from resilient.layouts.distributed import Index
    from resilient.layouts.values import Tensor
    from resilient.storage.folder import Folder, Listing

_DOCUMENTS = re.compile(
    r"config\.json|trainer_state\.json|.*\.index\.json|latest|latest_universal|zero_to_fp32\.py"
)
"""Told as fields, or only where the rest lies."""
_CUT = re.compile(r"(?:^|\.)(?:dp_world_size|mp_world_size|ds_config|param_shapes)(?:\.|$)")
_OF_A_RANK = re.compile(r"optim_states\.pt$|rank_0*[1-9]\d*_")


@dataclass(frozen=True, slots=True)
class Understood:
    """What readers of a side have told of it in other ways.

    Attributes:
        prefix: of the engine's files, which names a step.
        indexes: distributed checkpoints in it, by their folders.
        fields: by file, and by value of a distributed checkpoint, whether a plain value at a path
            is a field; a file that is not here has none.
        names: by file, the names in it that are told in another way, as states of generators are,
            or that say nothing of a run.
    """

    prefix: str
    indexes: Mapping[str, Index]
    fields: Mapping[str, Callable[[str], bool]]
    names: Mapping[str, frozenset[str]]


def opaque_in(
    folder: Folder, listing: Listing, tensors: Iterable[Tensor], known: Understood
) -> tuple[dict[str, Opaque], list[str]]:
    """Return what no reader understands by its place, and what could not even be read.

    Args:
        folder: where it is.
        listing: what is there.
        tensors: those that are compared as tensors.
        known: what else is.

    Raises:
        StoreError: it could not be read.
    """
    reader = _Reader(folder, listing, tensors, known)
    found: dict[str, Opaque] = {}
    for name in sorted(listing.sizes):
        label = "" if listing.is_file else _label(name, known.prefix)
        is_cut = bool(known.prefix or label != name) and bool(_OF_A_RANK.search(name))
        for path, digest in reader.of_file(name):
            place = f"{label}: {path}" if label and path else label or path or "the file"
            found[place] = Opaque(digest, is_cut or bool(_CUT.search(path)))
    notes = [f"{one}: {listing.why_unread(one)}" for one in listing.outside]
    return found, [*reader.notes, *notes]


def _label(name: str, prefix: str) -> str:
    return f"*/{name.removeprefix(prefix)}" if prefix and name.startswith(prefix) else name


class _Reader:
    """Digests of one side; remembers what it could not read."""

    def __init__(
        self, folder: Folder, listing: Listing, tensors: Iterable[Tensor], known: Understood
    ) -> None:
        self._folder, self._listing, self._known = folder, listing, known
        self._digests = Digests(folder, listing)
        self._places = {(it.file, it.start) for one in tensors for it in one.pieces}
        self.notes: list[str] = []

    def of_file(self, name: str) -> list[tuple[str, bytes]]:
        """Return paths in a file with digests; of a file that nobody opens there is one."""
        try:
            return list(self._of_file(name))
        except Unreadable as error:
            self.notes.append(f"{name}: {error}")
            return []

    def _of_file(self, name: str) -> Iterator[tuple[str, bytes]]:
        home, _, base = name.rpartition("/")
        index = self._known.indexes.get(f"{home}/" if home else "")
        if _DOCUMENTS.fullmatch(base) or (index and base.endswith(SLICES)):
            return
        if index and base == INDEX:
            for value in sorted(index.values):
                yield from self._value(index, value)
        elif base.endswith(SAFE):
            _, meta = read_header(self._folder, self._listing, name)
            yield "__metadata__", self._digests.of_value(meta)
        elif (archive := self._archive(name)) is not None:
            yield from self._unread(archive, archive.value, "", self._known.fields.get(name))
        else:
            yield "", self._digests.of_file(name)

    def _archive(self, name: str) -> Archive | None:
        if not name.endswith(TORCH):
            return None
        try:
            return open_archive(self._folder, self._listing, name)
        except Unreadable:
            return None

    def _value(self, index: Index, name: str) -> Iterator[tuple[str, bytes]]:
        """Yield what is not told of a value of a distributed checkpoint, which is in a slice."""
        slices = index.slices.get(name, ())
        if len(slices) == 1:
            one = slices[0]
            try:
                archive = open_archive(
                    self._folder, self._listing, one.file, one.start, one.size_bytes
                )
            except Unreadable:
                pass
            else:
                yield from self._unread(archive, archive.value, name, self._known.fields.get(name))
                return
        parts = [self._digests.of_range(one.file, one.start, one.size_bytes) for one in slices]
        yield name, b"".join(parts)

    def _unread(
        self, archive: Archive, value: Any, path: str, told: Callable[[str], bool] | None
    ) -> Iterator[tuple[str, bytes]]:
        value = _without(value, self._known.names.get(archive.name, frozenset()))
        walk = _Walk(archive, self._digests, self._places, told or (lambda _: False))
        yield from walk.of(value, path, 0)


class _Walk:
    """Finds in a pickle what is told neither as a field nor as a tensor."""

    def __init__(
        self,
        archive: Archive,
        digests: Digests,
        places: set[tuple[str, int]],
        told: Callable[[str], bool],
    ) -> None:
        self._archive, self._digests, self._places, self._told = archive, digests, places, told

    def of(self, value: Any, path: str, depth: int) -> Iterator[tuple[str, bytes]]:
        """Yield paths with digests; what has no parts that are told is told as one."""
        if isinstance(value, Made) and isinstance(value.state, dict):
            if self._told(path) or depth == 0 or value.args or value.items:
                made = (value.name, value.args, value.items)
                yield f"{path}()", self._digest(made)
            value = value.state
        parts = _parts(value) if depth <= DEPTH_MAX else ()
        if parts and self._is_worth_a_walk(parts):
            for key, one in parts:
                yield from self.of(one, f"{path}.{key}" if path else key, depth + 1)
        elif not self._is_told(value, path):
            yield path, self._digest(value)

    def _is_worth_a_walk(self, parts: Sequence[tuple[str, Any]]) -> bool:
        """Say whether parts are more than a row of plain values, which is told as one."""
        return not all(key.isdecimal() and _is_plain(one) for key, one in parts)

    def _is_told(self, value: Any, path: str) -> bool:
        if isinstance(value, TensorRef):
            pieces = self._archive.pieces(value)
            if any((one.file, one.start) in self._places for one in pieces):
                return True
            is_number = not value.shape and self._archive.number(value) is not None
            return is_number and self._told(path)
        is_row = isinstance(value, list | tuple) and not isinstance(value, Unordered)
        is_plain = all(map(_is_plain, value)) if is_row else _is_plain(value)
        return is_plain and self._told(path)

    def _digest(self, value: Any) -> bytes:
        return self._digests.of_value(value, self._archive)


def _without(value: Any, names: frozenset[str]) -> Any:
    if names and isinstance(value, dict):
        return {key: one for key, one in value.items() if key not in names}
    if names and isinstance(value, Made):
        return Made(value.name, value.args, _without(value.state, names), value.items)
    return value


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(str(key), one) for key, one in value.items()]
    if isinstance(value, list | tuple) and not isinstance(value, Unordered):
        return [(str(number), one) for number, one in enumerate(value)]
    return []


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | Name)
