"""Conversion of state dicts to JSON trees with named tensors, and back, without pickle.

Plain JSON values are stored unchanged. Every other value is an object with one key that begins with
``$``, such as ``{"$tensor": name}``, ``{"$tuple": [...]}`` or ``{"$float": "nan"}``. docs/format.md
lists these objects. A dict whose keys are not plain strings becomes ``{"$dict": [[key, value]]}``.
If a value has another type, the save raises an error with the path of the value.

An optimizer's state may contain objects. Low-rank optimizers have a projector object per parameter,
and low-bit optimizers have tensor subclasses made of other tensors. This module has a list of such
classes. It converts their objects to the values above and rebuilds the objects. The save rejects an
object of another class.
"""

from __future__ import annotations

import base64
import importlib
import math
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from resilient.errors import IncompatibleCheckpoint, IntegrityError, UnsavableState
from resilient.format.state_json import DEPTH_MAX, JsonRows, tensors_of
from resilient.state_dict.sharding import DTYPE_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

Tensors = dict[str, torch.Tensor]

PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
"""Tensor types without sharding: each rank has the whole tensor."""

# A leaf value, such as an array of NumPy, needs up to four more levels of JSON.
_DEPTH_MAX = DEPTH_MAX - 4
_LEVELS: dict[type, int] = {
    list: 1,
    dict: 1,
    tuple: 2,
    set: 2,
    frozenset: 2,
    OrderedDict: 3,
    Counter: 3,
}
_SHOWN_MAX = 120
# The limit of a manifest, less the length of a suffix that makes the name unique.
_PATH_LENGTH_MAX = 4000
_RESERVED = "__metadata__"
_META = "allocate it first: module.to_empty(device=...), then load or set its values"
_QUANTIZED = (
    "return its dequantize(), or its int_repr() with scale and zero point, from state_dict()"
)

_NESTED = frozenset({list, dict})
PLAIN_VALUES = frozenset({type(None), bool, int, str})
"""Types of values that JSON represents directly."""

_DTYPE_WORDS = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if type(value) is torch.dtype
}


def flatten(
    part: str, value: Any, kinds: set[tuple[str, type]] | None = None
) -> tuple[Any, Tensors]:
    """Return ``value`` as a JSON tree and its named tensors, without a copy.

    Tensors with equal memory, shape and strides get one name. Tied weights are therefore written
    once and tied again by the load.

    Args:
        part: Name of the part; every tensor's name begins with it and a slash.
        value: Nested dicts, lists, tensors, arrays and plain values.
        kinds: Set that receives the path and type of each container, tensor and tagged value.

    Raises:
        UnsavableState: A value has a type outside the list, or is nested deeper than can be read;
            the message names its path.
    """
    flattener = _Flattener(kinds)
    try:
        return flattener.visit(value, part), flattener.tensors
    except RecursionError as error:
        raise _too_deep(part) from error


