"""View of a checkpoint in this library's own format, for a comparison.

The view reads tensors in ranges of bytes and does not verify their bytes. The command
``ckpt verify`` verifies all bytes.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from resilient.diff.digests import Digests, TensorPlaceholder, plain_leaves, value_of
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
from resilient.diff.tensor_reader import Elements, ReadAhead
from resilient.errors import KeyNotFound
from resilient.format.keys import STATE_DOCUMENT
from resilient.layouts.json_files import read_header, read_json
from resilient.layouts.model import MODEL, OPTIMIZER, OTHER, Piece, Tensor, Unreadable
from resilient.storage.folder import DirectoryListing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from resilient.diff.model import RngState
    from resilient.format.manifest import Manifest, PartEntry, TensorEntry
    from resilient.storage.store import Store

LAYOUT = "resilient"
_RANDOM = re.compile(r"rng_state_(\d{1,7})")
_GENERATORS = {"python", "numpy", "cpu", "cuda"}
_STATE_OF_TRAINER, _HISTORY = "trainer_state", "log_history"


class StoredFiles:
    """The files that a manifest lists, as a folder.

    Args:
        store: Store of the repository.
        manifest: Manifest of the checkpoint.
    """

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.url = f"{store.url.rstrip('/')}/{manifest.checkpoint}"
        self._store, self._manifest = store, manifest

    def list(self) -> DirectoryListing:
        """Return the files and the sizes that the manifest gives them."""
        return DirectoryListing({file.name: file.size_bytes for file in self._manifest.files})

    def read(self, name: str, start: int, length: int) -> bytes:
        """Return ``length`` bytes of a file from ``start``; fewer only at its end."""
        return self._store.get_range(self._manifest.key(name), start, length)


def open_native(store: Store, manifest: Manifest) -> CheckpointView:
    """Return the view of a native checkpoint.

    Args:
        store: Store of the repository.
        manifest: Manifest of the checkpoint.

    Raises:
        StoreError: A file could not be read.
    """
    files = StoredFiles(store, manifest)
    listing = files.list()
    reader = _Reader(ReadAhead(files, listing), listing, manifest)
    trees = reader.trees()
    kinds = {name: _kind(name, tree) for name, tree in trees.items()}
    groups = dict(_groups(trees, kinds))
    size = manifest.world.get("size")
    return CheckpointView(
        files.url,
        LAYOUT,
        str(manifest.checkpoint),
        manifest.checkpoint.step,
        size if type(size) is int else None,
        ReadAhead(files, listing),
        listing,
        tuple(_tensors(manifest, trees, kinds)),
        _fields(manifest, trees, kinds, groups),
        dict(reader.random(trees)),
        tuple(group for name, group in groups.items() if name.endswith(".lr")),
        tuple(_order(trees, kinds)),
        _history(trees),
        tuple(reader.notes),
        lambda: (reader.opaque(trees, kinds), ()),
    )


class _Reader:
    """Reader of a checkpoint's documents, and of the few tensors that are random states."""

    def __init__(self, folder: ReadAhead, listing: DirectoryListing, manifest: Manifest) -> None:
        self._folder, self._listing, self._manifest = folder, listing, manifest
        self.notes: list[str] = []

    def trees(self) -> dict[str, Any]:
        """Return the plain values of each part."""
        trees: dict[str, Any] = {}
        for part in self._manifest.parts:
            try:
                trees[part.name] = value_of(self._tree(part))
            except KeyError:
                self.notes.append(f"{part.document}: nothing in it is of `{part.name}`")
            except KeyNotFound:
                self.notes.append(f"{part.document}: it is missing")
            except (Unreadable, ValueError, TypeError) as error:
                self.notes.append(f"{part.document}: {error}")
        return trees

    def _tree(self, part: PartEntry) -> Any:
        if part.scope == "rank":
            _, meta = read_header(self._folder, self._listing, part.document)
            return json.loads(meta["state"])
        document = read_json(self._folder, self._listing, part.document)
        return document[part.name] if part.document == STATE_DOCUMENT else document

    def random(self, trees: Mapping[str, Any]) -> Iterator[tuple[tuple[int, str], RngState]]:
        """Yield the states of all generators by rank and kind."""
        for name, tree in trees.items():
            match = _RANDOM.fullmatch(name)
            if match and isinstance(tree, dict):
                for kind, state in self._states(tree):
                    if state is not None:
                        yield (int(match[1]), kind), state

    def opaque(self, trees: Mapping[str, Any], kinds: Mapping[str, str]) -> dict[str, Opaque]:
        """Return digests of state that is neither a field nor a tensor, by part."""
        digests = Digests(self._folder, self._listing)
        opaque_values: dict[str, Opaque] = {}
        for name, tree in trees.items():
            if kinds[name] == OPTIMIZER:
                leaf_by_path = {
                    path: leaf for path, leaf in plain_leaves(tree) if not _is_option(path)
                }
            elif _RANDOM.fullmatch(name) and isinstance(tree, dict):
                leaf_by_path = self._unread(tree)
            else:
                continue
            opaque_values |= {
                f"{name}.{key}": Opaque(digests.of_value(leaf))
                for key, leaf in leaf_by_path.items()
            }
        return opaque_values

    def _unread(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Return the states of unknown generators, with the bytes of tensors."""
        unread_kinds = {
            kind.partition(" ")[0] for kind, state in self._states(tree) if state is None
        }
        return {
            key: self._words(value) if isinstance(value, TensorPlaceholder) else value
            for key, value in tree.items()
            if key not in _GENERATORS or key in unread_kinds
        }

    def _states(self, tree: Mapping[str, Any]) -> Iterator[tuple[str, RngState | None]]:
        yield "python", of_python(tree.get("python"))
        numpy = tree.get("numpy")
        inner = numpy.get("state") if isinstance(numpy, dict) else None
        if isinstance(inner, dict) and isinstance(numpy, dict):
            words = self._words(inner.get("key"))
            gauss = (numpy.get("has_gauss"), numpy.get("gauss") or 0.0)
            yield "numpy", of_numpy(words, inner.get("pos"), *gauss)
        yield "cpu", of_torch(self._words(tree.get("cpu")))
        for number, state in enumerate(tree.get("cuda") or ()):
            yield f"cuda {number}", of_philox(self._words(state))

    def _words(self, placeholder: Any) -> bytes:
        entry = next(
            (
                value
                for value in self._manifest.tensors
                if placeholder == TensorPlaceholder(value.name)
            ),
            None,
        )
        if entry is None:
            return b""
        tensor = _tensor(entry, entry.name, OTHER)
        try:
            return Elements(self._folder, self._listing, tensor).read(0, tensor.elements).tobytes()
        except Unreadable as error:
            self.notes.append(f"{entry.name}: {error}")
            return b""


def _kind(name: str, tree: Any) -> str:
    """Return the kind of a part, from its content and name."""
    if isinstance(tree, dict) and {"state", "param_groups"} <= tree.keys():
        return OPTIMIZER
    if _RANDOM.fullmatch(name) or not isinstance(tree, dict) or not tree:
        return OTHER
    return MODEL if all(isinstance(value, TensorPlaceholder) for value in tree.values()) else OTHER


def _tensors(
    manifest: Manifest, trees: Mapping[str, Any], kinds: Mapping[str, str]
) -> Iterator[Tensor]:
    """Yield every tensor under each of its names, except random states."""
    models = [name for name, kind in kinds.items() if kind == MODEL]
    by_name = {tensor.name: tensor for tensor in manifest.tensors}
    for entry in manifest.tensors:
        if not _RANDOM.fullmatch(entry.part):
            yield _tensor(
                entry, _torch_name(entry, kinds, len(models)), kinds.get(entry.part, OTHER)
            )
    for name in models:
        for path, placeholder in trees[name].items():
            tied = by_name.get(placeholder.name)
            if tied is not None and tied.name != f"{name}/{_escaped(path)}":
                yield _tensor(tied, path if len(models) == 1 else f"{name}.{path}", MODEL)


def _torch_name(entry: TensorEntry, kinds: Mapping[str, str], models: int) -> str:
    """Return a tensor's name in torch's form; with several models, it keeps the part's name."""
    path = entry.name.removeprefix(f"{entry.part}/")
    dotted = ".".join(
        component.replace("~1", "/").replace("~0", "~") for component in path.split("/")
    )
    optimizer_names = [name for name, kind in kinds.items() if kind == OPTIMIZER]
    kind = kinds.get(entry.part, OTHER)
    is_only = (kind == MODEL and models == 1) or (kind == OPTIMIZER and len(optimizer_names) == 1)
    return dotted if is_only else f"{entry.part}.{dotted}"


def _escaped(path: str) -> str:
    return path.replace("~", "~0").replace("/", "~1")


def _tensor(entry: TensorEntry, name: str, part: str) -> Tensor:
    pieces = tuple(
        Piece(region.region, region.file, region.start, region.size_bytes)
        for region in entry.regions
    )
    files = tuple(dict.fromkeys(piece.file for piece in pieces))
    return Tensor(name, part, entry.dtype, entry.shape, files, pieces)


def _fields(
    manifest: Manifest,
    trees: Mapping[str, Any],
    kinds: Mapping[str, str],
    groups: Mapping[str, Any],
) -> dict[str, dict[str, Any]]:
    fields: dict[str, dict[str, Any]] = {
        CONFIG: dict(plain_leaves(dict(manifest.config))),
        MODEL_CONFIG: {},
        SOFTWARE: dict(plain_leaves(dict(manifest.software))),
        TRAINER: {f"metrics.{name}": metric for name, metric in manifest.metrics.items()},
        SCHEDULE: {},
        GROUPS: dict(groups),
        DATA: dict(plain_leaves(dict(manifest.data))),
    }
    for name, tree in trees.items():
        if kinds[name] != OTHER or _RANDOM.fullmatch(name):
            continue
        if isinstance(tree, dict) and "last_epoch" in tree:
            fields[SCHEDULE].update(plain_leaves(tree))
        elif name == _STATE_OF_TRAINER and isinstance(tree, dict):
            fields[TRAINER].update(plain_leaves({**tree, _HISTORY: {}}))
        elif name == MODEL_CONFIG:
            # A Trainer has a part of this name.
            fields[MODEL_CONFIG].update(plain_leaves(tree))
        else:
            fields[TRAINER].update(plain_leaves({name: tree}))
    fields[TRAINER].pop(_HISTORY, None)
    return fields


def _groups(trees: Mapping[str, Any], kinds: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Yield the options of each parameter group, as ``0.lr``, without parameter names."""
    optimizers = [name for name, kind in kinds.items() if kind == OPTIMIZER]
    for name in optimizers:
        head = "" if len(optimizers) == 1 else f"{name}."
        for path, leaf in plain_leaves(trees[name]["param_groups"]):
            if not path.endswith(".params"):
                yield f"{head}{path}", leaf


def _is_option(path: str) -> bool:
    return path.startswith("param_groups.") and not path.endswith(".params")


def _order(trees: Mapping[str, Any], kinds: Mapping[str, str]) -> Iterator[str]:
    optimizers = [name for name, kind in kinds.items() if kind == OPTIMIZER]
    groups = trees[optimizers[0]]["param_groups"] if len(optimizers) == 1 else []
    for group in groups if isinstance(groups, list) else []:
        names = group.get("params") if isinstance(group, dict) else None
        yield from (name for name in names or () if isinstance(name, str))


def _history(trees: Mapping[str, Any]) -> tuple[Any, ...]:
    state = trees.get(_STATE_OF_TRAINER)
    history = state.get(_HISTORY) if isinstance(state, dict) else None
    return tuple(history) if isinstance(history, list) else ()
