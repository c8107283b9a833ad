"""Models that were saved whole, with the code of their classes or as TorchScript, as data.

Source: ``torch.nn.Module.__getstate__`` and ``torch/csrc/jit/serialization``. To load a module runs
what its pickle names, and a program of TorchScript is code; their weights are as plain as others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilient.layouts.archives import tensors_in
from resilient.layouts.pickled import Made, TensorRef
from resilient.layouts.pickles import DEPTH_MAX, LEAVES_MAX
from resilient.layouts.values import MODEL, Contents, Problem, Unreadable

if TYPE_CHECKING:
    from resilient.layouts.archives import Archive
    from resilient.layouts.values import Tensor

_PARAMETERS, _BUFFERS, _MODULES = "_parameters", "_buffers", "_modules"
_PROGRAM = "__torch__"
_CONSTANTS = "constants.pkl"
_IN_CODE = "it is the module itself, and to load it runs what its pickle names: `{}` and others"
_AS_PROGRAM = "it is a program of TorchScript, to run a model and not to train it on"
_SCAN = "resilient ckpt scan {path}"
_LOAD_PROGRAM = "torch.jit.load('{path}')"
_WEIGHTS = "the optimizer, the schedule, the random state and the place in the data"


def is_module(value: Any) -> bool:
    """Say whether a value of an archive is a module of torch's."""
    if not isinstance(value, Made) or not isinstance(value.state, dict):
        return False
    return {_PARAMETERS, _BUFFERS, _MODULES} <= set(value.state)


def is_program(archive: Archive) -> bool:
    """Say whether an archive is one of TorchScript."""
    value = archive.value
    is_made = isinstance(value, Made) and value.kind.startswith(_PROGRAM)
    return is_made and _CONSTANTS in archive.members


def read_module(archive: Archive) -> Contents:
    """Return what a module or a program holds: its weights, and that no training goes on from it.

    Raises:
        Unreadable: there are more values than bounds allow.
    """
    value = archive.value
    if is_program(archive):
        problem = Problem(archive.name, _AS_PROGRAM, _WEIGHTS, is_fatal=True, help=_LOAD_PROGRAM)
        title, layout, resume = "a program of TorchScript", "torchscript", _LOAD_PROGRAM
    else:
        what = _IN_CODE.format(value.kind[:80] or "its class")
        problem = Problem(archive.name, what, _WEIGHTS, is_fatal=True, help=_SCAN)
        title, layout, resume = "a module of torch, saved whole", "torch-module", _SCAN
    return Contents(
        layout,
        title,
        resume,
        tensors_of(archive, value),
        facts={"class": value.kind[:200]} if value.kind else {},
        problems=(problem,),
    )


def tensors_of(archive: Archive, module: Any, root: str = "") -> tuple[Tensor, ...]:
    """Return the parameters and buffers of a module by the names its state would give them.

    Args:
        archive: it is in.
        module: the module.
        root: before each name.

    Raises:
        Unreadable: there are more values than bounds allow.
    """
    named: dict[str, TensorRef] = {}
    waiting: list[tuple[str, int, Any]] = [(root, 0, module)]
    seen = 0
    while waiting:
        prefix, depth, one = waiting.pop()
        seen += 1
        if depth > DEPTH_MAX or seen > LEAVES_MAX:
            raise Unreadable("modules in modules without an end")
        fields = _fields(one)
        named |= {f"{prefix}{key}": each for key, each in fields if isinstance(each, TensorRef)}
        inside = [(key, each) for key, each in fields if isinstance(each, Made)]
        waiting += [(f"{prefix}{key}.", depth + 1, each) for key, each in reversed(inside)]
    return tensors_in(archive, named, MODEL)


def _fields(module: Any) -> list[tuple[Any, Any]]:
    """Return the tensors and the modules that a module names."""
    state = module.state if isinstance(module, Made) else None
    if not isinstance(state, dict):
        return []
    if not is_module(module):
        # A program keeps all of its attributes side by side.
        return list(state.items()) if module.kind.startswith(_PROGRAM) else []
    parts = (state[one] for one in (_PARAMETERS, _BUFFERS, _MODULES))
    return [pair for one in parts if isinstance(one, dict) for pair in one.items()]
