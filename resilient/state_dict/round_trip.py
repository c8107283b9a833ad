"""Check at a save that a later load would accept the saved state.

A part is a named object of a checkpoint, such as ``model``. The check runs at the first save of a
part, and again if the structure of its state changes. The check writes the state as JSON, with
names in place of tensors. It reads the JSON again and compares the result with the live state. Then
the check imitates a resume. It compares the groups of an optimizer and the keys of a module, and
loads a scheduler's state into a copy of the scheduler. No tensor is copied, and the live objects
stay unchanged.
"""

from __future__ import annotations

import copy
import json
import math
import re
import warnings
from collections import Counter, defaultdict
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from resilient.errors import ResilientError, UnsavableState
from resilient.format.state_json import JsonRows
from resilient.state_dict.capture_cache import fast_state_dict, is_plain_module
from resilient.state_dict.changes import scheduler_in
from resilient.state_dict.flatten import escape, flatten, unflatten
from resilient.state_dict.save_planner import require_readable_numbers, tree_to_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from resilient.state_dict.flatten import Tensors

_SAFE = "Nothing of this save was stored; the live state and older checkpoints are unchanged"
REJECTIONS = (
    *(RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
    AssertionError,
)
"""Errors by which an optimizer of torch rejects its options."""
_ENTRIES_MAX = 64
"""Largest number of entries of a container whose keys are checked one by one."""
_INDEX = re.compile(r"/\d{3,}(?=/|$)")
"""Stand-in for later positions of a list, because the first entries show the structure."""


class RoundTripCheck:
    """Flattener of parts that tests each new structure of a part with the loader."""

    def __init__(self) -> None:
        self._seen_types: dict[str, set[tuple[str, type]]] = {}
        self._checked_types: dict[str, set[tuple[str, type]]] = {}

    def flatten_part(self, part: str, stateful: Any) -> tuple[Any, Tensors]:
        """Return the state of a stateful as a tree, and the tensors in it.

        Crash: nothing was stored.

        Args:
            part: Name of the part.
            stateful: The live object.

        Raises:
            UnsavableState: As for ``flatten``, or a load would refuse or change the state. The
                error names the key.
        """
        state = fast_state_dict(stateful)
        kinds: set[tuple[str, type]] = set()
        tree, tensors = flatten(part, state, kinds)
        seen_kinds = self._seen_types.get(part)
        unseen_kinds = kinds if seen_kinds is None else kinds - seen_kinds
        if seen_kinds is None or unseen_kinds:
            checked_paths = self._checked_types.get(part, set())
            crowded = _crowded_paths(kinds)
            unseen_paths = {
                (_with_placeholders(path, crowded), kind) for path, kind in unseen_kinds
            }
            if seen_kinds is None or not unseen_paths <= checked_paths:
                _require_loadable(part, stateful, state, tree, tensors)
            self._checked_types[part] = checked_paths | unseen_paths
        self._seen_types[part] = kinds
        return tree, tensors


def _crowded_paths(kinds: set[tuple[str, type]]) -> set[str]:
    """Return the paths of containers with too many entries, whose keys count as data."""
    parents = Counter(path.rpartition("/")[0] for path, _ in kinds)
    return {path for path, entries in parents.items() if entries > _ENTRIES_MAX}


def _with_placeholders(path: str, crowded: set[str]) -> str:
    """Return a path with one placeholder for keys of crowded containers and for late positions."""
    names = path.split("/")
    for at in range(1, len(names)):
        if "/".join(names[:at]) in crowded:
            path = "/".join([*names[:at], "#", *names[at + 1 :]])
    return _INDEX.sub("/#", path)


def _require_loadable(part: str, stateful: Any, state: Any, tree: Any, tensors: Tensors) -> None:
    """Raise if a load would refuse or change the state of a part."""
    require_readable_numbers(tree, part)
    outlines = {
        name: torch.zeros((), dtype=tensor.dtype).expand(tuple(tensor.shape))
        for name, tensor in tensors.items()
    }
    try:
        loaded_state = unflatten(json.loads(tree_to_json(tree)), outlines.__getitem__)
    except (ResilientError, ValueError, TypeError, LookupError) as error:
        raise _refusal(part, f"cannot be read back: {error}") from error
    differs = _difference(state, loaded_state, part)
    if differs:
        raise _refusal(differs, "would be loaded as another value or type")
    _require_accepted(part, stateful, loaded_state)


def _refusal(path: str, why: str) -> UnsavableState:
    return UnsavableState(
        f"`{path}` {why}. {_SAFE}",
        path=path,
        hint="return tensors, numbers, strings, lists or dicts from state_dict()",
    )


def _difference(live: Any, loaded: Any, path: str) -> str:
    """Return the path of the first value that a load would change; empty without one.

    Tensors are compared by dtype and shape. A load returns a parameter as a plain tensor.
    """
    if isinstance(live, torch.Tensor | JsonRows):
        return "" if isinstance(live, JsonRows) or _is_tensor_alike(live, loaded) else path
    if _kind_of(live) != _kind_of(loaded):
        return path
    if isinstance(live, dict):
        return _difference_of_dicts(live, loaded, path)
    if isinstance(live, list | tuple) and len(live) == len(loaded):
        pairs = enumerate(zip(live, loaded, strict=True))
        return next(
            filter(None, (_difference(*values, f"{path}/{at}") for at, values in pairs)), ""
        )
    return "" if _is_equal(live, loaded) else path


def _kind_of(value: Any) -> Any:
    """Return the type of a value; for a NumPy scalar its dtype, because several types share it."""
    return value.dtype if isinstance(value, np.generic) else type(value)


def _is_tensor_alike(live: torch.Tensor, loaded: Any) -> bool:
    is_alike = isinstance(loaded, torch.Tensor) and live.dtype == loaded.dtype
    return is_alike and tuple(live.shape) == tuple(loaded.shape)


def _difference_of_dicts(live: Mapping[Any, Any], loaded: Mapping[Any, Any], path: str) -> str:
    if len(live) != len(loaded):
        return path
    for key, loaded_key in zip(live, loaded, strict=True):
        inner = f"{path}/{escape(str(key))}"
        # Tensors hash by identity, so no lookup finds a key that is a loaded tensor.
        if isinstance(key, torch.Tensor) or _difference(key, loaded_key, inner):
            return inner
        if differs := _difference(live[key], loaded[loaded_key], inner):
            return differs
    return ""


def _is_equal(live: Any, loaded: Any) -> bool:
    if isinstance(live, np.ndarray | np.generic):
        return bool(live.dtype == loaded.dtype and live.shape == loaded.shape)
    if isinstance(live, float | complex):
        return repr(live) == repr(loaded)
    if isinstance(live, set | frozenset):
        return not any(isinstance(value, torch.Tensor) for value in live) and sorted(
            map(repr, live)
        ) == sorted(map(repr, loaded))
    return bool(live == loaded)


def _require_accepted(part: str, stateful: Any, state: Any) -> None:
    """Raise if a part would refuse the state at a resume, tested without a load."""
    try:
        if hasattr(stateful, "check_saved"):
            stateful.check_saved(state)
        scheduler = scheduler_in(stateful)
        if scheduler is not None:
            _require_loadable_schedule(stateful, scheduler, state)
        if isinstance(stateful, nn.Module) and not is_plain_module(stateful):
            _require_known_keys(stateful, state)
    except UnsavableState:
        raise
    except (ResilientError, RuntimeError, ValueError, LookupError, TypeError) as error:
        raise UnsavableState(
            f"`{part}` would reject its own state at a resume: {error}. {_SAFE}",
            path=part,
            hint=f"make state_dict() and load_state_dict() of `{part}` consistent",
        ) from error


def _require_loadable_schedule(stateful: Any, scheduler: Any, state: Mapping[str, Any]) -> None:
    """Load a state into a copy of a scheduler of torch."""
    if not _is_of_torch(scheduler):
        return
    schedule_copy = _copy_of(scheduler)
    if stateful is scheduler:
        schedule_copy.load_state_dict(state)
    elif hasattr(stateful, "with_scheduler"):
        stateful.with_scheduler(schedule_copy).load_state_dict(state)


def rehearse_step(stateful: Any, scheduler: Any, state: Mapping[str, Any]) -> None:
    """Load a state into a copy of a scheduler over another optimizer, and make one step with it.

    The live scheduler and its optimizer do not change. A scheduler of a script is not rehearsed.

    Args:
        stateful: Stateful with a method ``with_scheduler``.
        scheduler: The live scheduler.
        state: State of the scheduler.

    Raises:
        TypeError, ValueError, LookupError, AttributeError, ArithmeticError: The load or the step
            fails, or a rate is not finite.
    """
    if not _is_of_torch(scheduler):
        return
    optimizer = _stand_in(scheduler.optimizer)
    schedule_copy = _copy_of(scheduler)
    _attach(schedule_copy, optimizer)
    stateful.with_scheduler(schedule_copy).load_state_dict(state)
    with warnings.catch_warnings():
        # torch warns of a step of the scheduler before the first step of its optimizer.
        warnings.simplefilter("ignore")
        if isinstance(schedule_copy, ReduceLROnPlateau):
            schedule_copy.step(1.0)
        elif schedule_copy.last_epoch < getattr(schedule_copy, "total_steps", math.inf):
            schedule_copy.step()
    for group in optimizer.param_groups:
        if not math.isfinite(group["lr"]):
            raise ValueError(f"its next learning rate is {float(group['lr'])}")


def rehearse_options(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Make one step with given options on a stand-in for an optimizer of torch.

    The live optimizer and its parameters do not change. An optimizer of another class is not
    rehearsed, and neither is one that cannot make such a step with its own options.

    Args:
        optimizer: The live optimizer.
        groups: Options of each of its groups.

    Raises:
        RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError,
            AssertionError: The optimizer rejects the options.
    """
    live_groups = optimizer.param_groups
    if not type(optimizer).__module__.startswith("torch.optim.") or len(groups) != len(live_groups):
        return
    try:
        _step_of_stand_in(optimizer, live_groups)
    except REJECTIONS:
        return
    _step_of_stand_in(optimizer, groups)


def _step_of_stand_in(
    optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]
) -> None:
    """Step an optimizer of the same class with one parameter of one element per group."""
    stand_in = type(optimizer).__new__(type(optimizer))
    own_groups = []
    for live, group in zip(optimizer.param_groups, groups, strict=True):
        options = {name: value for name, value in group.items() if name != "params"}
        parameters = [_of_one_element(parameter) for parameter in live["params"][:1]]
        own_groups.append({**copy.deepcopy(options), "params": parameters})
    defaults = copy.deepcopy(optimizer.defaults)
    stand_in.__setstate__(
        {"defaults": defaults, "state": defaultdict(dict), "param_groups": own_groups}
    )
    stand_in.step()


def _of_one_element(parameter: torch.Tensor) -> nn.Parameter:
    shape = (1,) * parameter.dim()
    element = nn.Parameter(torch.zeros(shape, dtype=parameter.dtype, device=parameter.device))
    element.grad = torch.zeros_like(element)
    return element


def _stand_in(optimizer: Any) -> torch.optim.Optimizer:
    """Return an optimizer with the options of another one, over parameters of one element."""
    groups = [
        {
            **copy.deepcopy({name: value for name, value in group.items() if name != "params"}),
            "params": [torch.nn.Parameter(torch.zeros(1))],
        }
        for group in optimizer.param_groups
    ]
    return torch.optim.SGD(groups, lr=0.0)


def _attach(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    scheduler.optimizer = optimizer
    for inner in getattr(scheduler, "_schedulers", ()):
        _attach(inner, optimizer)


def _is_of_torch(scheduler: Any) -> bool:
    """Return whether a scheduler and all schedulers inside it use torch's own load.

    The load of another class may change objects that a copy shares with the live scheduler.
    """
    inner = getattr(scheduler, "_schedulers", ())
    of_torch = type(scheduler).load_state_dict.__module__.startswith("torch.optim.")
    return of_torch and all(map(_is_of_torch, inner))


def _copy_of(scheduler: Any) -> Any:
    """Return a copy of a scheduler whose load changes neither the scheduler nor its functions."""
    scheduler_copy = copy.copy(scheduler)
    for name, value in vars(scheduler).items():
        if name == "_schedulers":
            scheduler_copy._schedulers = [_copy_of(item) for item in value]  # noqa: SLF001 - as torch keeps them
        elif name == "lr_lambdas":
            scheduler_copy.lr_lambdas = [_copy_of_callable(function) for function in value]
        elif name == "_scale_fn_custom":
            scheduler_copy._scale_fn_custom = _copy_of_callable(value)  # noqa: SLF001 - CyclicLR loads into it
    return scheduler_copy


def _copy_of_callable(function: Any) -> Any:
    """Return a function, or a copy of a callable object, into which torch loads attributes."""
    return function if isinstance(function, FunctionType) else copy.copy(function)


def _require_known_keys(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Raise if a module saves keys that its own load rejects."""
    keys: set[str] = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        if _has_own_load(module):
            return
        names = [*module._parameters, *module._buffers]  # noqa: SLF001 - torch has no public way
        if type(module).set_extra_state is not nn.Module.set_extra_state:
            names.append("_extra_state")
        keys.update(f"{prefix}.{name}".removeprefix(".") for name in names)
    unknown_keys = sorted(map(str, state.keys() - keys))
    if unknown_keys:
        raise ValueError(f"load_state_dict() of the module does not know `{unknown_keys[0]}`")


def _has_own_load(module: nn.Module) -> bool:
    kind, attributes = type(module), vars(module)
    return (
        kind.load_state_dict is not nn.Module.load_state_dict
        or kind._load_from_state_dict is not nn.Module._load_from_state_dict  # noqa: SLF001
        or not {"load_state_dict", "_load_from_state_dict"}.isdisjoint(attributes)
        or bool(attributes["_load_state_dict_pre_hooks"])
        or bool(attributes["_load_state_dict_post_hooks"])
    )
