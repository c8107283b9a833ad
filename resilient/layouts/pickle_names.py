"""Names in pickles: the data and the effect of each name, and the names of torch's safe loading.

A pickle may name and call any importable object. Calls of a few names do nothing but rebuild data.
This module rebuilds this data without torch or NumPy. Some names are known to run commands. The
effect of any other name is unknown.

Source: ``torch._weights_only_unpickler._get_allowed_globals`` of torch 2.13.
"""

from __future__ import annotations

import struct
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from resilient.layouts.model import Unreadable
from resilient.layouts.pickle_reader import PickledCall, PickledGlobal, StorageRef, TensorRef

if TYPE_CHECKING:
    from collections.abc import Iterable

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
# Harmless names, which only rebuild data.
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


def is_data(name: PickledGlobal) -> bool:
    """Return True if a global of a pickle can only rebuild data."""
    if name.dotted in _NO_DATA or "." in name.name:
        return False
    if name.module == "torch":
        is_storage = name.name in _BY_STORAGE or name.name in _BY_TORCH
        return is_storage or name.name in (
            "Size",
            "Tensor",
            "device",
            "dtype",
            "Generator",
            "layout",
        )
    return name.module in _DATA_MODULES or name.dotted in _DATA_NAMES


def rebuild(call: PickledCall) -> Any:
    """Return the value of a call in a pickle; for an unknown name, return the call itself."""
    if call.name == "persistent":
        return _stored(call.args)
    if not isinstance(call.args, tuple):
        raise Unreadable("a call whose arguments are not a tuple")
    builder = _KNOWN.get(call.kind)
    return call if builder is None else builder(call)


def dtype_of(value: Any) -> str:
    """Return the safetensors name of a torch dtype, else its torch name."""
    if isinstance(value, PickledGlobal) and value.module == "torch":
        return _BY_TORCH.get(value.name, value.name)
    return "?"


def shape_of(value: Any) -> tuple[int, ...]:
    """Return a shape.

    Raises:
        Unreadable: The value is not a shape that a tensor could have.
    """
    if not isinstance(value, tuple | list) or len(value) > AXES_MAX:
        raise Unreadable("an invalid shape")
    elements = 1
    for axis in value:
        if type(axis) is not int or not 0 <= axis < _ELEMENTS_MAX:
            raise Unreadable("a shape with an invalid axis")
        elements *= max(axis, 1)
        if elements > _ELEMENTS_MAX:
            raise Unreadable("a tensor larger than any memory")
    return tuple(value)


def _stored(storage: Any) -> Any:
    """Return a storage from its persistent id: ("storage", type, key, device, elements)."""
    if not isinstance(storage, tuple) or len(storage) < 5 or storage[0] != "storage":  # noqa: PLR2004
        return PickledCall("persistent", storage)
    kind, key, elements = storage[1], storage[2], storage[4]
    if not isinstance(kind, PickledGlobal) or not isinstance(key, str):
        raise Unreadable("a storage without a type or a key")
    if type(elements) is not int or not 0 <= elements <= _ELEMENTS_MAX:
        raise Unreadable("a storage of impossible length")
    device = storage[3][:_DEVICE_CHARACTERS_MAX] if isinstance(storage[3], str) else ""
    return StorageRef(_BY_STORAGE.get(kind.name, "?"), key, elements, device)


def _tensor(call: PickledCall) -> TensorRef:
    storage, offset, shape = call.args[:3]
    dtype = call.args[6] if call.kind.endswith("_v3") and len(call.args) > 6 else None  # noqa: PLR2004
    if not isinstance(storage, StorageRef) or type(offset) is not int or offset < 0:
        raise Unreadable("a tensor without its storage")
    name = storage.dtype if dtype is None else dtype_of(dtype)
    strides = shape_of(call.args[3]) if len(call.args) > 3 else None  # noqa: PLR2004
    tensor = TensorRef(name, shape_of(shape), storage, offset, strides)
    if strides is not None and len(strides) != len(tensor.shape):
        raise Unreadable("a tensor with invalid strides")
    return tensor


def _parameter(call: PickledCall) -> Any:
    return call.args[0] if isinstance(call.args[0], TensorRef) else call


def _typed(call: PickledCall) -> Any:
    """Return the tensor of ``_rebuild_from_type_v2(function, type, arguments, state)``."""
    function, _, args = call.args[:3]
    if not isinstance(function, PickledGlobal) or function.dotted not in _TENSORS:
        return call
    return _tensor(PickledCall(function, args))


