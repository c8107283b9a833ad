"""A checkpoint that another tool wrote, as what another can be held against.

Everything is read as data, as :mod:`resilient.layouts` does: nothing is unpickled.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from resilient.comparison.opaque import Opaque, Understood, opaque_in
from resilient.comparison.plainly import is_shown, known, place_of
from resilient.comparison.randomness import of_numpy, of_philox, of_python, of_torch
from resilient.comparison.reading import ReadAhead
from resilient.comparison.trees import plain_leaves
from resilient.comparison.values import (
    CONFIG,
    DATA,
    GROUPS,
    MODEL_CONFIG,
    SCHEDULE,
    SOFTWARE,
    TRAINER,
    Side,
)
from resilient.layouts.archives import Archive, open_archive
from resilient.layouts.deepspeed import is_engine, shapes_in, tag_of
from resilient.layouts.distributed import INDEX, read_index, value_at
from resilient.layouts.documents import read_json
from resilient.layouts.partitions import gathered
from resilient.layouts.pickled import Made, TensorRef
from resilient.layouts.places import settled
from resilient.layouts.plain import ALONE
from resilient.layouts.values import ITEM_BITS, Form, Unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from resilient.comparison.values import State
    from resilient.layouts.values import Contents, Tensor
    from resilient.storage.folder import Folder, Listing

VALUES_MAX = 5_000
"""Values of one distributed checkpoint that are looked at; each is a file of its own in there."""
_STATE, _HISTORY = "trainer_state.json", "log_history"
_RANDOM = re.compile(r"(?:rng_state(?:_(\d{1,7}))?\.pth|random_states_(\d{1,7})\.pkl)")
_WITH_ENGINE = ("hf-trainer", "accelerate", "deepspeed")
_ARGUMENTS = "training_args.bin"
_SCHEDULES = ("scheduler.pt", "scheduler.bin")
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
_OF_THE_PROCESS = ("distributed_state", "deepspeed_plugin", "hf_deepspeed_config")
"""What arguments keep that is nobody's argument."""
_OF_ACCELERATE = {
    "random_state": "python", "numpy_random_seed": "numpy", "torch_manual_seed": "cpu",
    "torch_cuda_manual_seed": "cuda",
}  # fmt: skip


