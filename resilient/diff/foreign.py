"""View of another tool's checkpoint for a comparison.

As in :mod:`resilient.layouts`, all content is read as data, and nothing is unpickled. A field is a
named plain value, such as a number or a text. A comparison uses the values of tensors, fields and
random states, and digests of all other content. This opaque content consists of files without a
reader, and of pickled values that are not fields (NumPy arrays, sets, sparse tensors).
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resilient.diff.digests import Digests, plain_leaves
from resilient.diff.model import (
    CONFIG,
    DATA,
    GROUPS,
    MODEL_CONFIG,
    SCHEDULE,
    SOFTWARE,
    TRAINER,
    CheckpointView,
    Opaque,
)
from resilient.diff.rng import of_numpy, of_philox, of_python, of_torch
from resilient.diff.tensor_reader import ReadAhead
from resilient.layouts.dcp import INDEX, SLICES, read_index, value_at
from resilient.layouts.deepspeed import is_engine, shapes_in, tag_of
from resilient.layouts.deepspeed_partitions import gathered
from resilient.layouts.json_files import read_header, read_json
from resilient.layouts.model import ITEM_BITS, StorageFormat, Unreadable
from resilient.layouts.pickle_reader import PickledCall, PickledGlobal, TensorRef, Unordered
from resilient.layouts.single_file import ALONE
from resilient.layouts.torch_zip import Archive, open_archive, resolve_pieces
from resilient.layouts.weights import SAFE, TORCH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from resilient.diff.model import RngState
    from resilient.layouts.dcp import Index
    from resilient.layouts.model import Contents, Tensor
    from resilient.storage.folder import DirectoryListing, Folder

LEAVES_MAX, DEPTH_MAX = 200_000, 32
"""Limits on the plain values of one file and on their depth."""
_SHOWN_TEXT_MAX = 200
_KEPT = ("_last_lr", "_step_count")
"""Private attributes of a schedule that are fields."""


def place_of(path: str) -> tuple[str, str]:
    """Return the section and name of a value by its path; an empty section if it is not a field."""
    _, marker, option_path = path.rpartition("param_groups.")
    if marker:
        return ("", "") if ".params" in f".{option_path}" else (GROUPS, option_path)
    # Values of one parameter are optimizer state, which is compared as tensors.
    is_state = re.search(r"(?:^|\.)state\.", path)
    return ("", "") if is_state else (TRAINER, path)


def to_plain(value: Any, archive: Archive | None = None) -> Iterator[tuple[str, Any]]:
    """Yield the plain values of a pickle with their paths."""
    for path, leaf in plain_leaves(_plain(value, archive, [LEAVES_MAX])):
        if is_field(path):
            yield path, leaf


def is_field(path: str) -> bool:
    """Return True if a value is a field; private attributes are not fields."""
    return bool(path) and (not path.startswith("_") or path in _KEPT)


def _plain(value: Any, archive: Archive | None, left: list[int], depth: int = 0) -> Any:
    """Return a value of a pickle, with calls replaced by plain values if possible.

    Args:
        value: Content of the pickle; shared objects are walked each time they occur.
        archive: Archive with the tensors.
        left: Remaining number of values that may be walked.
        depth: Number of enclosing lists and dicts.

    Raises:
        Unreadable: The pickle has more values than any configuration.
    """
    left[0] -= 1
    if left[0] < 0:
        raise Unreadable(f"more than {LEAVES_MAX} values")
    if depth > DEPTH_MAX:
        return "..."
    if isinstance(value, PickledCall) and isinstance(value.state, dict):
        value = value.state
    if isinstance(value, dict):
        return {str(key): _plain(item, archive, left, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, archive, left, depth + 1) for item in value]
    if isinstance(value, TensorRef):
        # Tensors are compared separately, but a tensor without axes is a number.
        return archive.number(value) if archive and not value.shape else {}
    return _leaf(value)


def _leaf(value: Any) -> Any:
    """Return a plain value; for a call its single argument, else its name."""
    if isinstance(value, PickledCall):
        args = value.args if isinstance(value.args, tuple) else ()
        return args[0] if len(args) == 1 and isinstance(args[0], str | int) else value.kind
    if isinstance(value, bytes):
        return value[:_SHOWN_TEXT_MAX].hex()
    return value.dotted if isinstance(value, PickledGlobal) else value


_DOCUMENTS = re.compile(
    r"config\.json|trainer_state\.json|.*\.index\.json|latest|latest_universal|zero_to_fp32\.py"
)
"""Files that are compared as fields, or that only point to others."""
_CUT = re.compile(r"(?:^|\.)(?:dp_world_size|mp_world_size|ds_config|param_shapes)(?:\.|$)")
_RANK_FILE = re.compile(r"optim_states\.pt$|rank_0*[1-9]\d*_")


@dataclass(frozen=True, slots=True)
class ComparedContent:
    """Content of a view that a comparison does not compare by digest.

    Attributes:
        prefix: Folder of the engine's files, named after a step.
        indexes: Distributed checkpoints by their folders.
        fields: Predicates that select fields by the path of a plain value. The key is a file or a
            value of a distributed checkpoint. A file without a predicate has no fields.
        names: Names by file that are compared in another way, such as states of generators, or that
            do not describe the run.
    """

    prefix: str
    indexes: Mapping[str, Index]
    fields: Mapping[str, Callable[[str], bool]]
    names: Mapping[str, frozenset[str]]


def opaque_in(
    folder: Folder,
    listing: DirectoryListing,
    tensors: Iterable[Tensor],
    compared_content: ComparedContent,
) -> tuple[dict[str, Opaque], list[str]]:
    """Return the digests of opaque content by place, and notes on what could not be read.

    Args:
        folder: Folder of the checkpoint.
        listing: Its files.
        tensors: Tensors that are compared as tensors.
        compared_content: Other content that is compared.

    Raises:
        StoreError: A file could not be read.
    """
    reader = _OpaqueReader(folder, listing, tensors, compared_content)
    opaque_values: dict[str, Opaque] = {}
    for name in sorted(listing.sizes):
        label = "" if listing.is_file else _label(name, compared_content.prefix)
        is_cut = bool(compared_content.prefix or label != name) and bool(_RANK_FILE.search(name))
        for path, digest in reader.of_file(name):
            place = f"{label}: {path}" if label and path else label or path or "the file"
            opaque_values[place] = Opaque(digest, is_cut or bool(_CUT.search(path)))
    notes = [f"{value}: {listing.why_unread(value)}" for value in listing.outside]
    return opaque_values, [*reader.notes, *notes]


def _label(name: str, prefix: str) -> str:
    return f"*/{name.removeprefix(prefix)}" if prefix and name.startswith(prefix) else name


class _OpaqueReader:
    """Reader of the digests of one view, with notes on unreadable content."""

    def __init__(
        self,
        folder: Folder,
        listing: DirectoryListing,
        tensors: Iterable[Tensor],
        compared_content: ComparedContent,
    ) -> None:
        self._folder, self._listing, self._compared_content = folder, listing, compared_content
        self._digests = Digests(folder, listing)
        self._places = {(piece.file, piece.start) for tensor in tensors for piece in tensor.pieces}
        self.notes: list[str] = []

    def of_file(self, name: str) -> list[tuple[str, bytes]]:
        """Return the paths in a file with their digests; one digest for a file without a reader."""
        try:
            return list(self._read_file(name))
        except Unreadable as error:
            self.notes.append(f"{name}: {error}")
            return []

    def _read_file(self, name: str) -> Iterator[tuple[str, bytes]]:
        home, _, base = name.rpartition("/")
        index = self._compared_content.indexes.get(f"{home}/" if home else "")
        if _DOCUMENTS.fullmatch(base) or (index and base.endswith(SLICES)):
            return
        if index and base == INDEX:
            for value in sorted(index.values):
                yield from self._value(index, value)
        elif base.endswith(SAFE):
            _, meta = read_header(self._folder, self._listing, name)
            yield "__metadata__", self._digests.of_value(meta)
        elif (archive := self._archive(name)) is not None:
            yield from self._unread(
                archive, archive.value, "", self._compared_content.fields.get(name)
            )
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
        """Yield digests for a value of a distributed checkpoint, which is stored in a slice."""
        slices = index.slices.get(name, ())
        if len(slices) == 1:
            piece = slices[0]
            try:
                archive = open_archive(
                    self._folder, self._listing, piece.file, piece.start, piece.size_bytes
                )
            except Unreadable:
                pass
            else:
                yield from self._unread(
                    archive, archive.value, name, self._compared_content.fields.get(name)
                )
                return
        parts = [self._digests.of_range(part.file, part.start, part.size_bytes) for part in slices]
        yield name, b"".join(parts)

    def _unread(
        self, archive: Archive, value: Any, path: str, is_reported: Callable[[str], bool] | None
    ) -> Iterator[tuple[str, bytes]]:
        value = _without(value, self._compared_content.names.get(archive.name, frozenset()))
        walk = _Walk(archive, self._digests, self._places, is_reported or (lambda _: False))
        yield from walk.of(value, path, 0)


class _Walk:
    """Search of a pickle for values that are neither fields nor tensors."""

    def __init__(
        self,
        archive: Archive,
        digests: Digests,
        places: set[tuple[str, int]],
        is_reported: Callable[[str], bool],
    ) -> None:
        self._archive, self._digests, self._places, self._is_reported = (
            archive,
            digests,
            places,
            is_reported,
        )

    def of(self, value: Any, path: str, depth: int) -> Iterator[tuple[str, bytes]]:
        """Yield paths with digests; a value without any field gets a single digest."""
        if isinstance(value, PickledCall) and isinstance(value.state, dict):
            if self._is_reported(path) or depth == 0 or value.args or value.items:
                call_parts = (value.name, value.args, value.items)
                yield f"{path}()", self._digest(call_parts)
            value = value.state
        parts = _parts(value) if depth <= DEPTH_MAX else ()
        if parts and self._is_walked(parts):
            for key, child in parts:
                yield from self.of(child, f"{path}.{key}" if path else key, depth + 1)
        elif not self._is_shown(value, path):
            yield path, self._digest(value)

    def _is_walked(self, parts: Sequence[tuple[str, Any]]) -> bool:
        """Return False for a plain list, which counts as one value."""
        return not all(key.isdecimal() and _is_plain(child) for key, child in parts)

    def _is_shown(self, value: Any, path: str) -> bool:
        if isinstance(value, TensorRef):
            pieces = self._archive.pieces(value)
            if any((piece.file, piece.start) in self._places for piece in pieces):
                return True
            is_number = not value.shape and self._archive.number(value) is not None
            return is_number and self._is_reported(path)
        is_row = isinstance(value, list | tuple) and not isinstance(value, Unordered)
        is_plain = all(map(_is_plain, value)) if is_row else _is_plain(value)
        return is_plain and self._is_reported(path)

    def _digest(self, value: Any) -> bytes:
        return self._digests.of_value(value, self._archive)


def _without(value: Any, names: frozenset[str]) -> Any:
    if names and isinstance(value, dict):
        return {key: item for key, item in value.items() if key not in names}
    if names and isinstance(value, PickledCall):
        return PickledCall(value.name, value.args, _without(value.state, names), value.items)
    return value


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(str(key), item) for key, item in value.items()]
    if isinstance(value, list | tuple) and not isinstance(value, Unordered):
        return [(str(number), item) for number, item in enumerate(value)]
    return []


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | PickledGlobal)


VALUES_MAX = 5_000
"""Largest number of values that are read from one distributed checkpoint, each by one read."""
_STATE, _HISTORY = "trainer_state.json", "log_history"
_RANDOM = re.compile(r"(?:rng_state(?:_(\d{1,7}))?\.pth|random_states_(\d{1,7})\.pkl)")
_WITH_ENGINE = ("hf-trainer", "accelerate", "deepspeed")
_ARGUMENTS = "training_args.bin"
_SCHEDULES = ("scheduler.pt", "scheduler.bin")
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
_OF_THE_PROCESS = ("distributed_state", "deepspeed_plugin", "hf_deepspeed_config")
"""Attributes of the arguments that describe the process."""
_OF_ACCELERATE = {
    "random_state": "python", "numpy_random_seed": "numpy", "torch_manual_seed": "cpu",
    "torch_cuda_manual_seed": "cuda",
}  # fmt: skip


def open_foreign(folder: Folder, listing: DirectoryListing, contents: Contents) -> CheckpointView:
    """Return the view of another tool's checkpoint.

    Args:
        folder: Folder of the checkpoint.
        listing: Its files.
        contents: Result of :func:`resilient.layouts.detect.read_layout`.

    Raises:
        StoreError: A file could not be read.
    """
    read_ahead = ReadAhead(folder, listing)
    reader = _ContentReader(read_ahead, listing, contents)
    tensors, order = reader.tensors()
    fields = reader.fields()
    rates = contents.schedule.rates if contents.schedule else ()
    return CheckpointView(
        folder.url,
        contents.layout,
        folder.url.rstrip("/").rpartition("/")[2],
        contents.step,
        contents.world,
        read_ahead,
        listing,
        tensors,
        fields,
        reader.random(),
        rates or (contents.optimizer.rates if contents.optimizer else ()),
        order,
        reader.history,
        tuple(dict.fromkeys(reader.notes)),
        lambda: reader.opaque(tensors),
    )


class _ContentReader:
    """Reader of content that the summary of a checkpoint lacks, with notes on failures."""

    def __init__(self, folder: Folder, listing: DirectoryListing, contents: Contents) -> None:
        self._folder, self._listing, self._contents = folder, listing, contents
        # A comparison needs no optimizer.
        fatal_problems = [
            problem for problem in contents.problems if problem.is_fatal and problem.what != ALONE
        ]
        self.notes = [f"{problem.place}: {problem.what}" for problem in fatal_problems]
        self.history: tuple[Any, ...] = ()
        self._streams: dict[str, frozenset[str]] = {}

    def opaque(self, tensors: Iterable[Tensor]) -> tuple[dict[str, Opaque], list[str]]:
        """Return the digests of opaque content, and notes on what could not be read."""
        single_files = self._listing.sizes if self._listing.is_file else ()
        is_reported: dict[str, Callable[[str], bool]] = {
            **dict.fromkeys(single_files, _is_field),
            **dict.fromkeys((_ARGUMENTS, *_SCHEDULES), is_field),
            **dict.fromkeys((*_OPTIMIZERS, *self._shares()), _is_group),
        }
        indexes = {}
        for prefix in self._indexes():
            with suppress(Unreadable):
                indexes[prefix] = read_index(self._folder, self._listing, prefix)
                sample = sorted(indexes[prefix].values)[:VALUES_MAX]
                is_reported |= dict.fromkeys(sample, _is_field)
        names = {**self._streams, _ARGUMENTS: frozenset(_OF_THE_PROCESS)}
        compared_content = ComparedContent(self._engine() or "", indexes, is_reported, names)
        return opaque_in(self._folder, self._listing, tensors, compared_content)

    def tensors(self) -> tuple[tuple[Tensor, ...], tuple[str, ...]]:
        """Return all whole tensors, and the order of the parameters if known."""
        prefix = self._engine()
        if prefix is None:
            return self._contents.tensors, self._named_order()
        try:
            tensors = gathered(self._folder, self._listing, prefix)
        except Unreadable as error:
            self.notes.append(f"{prefix or '.'}: {error}; its state is compared rank by rank")
            return self._contents.tensors, ()
        return tensors, self._engine_order(prefix)

    def _engine(self) -> str | None:
        if self._contents.layout not in _WITH_ENGINE:
            return None
        if is_engine(self._listing):
            return ""
        return tag_of(self._folder, self._listing) or None

    def _engine_order(self, prefix: str) -> tuple[str, ...]:
        names = [file for file in self._listing.sizes if file.startswith(prefix)]
        archive = self._open(min(name for name in names if name.endswith("_model_states.pt")))
        value = archive.value if archive and isinstance(archive.value, dict) else {}
        return tuple(name for name, _ in shapes_in(value.get("param_shapes")))

    def _named_order(self) -> tuple[str, ...]:
        names: list[str] = []
        for file in _OPTIMIZERS:
            archive = self._open(file)
            value = archive.value if archive else None
            groups = value.get("param_groups") if isinstance(value, dict) else None
            for group in groups if isinstance(groups, list) else ():
                members = group.get("params") if isinstance(group, dict) else None
                items = members if isinstance(members, list | tuple) else ()
                names += [name for name in items if isinstance(name, str)]
        for prefix in self._indexes():
            for key, value in sorted(self._values(prefix).items()):
                if key.endswith(".params") and isinstance(value, list | tuple):
                    names += [name for name in value if isinstance(name, str)]
        return tuple(names)

    def _indexes(self) -> list[str]:
        """Return the folders of the distributed checkpoints in the folder."""
        return [file.removesuffix(INDEX) for file in sorted(self._listing.sizes) if _is_index(file)]

    def _values(self, prefix: str) -> dict[str, Any]:
        try:
            index = read_index(self._folder, self._listing, prefix)
        except Unreadable:
            return {}
        names = sorted(index.values)
        if len(names) > VALUES_MAX:
            skipped_count = len(names) - VALUES_MAX
            self.notes.append(
                f"{prefix or '.'}: {skipped_count} values that are not tensors were skipped"
            )
        paths = names[:VALUES_MAX]
        return {path: value_at(self._folder, self._listing, index, path) for path in paths}

    def fields(self) -> dict[str, dict[str, Any]]:
        """Return plain values by section."""
        state = self._json(_STATE)
        history = state.pop(_HISTORY, None)
        self.history = tuple(history) if isinstance(history, list) else ()
        fields = {
            CONFIG: dict(to_plain(self._config())),
            MODEL_CONFIG: dict(plain_leaves(self._json("config.json"))),
            SOFTWARE: dict(self._contents.versions),
            TRAINER: dict(plain_leaves(state)),
            SCHEDULE: {name: leaf for file in _SCHEDULES for name, leaf in self._leaves(file)},
            GROUPS: {},
            DATA: dict(self._contents.data),
        }
        for path, value in self._values_beside_tensors():
            section, name = place_of(path)
            if section:
                fields[section][name] = value
        return fields

    def _config(self) -> Any:
        archive = self._open(_ARGUMENTS)
        value = archive.value if archive else None
        config = value.state if isinstance(value, PickledCall) else value
        if not isinstance(config, dict):
            return {}
        return {name: option for name, option in config.items() if name not in _OF_THE_PROCESS}

    def _values_beside_tensors(self) -> Iterator[tuple[str, Any]]:
        """Yield values beside tensors by a path that names their owner."""
        for name in _OPTIMIZERS:
            yield from _groups(self._leaves(name))
        for prefix in self._indexes():
            for path, value in self._values(prefix).items():
                yield from self._walked(path, value, path)
        for name in self._shares():
            yield from _groups(self._leaves(name))
        if self._contents.layout in ("torch", "lightning") and self._listing.is_file:
            yield from self._leaves(next(iter(self._listing.sizes)))

    def _shares(self) -> list[str]:
        """Return an engine's optimizer file of the first rank; all ranks have the same groups."""
        if self._engine() is None:
            return []
        return sorted(file for file in self._listing.sizes if file.endswith("_optim_states.pt"))[:1]

    def _leaves(self, name: str) -> Iterator[tuple[str, Any]]:
        archive = self._open(name)
        if archive:
            yield from self._walked(name, archive.value, "", archive)

    def _walked(
        self, name: str, value: Any, path: str, archive: Archive | None = None
    ) -> list[tuple[str, Any]]:
        """Return the plain values inside one value; empty, with a note, if there are too many."""
        try:
            return list(to_plain({path: value} if path else value, archive))
        except Unreadable as error:
            self.notes.append(f"{name}: {error}")
            return []

    def random(self) -> dict[tuple[int, str], RngState]:
        """Return the states of all generators."""
        random_states: dict[tuple[int, str], RngState] = {}
        for name in self._listing.sizes:
            match = _RANDOM.fullmatch(name)
            archive = self._open(name) if match else None
            if match and archive and isinstance(archive.value, dict):
                rank = int(match[1] or match[2] or 0)
                states = list(self._states(archive))
                random_states |= {
                    (rank, kind): state for kind, state in states if state is not None
                }
                self._streams[name] = _streams(archive.value, states)
        return random_states

    def _states(self, archive: Archive) -> Iterator[tuple[str, RngState | None]]:
        value = {_OF_ACCELERATE.get(name, name): state for name, state in archive.value.items()}
        yield "python", of_python(value.get("python"))
        yield "numpy", _numpy(value.get("numpy"))
        yield "cpu", of_torch(self._bytes(archive, value.get("cpu")))
        cuda = value.get("cuda")
        for number, state in enumerate(cuda if isinstance(cuda, list) else [cuda]):
            yield f"cuda {number}", of_philox(self._bytes(archive, state))

    def _bytes(self, archive: Archive, tensor: Any) -> bytes:
        """Return the bytes of a small tensor; empty for a damaged tensor or another value."""
        pieces = archive.pieces(tensor) if isinstance(tensor, TensorRef) else ()
        if not pieces:
            return b""
        try:
            piece = resolve_pieces(self._folder, self._listing, pieces[0], tensor.dtype)
        except Unreadable as error:
            self.notes.append(f"{archive.name}: {error}")
            return b""
        item_bytes = ITEM_BITS.get(tensor.dtype, 0) // 8
        length = piece.region.size * item_bytes
        start = piece.start + piece.first * item_bytes
        return (
            self._folder.read(piece.file, start, length)
            if piece.form is StorageFormat.BYTES
            else b""
        )

    def _json(self, name: str) -> dict[str, Any]:
        if name not in self._listing.sizes:
            return {}
        try:
            return read_json(self._folder, self._listing, name)
        except Unreadable as error:
            self.notes.append(f"{name}: {error}")
            return {}

    def _open(self, name: str) -> Archive | None:
        if name not in self._listing.sizes:
            return None
        try:
            return open_archive(self._folder, self._listing, name)
        except Unreadable as error:
            self.notes.append(f"{name}: {error}")
            return None