def _meta(call: PickledCall) -> TensorRef:
    """Return a tensor with a shape and no bytes."""
    dtype, shape = call.args[:2]
    return TensorRef(dtype_of(dtype), shape_of(shape))


def _size(call: PickledCall) -> tuple[int, ...]:
    return shape_of(call.args[0] if call.args else ())


def _ordered(call: PickledCall) -> Any:
    return {} if not call.args else call


def _encoded(call: PickledCall) -> Any:
    text = call.args[0]
    if not isinstance(text, str):
        raise Unreadable("bytes that are not text")
    return text.encode("latin1", "replace")


def _path(call: PickledCall) -> str:
    return "/".join(argument for argument in call.args if isinstance(argument, str))


def _scalar(call: PickledCall) -> Any:
    """Return a scalar of NumPy as a number."""
    dtype, data = call.args[:2]
    code = dtype.args[0] if isinstance(dtype, PickledCall) and dtype.args else ""
    layout = _NUMPY_SCALARS.get(code) if isinstance(code, str) else None
    if layout is None or not isinstance(data, bytes) or len(data) != struct.calcsize(layout):
        return call
    return struct.unpack(layout, data)[0]


_TENSORS = {f"torch._utils._rebuild_tensor{version}" for version in ("", "_v2", "_v3")}
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
    **dict.fromkeys((name for name in _DATA_NAMES if "pathlib" in name), _path),
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
}


class Effect(StrEnum):
    """Effect of unpickling a name."""

    REBUILDS = "rebuilds data"
    LIBRARY = "a library's class"
    UNKNOWN = "unknown code"
    RUNS = "runs code"