def side_of(folder: Folder, listing: Listing, contents: Contents) -> Side:
    """Return one side.

    Args:
        folder: where it is.
        listing: what is there.
        contents: what :func:`resilient.layouts.recognizing.read_layout` said of it.

    Raises:
        StoreError: it could not be read.
    """
    near = ReadAhead(folder, listing)
    reader = _Reader(near, listing, contents)
    tensors, order = reader.tensors()
    fields = reader.fields()
    rates = contents.schedule.rates if contents.schedule else ()
    return Side(
        folder.url,
        contents.layout,
        folder.url.rstrip("/").rpartition("/")[2],
        contents.step,
        contents.world,
        near,
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


class _Reader:
    """Reads what is not in the summary of a checkpoint; remembers what it could not."""

    def __init__(self, folder: Folder, listing: Listing, contents: Contents) -> None:
        self._folder, self._listing, self._contents = folder, listing, contents
        # That it holds weights alone is no reason not to compare them.
        broken = [one for one in contents.problems if one.is_fatal and one.what != ALONE]
        self.notes = [f"{one.place}: {one.what}" for one in broken]
        self.history: tuple[Any, ...] = ()
        self._streams: dict[str, frozenset[str]] = {}

    def opaque(self, tensors: Iterable[Tensor]) -> tuple[dict[str, Opaque], list[str]]:
        """Return what was not understood, with digests, and what of it could not be read."""
        alone = self._listing.sizes if self._listing.is_file else ()
        told: dict[str, Callable[[str], bool]] = {
            **dict.fromkeys(alone, _is_field),
            **dict.fromkeys((_ARGUMENTS, *_SCHEDULES), is_shown),
            **dict.fromkeys((*_OPTIMIZERS, *self._shares()), _is_group),
        }
        indexes = {}
        for prefix in self._indexes():
            with suppress(Unreadable):
                indexes[prefix] = read_index(self._folder, self._listing, prefix)
                looked = sorted(indexes[prefix].values)[:VALUES_MAX]
                told |= dict.fromkeys(looked, _is_field)
        names = {**self._streams, _ARGUMENTS: frozenset(_OF_THE_PROCESS)}
        known = Understood(self._engine() or "", indexes, told, names)
        return opaque_in(self._folder, self._listing, tensors, known)

    def tensors(self) -> tuple[tuple[Tensor, ...], tuple[str, ...]]:
        """Return all tensors, each whole, and the order of the parameters if it is told."""
        prefix = self._engine()
        if prefix is None:
            return self._contents.tensors, self._named_order()
        try:
            found = gathered(self._folder, self._listing, prefix)
        except Unreadable as error:
            self.notes.append(f"{prefix or '.'}: {error}; its state is compared rank by rank")
            return self._contents.tensors, ()
        return found, self._engine_order(prefix)

    def _engine(self) -> str | None:
        if self._contents.layout not in _WITH_ENGINE:
            return None
        if is_engine(self._listing):
            return ""
        return tag_of(self._folder, self._listing) or None

    def _engine_order(self, prefix: str) -> tuple[str, ...]:
        names = [one for one in self._listing.sizes if one.startswith(prefix)]
        archive = self._open(min(one for one in names if one.endswith("_model_states.pt")))
        value = archive.value if archive and isinstance(archive.value, dict) else {}
        return tuple(name for name, _ in shapes_in(value.get("param_shapes")))

    def _named_order(self) -> tuple[str, ...]:
        names: list[str] = []
        for file in _OPTIMIZERS:
            archive = self._open(file)
            value = archive.value if archive else None
            groups = value.get("param_groups") if isinstance(value, dict) else None
            for group in groups if isinstance(groups, list) else ():
                told = group.get("params") if isinstance(group, dict) else None
                held = told if isinstance(told, list | tuple) else ()
                names += [one for one in held if isinstance(one, str)]
        for prefix in self._indexes():
            for key, value in sorted(self._values(prefix).items()):
                if key.endswith(".params") and isinstance(value, list | tuple):
                    names += [one for one in value if isinstance(one, str)]
        return tuple(names)

    def _indexes(self) -> list[str]:
        """Return the folders of distributed checkpoints in it."""
        return [one.removesuffix(INDEX) for one in sorted(self._listing.sizes) if _is_index(one)]

    def _values(self, prefix: str) -> dict[str, Any]:
        try:
            index = read_index(self._folder, self._listing, prefix)
        except Unreadable:
            return {}
        names = sorted(index.values)
        if len(names) > VALUES_MAX:
            left = len(names) - VALUES_MAX
            self.notes.append(f"{prefix or '.'}: {left} values that are no tensors were left out")
        held = names[:VALUES_MAX]
        return {one: value_at(self._folder, self._listing, index, one) for one in held}

    def fields(self) -> dict[str, dict[str, Any]]:
        """Return plain values by section."""
        state = self._json(_STATE)
        history = state.pop(_HISTORY, None)
        self.history = tuple(history) if isinstance(history, list) else ()
        found = {
            CONFIG: dict(known(self._config())),
            MODEL_CONFIG: dict(plain_leaves(self._json("config.json"))),
            SOFTWARE: dict(self._contents.versions),
            TRAINER: dict(plain_leaves(state)),
            SCHEDULE: {name: it for file in _SCHEDULES for name, it in self._leaves(file)},
            GROUPS: {},
            DATA: dict(self._contents.data),
        }
        for path, value in self._loose():
            section, name = place_of(path)
            if section:
                found[section][name] = value
        return found

    def _config(self) -> Any:
        archive = self._open(_ARGUMENTS)
        value = archive.value if archive else None
        told = value.state if isinstance(value, Made) else value
        if not isinstance(told, dict):
            return {}
        return {name: one for name, one in told.items() if name not in _OF_THE_PROCESS}

    def _loose(self) -> Iterator[tuple[str, Any]]:
        """Yield values that lie beside tensors, by a path that says whose they are."""
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
        """Return the first rank's share of an engine's optimizer; its groups are those of all."""
        if self._engine() is None:
            return []
        return sorted(one for one in self._listing.sizes if one.endswith("_optim_states.pt"))[:1]

    def _leaves(self, name: str) -> Iterator[tuple[str, Any]]:
        archive = self._open(name)
        if archive:
            yield from self._walked(name, archive.value, "", archive)

    def _walked(
        self, name: str, value: Any, path: str, archive: Archive | None = None
    ) -> list[tuple[str, Any]]:
        """Return the plain values in one; none if they are too many, which is told."""
        try:
            return list(known({path: value} if path else value, archive))
        except Unreadable as error:
            self.notes.append(f"{name}: {error}")
            return []

    def random(self) -> dict[tuple[int, str], State]:
        """Return the states of all generators."""
        found: dict[tuple[int, str], State] = {}
        for name in self._listing.sizes:
            match = _RANDOM.fullmatch(name)
            archive = self._open(name) if match else None
            if match and archive and isinstance(archive.value, dict):
                rank = int(match[1] or match[2] or 0)
                states = list(self._states(archive))
                found |= {(rank, kind): one for kind, one in states if one is not None}
                self._streams[name] = _streams(archive.value, states)
        return found

    def _states(self, archive: Archive) -> Iterator[tuple[str, State | None]]:
        value = {_OF_ACCELERATE.get(name, name): one for name, one in archive.value.items()}
        yield "python", of_python(value.get("python"))
        yield "numpy", _numpy(value.get("numpy"))
        yield "cpu", of_torch(self._bytes(archive, value.get("cpu")))
        cuda = value.get("cuda")
        for number, one in enumerate(cuda if isinstance(cuda, list) else [cuda]):
            yield f"cuda {number}", of_philox(self._bytes(archive, one))

    def _bytes(self, archive: Archive, tensor: Any) -> bytes:
        """Return the bytes of a small tensor; none if it is no tensor, or is damaged."""
        pieces = archive.pieces(tensor) if isinstance(tensor, TensorRef) else ()
        if not pieces:
            return b""
        try:
            piece = settled(self._folder, self._listing, pieces[0], tensor.dtype)
        except Unreadable as error:
            self.notes.append(f"{archive.name}: {error}")
            return b""
        item_bytes = ITEM_BITS.get(tensor.dtype, 0) // 8
        length = piece.region.size * item_bytes
        start = piece.start + piece.first * item_bytes
        return self._folder.read(piece.file, start, length) if piece.form is Form.BYTES else b""

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
    """Yield what parameter groups are told; beside them an engine keeps how it cut everything."""
    return ((path, one) for path, one in leaves if "param_groups." in path)


def _is_field(path: str) -> bool:
    return is_shown(path) and bool(place_of(path)[0])


def _is_group(path: str) -> bool:
    return is_shown(path) and "param_groups." in path and bool(place_of(path)[0])


def _streams(
    value: Mapping[str, Any], states: Iterable[tuple[str, State | None]]
) -> frozenset[str]:
    """Return the names in a file of random states that were understood, each wholly."""
    unread = {kind.partition(" ")[0] for kind, one in states if one is None}
    kinds = {name: _OF_ACCELERATE.get(name, name) for name in value}
    return frozenset(
        name for name, kind in kinds.items() if kind in {*_OF_ACCELERATE.values()} - unread
    )


def _numpy(value: Any) -> State | None:
    """Return NumPy's state out of ``get_state()``: name, words, position, and a cached normal."""
    if not isinstance(value, list | tuple) or len(value) != 5:  # noqa: PLR2004
        return None
    _, key, position, has_gauss, gauss = value
    state = key.state if isinstance(key, Made) else None
    data = state[-1] if isinstance(state, tuple) and state else b""
    if not isinstance(data, bytes) or not isinstance(gauss, int | float):
        return None
    return of_numpy(data, position, has_gauss, gauss)