class _Flattener:
    """Walk through one value, which collects tensors by name and by memory."""

    def __init__(self, kinds: set[tuple[str, type]] | None) -> None:
        self.tensors: Tensors = {}
        self._kinds = kinds
        self._at: dict[int, list[str]] = {}
        self._depth = 0

    def visit(self, value: Any, path: str) -> Any:
        if type(value) in PLAIN_VALUES:
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        writer = _WRITERS.get(type(value))
        if writer is not None:
            return self._within(_LEVELS.get(type(value), 0), path, writer, value)
        if isinstance(value, torch.Tensor):
            return self.tensor(value, path)
        if isinstance(value, np.generic):
            return {"$numpy": [value.dtype.str, self._array(np.asarray(value), path)]}
        raise UnsavableState(
            f"`{path}` is a {type(value).__module__}.{type(value).__qualname__}, "
            "which only pickle could save",
            path=path,
            hint="return tensors, numbers, strings, lists or dicts from state_dict()",
        )

    def _within(self, levels: int, path: str, write: Callable[..., Any], value: Any) -> Any:
        """Write a value that needs some levels of JSON; raise if a reader rejects that depth."""
        if self._kinds is not None:
            self._kinds.add((path, type(value)))
        self._depth += levels
        if self._depth > _DEPTH_MAX:
            raise _too_deep(path)
        node = write(self, value, path)
        self._depth -= levels
        return node

    def mapping(self, value: Mapping[Any, Any], path: str) -> Any:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {
                key: item
                if type(item) in PLAIN_VALUES or (type(item) is float and math.isfinite(item))
                else self.visit(item, f"{path}/{escape(key)}")
                for key, item in value.items()
            }
        return {"$dict": self._within(2, path, _Flattener.pairs, value)}

    def pairs(self, value: Mapping[Any, Any], path: str) -> list[Any]:
        return [
            [
                key if type(key) is str else self.visit(key, f"{path}/<key {key!r}>"),
                self.visit(item, f"{path}/{escape(str(key))}"),
            ]
            for key, item in value.items()
        ]

    def sequence(self, value: Any, path: str) -> list[Any]:
        # Convert such tuples fast: the state of Python's generator has 625 integers.
        if PLAIN_VALUES.issuperset(map(type, value)):
            return list(value)
        return [
            item if type(item) in PLAIN_VALUES else self.visit(item, f"{path}/{index}")
            for index, item in enumerate(value)
        ]

    def tensor(self, value: torch.Tensor, path: str) -> Any:
        local = value if type(value) in PLAIN else local_of(value, path)
        if value.layout != torch.strided:
            raise UnsavableState(
                f"`{path}` is a {type(value).__qualname__} of layout {value.layout}, "
                "which has no plain bytes",
                path=path,
                hint="return dense tensors from state_dict(): its to_dense(), or its indices and "
                "values",
            )
        dtype = value.dtype
        if dtype not in DTYPE_NAMES or value.is_meta:
            raise UnsavableState(
                f"`{path}` is a {dtype} tensor on {value.device}, which has no plain bytes",
                path=path,
                hint=_META if value.is_meta else _QUANTIZED,
            )
        _require_name(path)
        name = path if path not in self.tensors else f"{path}~{len(self.tensors)}"
        # A tensor without memory cannot be identified by its address.
        if address := local.data_ptr() if local is value else _address_of(local):
            names_at_address = self._at.setdefault(address, [])
            for candidate in names_at_address:
                if _is_same(self.tensors[candidate], value):
                    return {"$tensor": candidate}
            names_at_address.append(name)
        self.tensors[name] = value.detach()
        return {"$tensor": name}

    def array(self, value: np.ndarray[Any, Any], path: str) -> Any:
        # A scalar of NumPy also has no dimensions, and is another type.
        tag = "$numpy" if value.ndim else "$array"
        return {tag: [value.dtype.str, self._array(value, path)]}

    def _array(self, value: np.ndarray[Any, Any], path: str) -> Any:
        try:
            # torch warns about read-only memory.
            plain = value.astype(value.dtype.newbyteorder("="), copy=not value.flags.writeable)
            return self.visit(
                torch.from_numpy(np.ascontiguousarray(plain).reshape(value.shape)), path
            )
        except TypeError as error:
            raise UnsavableState(
                f"`{path}` is a numpy array of {value.dtype}, which has no plain bytes",
                path=path,
                hint="return numbers, or its tolist(), from state_dict()",
            ) from error


def _too_deep(path: str) -> UnsavableState:
    text = path if len(path) <= _SHOWN_MAX else f"{path[:_SHOWN_MAX]}..."
    return UnsavableState(
        f"`{text}` is nested deeper than the limit of {DEPTH_MAX} levels, or contains itself",
        path=text,
        hint="remove references to containing objects, and flatten the rest",
    )


def _require_name(path: str) -> None:
    """Raise if a path is not a valid name of a tensor in a file.

    Raises:
        UnsavableState: The path is too long, or safetensors reserves the name.
    """
    if len(path) > _PATH_LENGTH_MAX:
        raise UnsavableState(
            f"`{path[:_SHOWN_MAX]}...` is the name of a tensor, and has {len(path)} characters: "
            f"the limit is {_PATH_LENGTH_MAX}",
            path=path,
            hint="give the tensor a shorter key in state_dict()",
        )
    if path.partition("/")[2] == _RESERVED:
        raise UnsavableState(
            f"`{path}` names a tensor, but safetensors reserves the name `{_RESERVED}`",
            path=path,
            hint="give the tensor another key in state_dict()",
        )