_REBUILDS = {
    "_codecs": {"encode"},
    "builtins": {"bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int",
                 "list", "object", "range", "set", "slice", "str", "tuple"},
    "collections": {"OrderedDict", "defaultdict", "deque", "Counter"},
    "datetime": {"date", "datetime", "timedelta", "timezone"},
    "numpy": {"dtype", "ndarray"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy.core.numeric": {"_frombuffer"},
    "numpy._core.numeric": {"_frombuffer"},
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath"},
    "torch": {"Size", "Tensor", "device", "dtype", "layout", "Generator"},
    "torch._tensor": {"_rebuild_from_type_v2"},
    "torch._utils": {
        "_rebuild_device_tensor_from_numpy", "_rebuild_device_tensor_from_cpu_tensor",
        "_rebuild_meta_tensor_no_storage", "_rebuild_nested_tensor", "_rebuild_parameter",
        "_rebuild_parameter_with_state", "_rebuild_qtensor", "_rebuild_sparse_csr_tensor",
        "_rebuild_sparse_tensor", "_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3",
        "_rebuild_wrapper_subclass",
    },
    "torch.nn.parameter": {"Parameter"},
    "torch.serialization": {"_get_layout"},
    # Without `_load_from_bytes`, which unpickles bytes that this scan does not see.
    "torch.storage": {"TypedStorage", "UntypedStorage"},
}  # fmt: skip
_TORCH_TYPES = ("Storage",)
_DTYPES = {
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("quint8", "qint8", "qint32", "strided", "sparse_coo", "per_tensor_affine"),
}
_LIBRARIES = {
    *(
        "transformers.training_args",
        "transformers.trainer_utils",
        "transformers.training_args_seq2seq",
    ),
    *("transformers.integrations.deepspeed", "transformers.trainer_pt_utils"),
    *("accelerate.state", "accelerate.utils.dataclasses", "accelerate.utils.deepspeed"),
    *("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"),
    *("torch.distributed.fsdp.api", "torch.distributed._shard.sharding_spec.api"),
    *("torch.distributed._shard.metadata", "torch.distributed._tensor.placement_types"),
    *("torch.distributed.tensor.placement_types", "torch.distributed.tensor._dtensor_spec"),
    *(
        "deepspeed.runtime.zero.config",
        "deepspeed.runtime.fp16.loss_scaler",
    ),
    *(
        "argparse",
        "omegaconf.dictconfig",
        "omegaconf.listconfig",
        "omegaconf.base",
        "omegaconf.nodes",
    ),
    *("lightning.fabric.utilities.data", "lightning.pytorch.utilities.parsing"),
    *("lightning_utilities.core.enums", "enum", "typing", "uuid"),
}
_LIBRARY_TUPLES = {("deepspeed.utils.tensor_fragment", "fragment_address")}
_RUNS_ALL = {
    *("os", "posix", "nt", "posixpath", "ntpath", "subprocess", "pty", "commands", "shutil", "sys"),
    *("socket", "ssl", "http", "urllib", "requests", "httplib", "ftplib", "smtplib", "telnetlib"),
    *(
        "runpy",
        "importlib",
        "pkgutil",
        "imp",
        "zipimport",
        "code",
        "codeop",
        "bdb",
        "pdb",
        "timeit",
    ),
    *("cProfile", "profile", "trace", "doctest", "unittest", "pip", "venv", "ensurepip", "idlelib"),
    *("ctypes", "_ctypes", "cffi", "mmap", "gc", "inspect", "types", "marshal", "webbrowser"),
    *("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "torch.hub"),
    *("asyncio", "multiprocessing", "threading", "_thread", "signal", "atexit", "concurrent"),
    *(
        "tempfile",
        "fileinput",
        "glob",
        "linecache",
        "io",
        "_io",
        "operator",
        "_operator",
        "functools",
    ),
    *(
        "numpy.testing",
        "numpy.f2py",
        "numpy.distutils",
        "torch._inductor",
        "torch.utils.cpp_extension",
    ),
    *(
        "torch.package",
        "torch.jit",
        "torch.fx",
        "torch._dynamo",
        "logging.config",
        "xmlrpc",
        "sqlite3",
    ),
}
_BUILTINS = ("builtins", "__builtin__")


def effect_of(name: PickledGlobal) -> Effect:
    """Return the possible effect of unpickling a name; a name with a dot can have any effect."""
    module, attribute = name.module, name.name
    if "." not in attribute and _rebuilds(module, attribute):
        return Effect.REBUILDS
    if module in _BUILTINS or _is_in(module, _RUNS_ALL) or "__" in attribute:
        return Effect.RUNS
    if (module, attribute) in _LIBRARY_TUPLES:
        return Effect.LIBRARY
    # The output must be an identifier, because users may paste it.
    if module in _LIBRARIES and attribute.isidentifier() and attribute.lstrip("_")[:1].isupper():
        return Effect.LIBRARY
    return Effect.UNKNOWN


def _rebuilds(module: str, attribute: str) -> bool:
    if module in ("__builtin__", "builtins"):
        return attribute in _REBUILDS["builtins"]
    if module in ("torch", "torch.cuda") and attribute.endswith(_TORCH_TYPES):
        return attribute.removesuffix("Storage").isalnum()
    if module == "torch" and attribute in _DTYPES:
        return True
    return attribute in _REBUILDS.get(module, ())


def _is_in(module: str, modules: set[str]) -> bool:
    parts = module.split(".")
    return any(".".join(parts[: end + 1]) in modules for end in range(len(parts)))


LOAD = "torch.load('{path}', weights_only=True)"
_LOAD_ALL = "torch.load('{path}', weights_only=False)"
_LOAD_NAMED = "torch.serialization.add_safe_globals([{names}]); " + LOAD
_NAMED_MAX = 4
_ALLOWED = {
    *("collections.OrderedDict", "collections.Counter", "_codecs.encode"),
    *("builtins.bytearray", "builtins.set", "builtins.complex"),
    *("__builtin__.bytearray", "__builtin__.set", "__builtin__.complex"),
}
_REFUSED = {
    *("torch.layout", "torch.dtype", "torch.Generator"),
    "torch._utils._rebuild_sparse_csr_tensor",
}


def how_to_load(names: Iterable[PickledGlobal]) -> tuple[str, str]:
    """Return the call that loads a file, and the names that the safe call rejects.

    For unknown code, and for code that runs commands, the result is the safe call.

    Args:
        names: Globals that the pickle would import.
    """
    stops = {name.dotted: effect_of(name) for name in names if not _is_allowed(name)}
    if not stops:
        return LOAD, ""
    shown_names = sorted(stops)
    count_text = f" and {len(shown_names) - 1} more" if shown_names[1:] else ""
    problem_text = (
        f"it names `{shown_names[0][:80]}`{count_text}: `torch.load` with `weights_only` rejects it"
    )
    effects = set(stops.values())
    if effects == {Effect.LIBRARY} and len(shown_names) <= _NAMED_MAX:
        return _LOAD_NAMED.replace("{names}", ", ".join(shown_names)), problem_text
    return _LOAD_ALL if effects <= {Effect.LIBRARY, Effect.REBUILDS} else LOAD, problem_text


def _is_allowed(name: PickledGlobal) -> bool:
    is_torch = name.module.partition(".")[0] == "torch" and effect_of(name) is Effect.REBUILDS
    return name.dotted in _ALLOWED or (is_torch and name.dotted not in _REFUSED)
