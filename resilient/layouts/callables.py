"""What the names in a pickle would do, if somebody unpickled it (pure).

A pickle may name anything that can be imported and called. A few names only rebuild data; some
are known to run commands; of the rest nobody knows but who reads their code.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from resilient.layouts.pickled import Name


class Effect(StrEnum):
    """What unpickling a name can do."""

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
    # Not its `_load_from_bytes`, which unpickles bytes that are not seen here.
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


def effect_of(name: Name) -> Effect:
    """Return what unpickling can do that names this; a dot in a name is a way to anything."""
    module, attribute = name.module, name.name
    if "." not in attribute and _rebuilds(module, attribute):
        return Effect.REBUILDS
    if module in _BUILTINS or _is_in(module, _RUNS_ALL) or "__" in attribute:
        return Effect.RUNS
    if (module, attribute) in _LIBRARY_TUPLES:
        return Effect.LIBRARY
    # No identifier is text that somebody may paste as it is shown.
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