def _address_of(local: torch.Tensor) -> int:
    """Return the start address of a tensor, which may have no element on this rank."""
    start = int(local.storage_offset()) * local.element_size()
    return local.untyped_storage().data_ptr() + start


def _is_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors at the same address are the same view of the same memory."""
    if (left.dtype, left.device, left.shape) != (right.dtype, right.device, right.shape):
        return False
    if (left.is_conj(), left.is_neg()) != (right.is_conj(), right.is_neg()):
        # The same bytes represent other numbers.
        return False
    strides = (local_of(side, "").stride() for side in (left, right))
    return left.stride() == right.stride() and len(set(strides)) == 1


def local_of(value: torch.Tensor, path: str) -> torch.Tensor:
    """Return the local memory of a tensor.

    Raises:
        UnsavableState: No rank has the tensor's values as plain bytes.
    """
    if type(value) in PLAIN:
        return value
    # Import inside the function, because only sharded training needs the slow import of DTensor.
    from resilient.state_dict.sharding import check_placements, is_sharded, local_memory

    if not is_sharded(value):
        raise UnsavableState(
            f"`{path}` is a {type(value).__qualname__}, which has no plain bytes",
            path=path,
            hint="return plain tensors from state_dict(); a lazy parameter has values after the "
            "first forward pass",
        )
    check_placements(value, path)
    return local_memory(value)


def _set(flattener: _Flattener, value: set[Any] | frozenset[Any], path: str) -> Any:
    # Sort elements by their text, so that equal sets give equal bytes in every process.
    return {"$" + type(value).__name__: flattener.sequence(sorted(value, key=repr), path)}


_WRITERS: dict[type, Callable[[_Flattener, Any, str], Any]] = {
    dict: _Flattener.mapping,
    list: _Flattener.sequence,
    tuple: lambda walk, value, path: {"$tuple": walk.sequence(value, path)},
    OrderedDict: lambda walk, value, path: {"$odict": walk.pairs(value, path)},
    Counter: lambda walk, value, path: {"$counter": walk.pairs(value, path)},
    set: _set,
    frozenset: _set,
    bytes: lambda _, value, __: {"$bytes": base64.b64encode(value).decode()},
    complex: lambda _, value, __: {"$complex": [repr(value.real), repr(value.imag)]},
    torch.Tensor: _Flattener.tensor,
    torch.nn.Parameter: _Flattener.tensor,
    torch.nn.Buffer: _Flattener.tensor,
    np.ndarray: _Flattener.array,
    JsonRows: lambda _, value, __: value,
    torch.Size: lambda _, value, __: {"$size": list(value)},
    torch.dtype: lambda _, value, __: {"$dtype": str(value).removeprefix("torch.")},
    torch.device: lambda _, value, __: {"$device": str(value)},
}


def named_tensors(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in nested dicts and lists by the path that :func:`flatten` gives it.

    Tensors that share memory are yielded under each of their paths.
    """
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from named_tensors(item, f"{path}/{escape(str(key))}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from named_tensors(item, f"{path}/{index}")


def unflatten(tree: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """Return the value that :func:`flatten` converted.

    Args:
        tree: The JSON tree; the result may share its lists and dicts.
        tensor: Function that returns a tensor by name; it may return the same object again.

    Raises:
        IntegrityError: The tree is invalid, for example because of an unknown tag. In that case
            ``tensor`` was not called.
    """
    tensors_of(tree)
    return _build(tree, tensor)


def _build(tree: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    # Keep dicts of plain values unchanged, because a log history may have 100,000 of them.
    if isinstance(tree, list):
        return [_build(child, tensor) for child in tree] if _is_nested(tree) else tree
    if not isinstance(tree, dict):
        return tree
    tag = next(iter(tree)) if len(tree) == 1 else ""
    if not tag.startswith("$"):
        values = tree.values()
        return (
            dict(zip(tree, (_build(value, tensor) for value in values), strict=True))
            if _is_nested(values)
            else tree
        )
    if tag == "$tensor":
        return tensor(tree[tag])
    raw = _build(tree[tag], tensor) if isinstance(tree[tag], list) else tree[tag]
    try:
        return _READERS[tag](raw)
    except (ValueError, TypeError, RuntimeError) as error:
        raise IntegrityError(f"`{tag}` in a checkpoint's state is invalid: {error}") from error


def _is_nested(values: Iterable[Any]) -> bool:
    return not _NESTED.isdisjoint(map(type, values))


def _read_dtype(raw: Any) -> torch.dtype:
    if raw not in _DTYPE_WORDS:
        raise IntegrityError(f"unknown dtype {raw!r} in a checkpoint's state")
    return _DTYPE_WORDS[raw]


def _read_numpy(raw: list[Any]) -> Any:
    array = _read_array(raw)
    return array[()] if array.ndim == 0 else array


def _read_array(raw: list[Any]) -> Any:
    dtype, values = raw
    return values.numpy().astype(np.dtype(dtype), copy=True)


_READERS: dict[str, Callable[[Any], Any]] = {
    "$tuple": tuple,
    "$dict": dict,
    "$odict": OrderedDict,
    "$counter": lambda raw: Counter(dict(raw)),
    "$set": set,
    "$frozenset": frozenset,
    "$bytes": base64.b64decode,
    "$complex": lambda raw: complex(float(raw[0]), float(raw[1])),
    "$float": float,
    "$numpy": _read_numpy,
    "$array": _read_array,
    "$size": torch.Size,
    "$dtype": _read_dtype,
    "$device": torch.device,
}


def escape(key: str) -> str:
    """Escape a key as a JSON pointer does (RFC 6901), so that paths are unambiguous."""
    return key.replace("~", "~0").replace("/", "~1")


_OBJECT, _TENSOR = "taken_apart_object", "taken_apart_tensor"

OBJECTS = {
    "apollo_torch.random_projector.GradientProjector",
    "apollo_torch.svd_projector.GaLoreProjector",
    "galore_torch.galore_projector.GaLoreProjector",
}
"""Classes whose attributes are their whole state."""

TENSORS = {
    "torchao.optim.subclass_4bit.OptimState4bit",
    "torchao.optim.subclass_8bit.OptimState8bit",
    "torchao.optim.subclass_fp8.OptimStateFp8",
}
"""Tensor classes with the methods ``__tensor_flatten__`` and ``__tensor_unflatten__``."""


def flatten_objects(value: Any) -> Any:
    """Return ``value``, or the contents of an object of a known class.

    The result contains the live tensors; nothing is copied.

    Crash: nothing was changed.
    """
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if name in OBJECTS:
        return {_OBJECT: name, "fields": dict(vars(value))}
    if name in TENSORS:
        inner, context = value.__tensor_flatten__()
        return {
            _TENSOR: name,
            "inner": {attribute: getattr(value, attribute) for attribute in inner},
            "context": [_plain(constant) for constant in context],
            "shape": list(value.shape),
        }
    return value


def restore_objects(value: Any) -> Any:
    """Rebuild an object from the result of :func:`flatten_objects`; return other values unchanged.

    Crash: only this process's memory changed.

    Raises:
        IncompatibleCheckpoint: The class is unknown, or its package is not installed.
    """
    if not isinstance(value, dict):
        return value
    if _OBJECT in value:
        kind = _class_of(value[_OBJECT], OBJECTS)
        instance = kind.__new__(kind)
        vars(instance).update(value["fields"])
        return instance
    if _TENSOR in value:
        kind = _class_of(value[_TENSOR], TENSORS)
        shape = torch.Size(value["shape"])
        context = [
            torch.Size(constant) if isinstance(constant, list) else constant
            for constant in value["context"]
        ]
        return kind.__tensor_unflatten__(value["inner"], context, shape, None)
    return value


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, torch.Size) else value


def _class_of(name: str, names: set[str]) -> Any:
    if name not in names:
        raise IncompatibleCheckpoint(
            f"the optimizer's state holds a `{name}`, which is not one of "
            f"{', '.join(sorted(names))}"
        )
    module, _, kind = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), kind)
    except (ImportError, AttributeError) as error:
        package = module.partition(".")[0].replace("_", "-")
        raise IncompatibleCheckpoint(
            f"the optimizer's state holds a `{name}`, which cannot be imported: {error}",
            hint=f"pip install {package}",
        ) from error
