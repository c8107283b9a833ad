"""The names in pickles of torch and NumPy that only rebuild data, understood without either."""

from __future__ import annotations

import struct
from typing import Any

from resilient.layouts.pickled import Made, Name, Stored, TensorRef
from resilient.layouts.values import Unreadable

AXES_MAX = 64
_ELEMENTS_MAX = 1 << 60
_DEVICE_CHARACTERS_MAX = 16

_BY_TORCH = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
    "complex32": "C32", "complex64": "C64", "complex128": "C128",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "double": "F64", "float": "F32", "half": "F16", "long": "I64", "int": "I32", "short": "I16",
}  # fmt: skip
_BY_STORAGE = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8",
    "ByteStorage": "U8", "BoolStorage": "BOOL", "ComplexFloatStorage": "C64",
    "ComplexDoubleStorage": "C128", "UntypedStorage": "U8",
}  # fmt: skip
_NUMPY_SCALARS = {
    "f8": "<d", "f4": "<f", "i8": "<q", "i4": "<i", "u8": "<Q", "u4": "<I", "b1": "<?",
}  # fmt: skip
# What may be in a checkpoint without anybody's worry: it rebuilds data and does nothing.
_DATA_MODULES = {
    *("torch", "torch._utils", "torch._tensor", "torch.nn.parameter", "torch.serialization"),
    *("torch.storage", "torch.torch_version", "collections", "numpy", "numpy.dtypes"),
    *("numpy.core.multiarray", "numpy._core.multiarray", "numpy.random._pickle"),
    *("numpy.core.numeric", "numpy._core.numeric", "datetime", "uuid"),
    *("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"),
    *("torch.distributed._shard.sharded_tensor.metadata", "torch.distributed.tensor"),
}
_DATA_NAMES = {
    *("_codecs.encode", "builtins.set", "builtins.frozenset", "builtins.complex"),
    *("builtins.bytearray", "builtins.slice", "builtins.range", "builtins.dict", "builtins.list"),
    *("__builtin__.set", "__builtin__.dict", "copyreg._reconstructor", "builtins.object"),
    *("copy_reg._reconstructor", "__builtin__.object"),
    *("argparse.Namespace", "functools.partial"),
    *("pathlib.PosixPath", "pathlib.WindowsPath", "pathlib.PurePosixPath", "pathlib.Path"),
    *("pathlib._local.PosixPath", "pathlib._local.WindowsPath"),
}
_NO_DATA = {"torch.load", "torch.save", "torch.hub.load", "torch._utils.os", "numpy.load"}


def is_data(name: Name) -> bool:
    """Say whether what a pickle would import can do no more than rebuild data."""
    if name.dotted in _NO_DATA or "." in name.name:
        return False
    if name.module == "torch":
        known = name.name in _BY_STORAGE or name.name in _BY_TORCH
        return known or name.name in ("Size", "Tensor", "device", "dtype", "Generator", "layout")
    return name.module in _DATA_MODULES or name.dotted in _DATA_NAMES


def rebuild(made: Made) -> Any:
    """Return the value that a pickle would make by a call, where its name is known."""
    if made.name == "persistent":
        return _stored(made.args)
    if not isinstance(made.args, tuple):
        raise Unreadable("a call whose arguments are no tuple")
    known = _KNOWN.get(made.kind)
    return made if known is None else known(made)


def dtype_of(value: Any) -> str:
    """Return the name of a dtype of torch, or what it is called there."""
    if isinstance(value, Name) and value.module == "torch":
        return _BY_TORCH.get(value.name, value.name)
    return "?"


def shape_of(value: Any) -> tuple[int, ...]:
    """Return a shape.

    Raises:
        Unreadable: it is none that any tensor could have.
    """
    if not isinstance(value, tuple | list) or len(value) > AXES_MAX:
        raise Unreadable("a shape that is none")
    elements = 1
    for axis in value:
        if type(axis) is not int or not 0 <= axis < _ELEMENTS_MAX:
            raise Unreadable("a shape with an axis that is none")
        elements *= max(axis, 1)
        if elements > _ELEMENTS_MAX:
            raise Unreadable("a tensor larger than any memory")
    return tuple(value)


def _stored(found: Any) -> Any:
    """Return a storage from its persistent id: ("storage", type, key, device, elements)."""
    if not isinstance(found, tuple) or len(found) < 5 or found[0] != "storage":  # noqa: PLR2004
        return Made("persistent", found)
    kind, key, elements = found[1], found[2], found[4]
    if not isinstance(kind, Name) or not isinstance(key, str):
        raise Unreadable("a storage without a type or a key")
    if type(elements) is not int or not 0 <= elements <= _ELEMENTS_MAX:
        raise Unreadable("a storage of impossible length")
    device = found[3][:_DEVICE_CHARACTERS_MAX] if isinstance(found[3], str) else ""
    return Stored(_BY_STORAGE.get(kind.name, "?"), key, elements, device)


def _tensor(made: Made) -> TensorRef:
    storage, offset, shape = made.args[:3]
    dtype = made.args[6] if made.kind.endswith("_v3") and len(made.args) > 6 else None  # noqa: PLR2004
    if not isinstance(storage, Stored) or type(offset) is not int or offset < 0:
        raise Unreadable("a tensor without its storage")
    name = storage.dtype if dtype is None else dtype_of(dtype)
    strides = shape_of(made.args[3]) if len(made.args) > 3 else None  # noqa: PLR2004
    found = TensorRef(name, shape_of(shape), storage, offset, strides)
    if strides is not None and len(strides) != len(found.shape):
        raise Unreadable("a tensor whose strides are none")
    return found


def _parameter(made: Made) -> Any:
    return made.args[0] if isinstance(made.args[0], TensorRef) else made


def _typed(made: Made) -> Any:
    """Return the tensor of ``_rebuild_from_type_v2(function, type, arguments, state)``."""
    function, _, args = made.args[:3]
    if not isinstance(function, Name) or function.dotted not in _TENSORS:
        return made
    return _tensor(Made(function, args))


def _meta(made: Made) -> TensorRef:
    """Return a tensor that has a shape and no bytes."""
    dtype, shape = made.args[:2]
    return TensorRef(dtype_of(dtype), shape_of(shape))


def _size(made: Made) -> tuple[int, ...]:
    return shape_of(made.args[0] if made.args else ())


def _ordered(made: Made) -> Any:
    return {} if not made.args else made


def _encoded(made: Made) -> Any:
    text = made.args[0]
    if not isinstance(text, str):
        raise Unreadable("bytes that are no text")
    return text.encode("latin1", "replace")


def _path(made: Made) -> str:
    return "/".join(one for one in made.args if isinstance(one, str))


def _scalar(made: Made) -> Any:
    """Return a scalar of NumPy as a number."""
    dtype, data = made.args[:2]
    code = dtype.args[0] if isinstance(dtype, Made) and dtype.args else ""
    layout = _NUMPY_SCALARS.get(code) if isinstance(code, str) else None
    if layout is None or not isinstance(data, bytes) or len(data) != struct.calcsize(layout):
        return made
    return struct.unpack(layout, data)[0]


_TENSORS = {f"torch._utils._rebuild_tensor{one}" for one in ("", "_v2", "_v3")}
_KNOWN = {
    **dict.fromkeys(_TENSORS, _tensor),
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta,
    "torch._tensor._rebuild_from_type_v2": _typed,
    "torch.Size": _size,
    "collections.OrderedDict": _ordered,
    "collections.defaultdict": lambda _: {},
    "_codecs.encode": _encoded,
    **dict.fromkeys((one for one in _DATA_NAMES if "pathlib" in one), _path),
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
}