def _is_index(name: str) -> bool:
    return name.rpartition("/")[2] == INDEX


def _groups(leaves: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the options of parameter groups; other values of an engine describe its partitions."""
    return ((path, leaf) for path, leaf in leaves if "param_groups." in path)


def _is_field(path: str) -> bool:
    return is_field(path) and bool(place_of(path)[0])


def _is_group(path: str) -> bool:
    return is_field(path) and "param_groups." in path and bool(place_of(path)[0])


def _streams(
    value: Mapping[str, Any], states: Iterable[tuple[str, RngState | None]]
) -> frozenset[str]:
    """Return the names in a file of random states that the reader fully interprets."""
    unread_kinds = {kind.partition(" ")[0] for kind, state in states if state is None}
    kinds = {name: _OF_ACCELERATE.get(name, name) for name in value}
    return frozenset(
        name for name, kind in kinds.items() if kind in {*_OF_ACCELERATE.values()} - unread_kinds
    )


def _numpy(value: Any) -> RngState | None:
    """Return NumPy's state from ``get_state()``: name, words, position, and a cached normal."""
    if not isinstance(value, list | tuple) or len(value) != 5:  # noqa: PLR2004
        return None
    _, key, position, has_gauss, gauss = value
    state = key.state if isinstance(key, PickledCall) else None
    data = state[-1] if isinstance(state, tuple) and state else b""
    if not isinstance(data, bytes) or not isinstance(gauss, int | float):
        return None
    return of_numpy(data, position, has_gauss, gauss)
