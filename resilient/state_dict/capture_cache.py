"""Cache that avoids converting the state again if only the values of tensors changed.

A part is a named object of a checkpoint with a ``state_dict()``, such as ``model``. A capture
flattens the state of each part into a JSON tree and named tensors. The step cache keeps a copy of
every step in memory. It therefore captures the state at each step, and usually only the values of
tensors change.

Three methods save time. First, the cache walks plain ``torch.nn.Module`` trees without hooks, which
is faster than their own ``state_dict()``. Second, change detectors compare the objects of the last
capture one by one, without a new ``state_dict()`` call. Third, the cache compares all other states
with the last capture: keys, container kinds, and tensors (storage, offset, shape, strides, dtype).
If nothing differs, the capture returns the same :class:`CachedTensors` object, and results derived
from this object stay valid. If anything differs, the state is flattened again. The cache therefore
saves time, but never changes a result.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, repeat
from operator import attrgetter, contains, is_, itemgetter
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from resilient.state_dict.flatten import PLAIN, PLAIN_VALUES, flatten
from resilient.state_dict.optimizer import NamedOptimizer
from resilient.state_dict.rng_state import RandomState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from resilient.distributed.launch_env import World
    from resilient.state_dict.flatten import Tensors
    from resilient.state_dict.save_planner import PlannedFile

_Module = torch.nn.Module
ASKED = frozenset({"state_dict", "_save_to_state_dict"})
"""Names of the methods that torch calls on a module for its state."""


def fast_state_dict(stateful: Any) -> Mapping[str, Any]:
    """Return the result of ``stateful.state_dict()``, possibly with tensors that are not detached.

    Crash: nothing was stored.
    """
    if isinstance(stateful, _Module):
        tensors: OrderedDict[str, Any] = OrderedDict()
        if _gather(stateful, "", tensors):
            return tensors
    return stateful.state_dict()  # type: ignore[no-any-return]  # what a Stateful of anyone returns


def is_plain_module(module: torch.nn.Module) -> bool:
    """Return whether all modules inside use torch's own ``state_dict`` methods."""
    return _gather(module, "", {})


def has_default_state_dict(kind: type[torch.nn.Module]) -> bool:
    """Return whether a module class uses torch's own ``state_dict`` methods."""
    return (
        kind.state_dict is _Module.state_dict
        and kind._save_to_state_dict is _Module._save_to_state_dict  # noqa: SLF001
        and kind.get_extra_state is _Module.get_extra_state
    )


def _gather(module: torch.nn.Module, prefix: str, tensors: dict[str, Any]) -> bool:
    """Add the state of a module by name; return False if a module inside customizes its state."""
    # Copy of Module.state_dict of torch 2.13, for classes that do not override it.
    attributes = vars(module)
    if (
        # A traced module stores its members elsewhere, for its own `state_dict`.
        "_parameters" not in attributes
        or not has_default_state_dict(type(module))
        or not ASKED.isdisjoint(attributes)
        or attributes["_state_dict_pre_hooks"]
        or attributes["_state_dict_hooks"]
    ):
        return False
    for name, parameter in attributes["_parameters"].items():
        if isinstance(parameter, torch.nn.Parameter) and not _is_known(parameter):
            # torch's `state_dict` detaches a parameter of an unknown class, and returns a plain
            # tensor.
            return False
        if parameter is not None:
            tensors[prefix + name] = parameter
    if buffers := attributes["_buffers"]:
        passing = attributes["_non_persistent_buffers_set"]
        for name, buffer in buffers.items():
            if buffer is not None and name not in passing:
                tensors[prefix + name] = buffer
    return all(
        child is None or _gather(child, f"{prefix}{name}.", tensors)
        for name, child in attributes["_modules"].items()
    )


def _is_known(parameter: torch.nn.Parameter) -> bool:
    # Sharded tensors of torch have a local part.
    return type(parameter) in PLAIN or hasattr(parameter, "to_local")


# Attributes with the hooks that torch calls in `state_dict`.
_HOOK_ATTRIBUTES = ("_state_dict_hooks", "_state_dict_pre_hooks")
_MEMBER_ATTRIBUTES = ("_parameters", "_buffers", "_modules")
_NON_PERSISTENT = "_non_persistent_buffers_set"
_DICTS = frozenset({dict, OrderedDict})
# Generators whose states are plain numbers in a tree.
_NUMBERS = ("python", "numpy")
# The random state of one process without devices has these tensors: NumPy's and torch's.
_RANDOM_TENSORS = 2


class ChangeDetector(Protocol):
    """Record of the last state of one stateful, to detect changes.

    Attributes:
        is_by_value: Whether the detector compares numbers, and not only the identity of tensors.
    """

    is_by_value: bool

    def is_same(self) -> bool:
        """Return whether the state has the same keys and objects as before, except for ``rest``."""

    def rest(self) -> dict[str, Any] | None:
        """Return the state that ``is_same`` does not cover, requested again; None without one."""


class ModuleChangeDetector:
    """Change detector of a module whose modules all behave as ``torch.nn.Module``.

    Args:
        modules: The module and all modules inside, whose state was just requested.
    """

    is_by_value = False

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._modules = modules
        self._kinds = [*map(type, self._modules)]
        self._owns = [*map(vars, self._modules)]
        self._dicts = _items_of_each(self._owns, *_MEMBER_ATTRIBUTES)
        self._passing = [set(state[_NON_PERSISTENT]) for state in self._owns]
        self._content = _Content(self._dicts)

    def is_same(self) -> bool:
        """Return whether all modules, parameters and buffers are the same objects as before."""
        owns = self._owns
        return (
            _are_identical([*map(vars, self._modules)], owns)
            and _are_identical([*map(type, self._modules)], self._kinds)
            and all(map(has_default_state_dict, frozenset(self._kinds)))
            and not any(_items_of_each(owns, *_HOOK_ATTRIBUTES))
            and not any(any(map(contains, owns, repeat(name))) for name in ASKED)
            and _are_identical(_items_of_each(owns, *_MEMBER_ATTRIBUTES), self._dicts)
            and [*map(itemgetter(_NON_PERSISTENT), owns)] == self._passing
            and self._content.is_in(self._dicts)
        )

    def rest(self) -> None:
        """Return None, because there is no other state."""


class OptimizerChangeDetector:
    """Change detector of a named optimizer that keeps only tensors.

    Args:
        named_optimizer: Optimizer whose state was just requested.
    """

    is_by_value = False

    def __init__(self, named_optimizer: NamedOptimizer) -> None:
        self._named_optimizer = named_optimizer
        self._names = named_optimizer.names
        self._parameters = [*named_optimizer.optimizer.state]
        self._dicts: list[dict[str, Any]] = [*named_optimizer.optimizer.state.values()]
        self._content = _Content(self._dicts)

    def is_same(self) -> bool:
        """Return whether all parameters and tensors of the state are the same objects as before."""
        named_optimizer = self._named_optimizer
        state = named_optimizer.optimizer.state
        return (
            named_optimizer.uses_default_state_dict()
            and named_optimizer.names is self._names
            and _are_identical([*state], self._parameters)
            and _are_identical([*state.values()], self._dicts)
            and self._content.is_in(self._dicts)
        )

    def rest(self) -> dict[str, Any]:
        """Return the parameter groups, whose numbers ``is_same`` does not compare."""
        return {"param_groups": self._named_optimizer.groups()}


class RngChangeDetector:
    """Change detector of this process's random generators, for processes without device generators.

    torch's generator changes at nearly every step. Its state is a tensor, which the detector copies
    in place.

    Args:
        generators: Generators of the process.
        saved: Current state of the generators.
        cpu: A copy of torch's state that no other code changes.
    """

    is_by_value = True

    def __init__(
        self, generators: RandomState, saved: Mapping[str, Any], cpu: torch.Tensor
    ) -> None:
        self._generators = generators
        self._saved_state = saved
        self._cpu = cpu

    def is_same(self) -> bool:
        """Return whether the other generators are unchanged; update the copy of torch's state."""
        live_state, saved_state = self._generators.state_dict(), self._saved_state
        if [*live_state] != [*saved_state] or any(
            not _are_equal(live_state[number], saved_state[number]) for number in _NUMBERS
        ):
            return False
        self._cpu.copy_(live_state["cpu"])
        return True

    def rest(self) -> None:
        """Return None, because there is no other state."""


class _Content:
    """Contents of dicts, in order.

    Args:
        dicts: The dicts in their current state.
    """

    def __init__(self, dicts: Sequence[dict[str, Any]]) -> None:
        self._lengths = [*map(len, dicts)]
        self._keys = [*chain.from_iterable(dicts)]
        self._values = _values(dicts)

    def is_in(self, dicts: Sequence[dict[str, Any]]) -> bool:
        """Return whether the dicts have the same keys and the identical values."""
        return (
            [*map(len, dicts)] == self._lengths
            and [*chain.from_iterable(dicts)] == self._keys
            and _are_identical(_values(dicts), self._values)
        )


def make_change_detector(
    stateful: Any, saved: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> ChangeDetector | None:
    """Return a change detector for a stateful; None if only ``state_dict()`` shows changes.

    Crash: nothing was stored.

    Args:
        stateful: Any stateful.
        saved: Its current state.
        tensors: Tensors in that state, by name.
    """
    if isinstance(stateful, torch.nn.Module):
        modules = _inner_modules(stateful) if is_plain_module(stateful) else []
        return ModuleChangeDetector(modules) if modules else None
    if type(stateful) is NamedOptimizer and stateful.uses_default_state_dict():
        states = stateful.optimizer.state.values()
        is_all_tensors = all(type(state) is dict for state in states) and all(
            type(value) is torch.Tensor for state in states for value in state.values()
        )
        return OptimizerChangeDetector(stateful) if is_all_tensors else None
    cpu = [tensor for name, tensor in tensors.items() if name.endswith("/cpu")]
    is_random = type(stateful) is RandomState and len(tensors) == _RANDOM_TENSORS
    return RngChangeDetector(stateful, saved, cpu[0]) if is_random and cpu else None


def _inner_modules(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return a module and all inner modules, each once; empty if one customizes its state."""
    modules: dict[int, torch.nn.Module] = {}
    pending_modules = [module]
    while pending_modules:
        stateful = pending_modules.pop()
        attributes = vars(stateful)
        if not _DICTS.issuperset(type(attributes[name]) for name in _MEMBER_ATTRIBUTES):
            return []
        if id(stateful) not in modules:
            modules[id(stateful)] = stateful
            inner = [child for child in attributes["_modules"].values() if child is not None]
            pending_modules += reversed(inner)
    return [*modules.values()]


def _values(dicts: Iterable[dict[str, Any]]) -> list[Any]:
    return [*chain.from_iterable(map(dict.values, dicts))]


def _are_equal(left: Any, right: Any) -> bool:
    """Return whether two states of generators are equal."""
    if isinstance(left, dict):
        return [*left] == [*right] and all(map(_are_equal, left.values(), right.values()))
    return np.array_equal(left, right) if isinstance(left, np.ndarray) else bool(left == right)


def _are_identical(objects: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether two sequences have the identical objects."""
    return len(objects) == len(others) and all(map(is_, objects, others))


def _items_of_each(owns: Iterable[dict[str, Any]], *names: str) -> list[Any]:
    return [*chain.from_iterable(map(itemgetter(*names), owns))]


_TENSORS = frozenset(PLAIN)
_WORDS = frozenset({str})
_dtype, _changes = attrgetter("dtype"), attrgetter("_version")


class CachedTensors(dict[str, torch.Tensor]):
    """Tensors of a part by name; they share memory with training, and keep it alive.

    Attributes:
        drafts: Planned files of these tensors, by writing rank.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.drafts: dict[World, list[PlannedFile]] = {}


class CachedTree(dict[str, Any]):
    """Tree constant for cached tensors; it is never changed."""

    @cached_property
    def text(self) -> str:
        """Return the constant as JSON."""
        return json.dumps(self)


class CaptureCache:
    """State structure of parts at their last capture. It keeps their memory alive."""

    def __init__(self) -> None:
        self._records: dict[str, _CachedPart] = {}
        self._last_states: dict[str, _LastState] = {}
        self._changing_parts: set[str] = set()
        self._uncacheable_parts: set[str] = set()

    def flatten_part(self, part: str, stateful: Any) -> tuple[Any, Tensors]:
        """Return the state of a stateful as a tree, and the tensors in it.

        Crash: nothing was stored.

        Raises:
            UnsavableState: As for ``flatten``.
        """
        cached = self._reuse_if_unchanged(part, stateful)
        if cached is not None:
            return cached
        state = fast_state_dict(stateful)
        tree, tensors = self.flatten(part, state)
        detector = (
            make_change_detector(stateful, state, tensors)
            if part not in self._changing_parts
            else None
        )
        if detector is not None and (detector.is_by_value or isinstance(tensors, CachedTensors)):
            self._remember(part, stateful, detector, tree, tensors)
        return tree, tensors

    def _remember(
        self, part: str, stateful: Any, detector: ChangeDetector, tree: Any, tensors: Tensors
    ) -> None:
        changing_state = detector.rest()
        if changing_state is not None and flatten(part, changing_state)[1]:
            # State that is requested each time must not be part of the kept state.
            return
        cached_tensors = tensors if isinstance(tensors, CachedTensors) else CachedTensors(tensors)
        constant = CachedTree(tree if changing_state is None else tree["state"])
        self._last_states[part] = _LastState(stateful, detector, constant, cached_tensors)

    def _reuse_if_unchanged(self, part: str, stateful: Any) -> tuple[Any, Tensors] | None:
        """Return the result of ``flatten_part`` if certainly only numbers changed, else None."""
        look = self._last_states.get(part)
        if look is None or look.stateful is not stateful:
            return None
        if not look.glance.is_same() or not self._has_same_memory(part, look):
            del self._last_states[part]
            if not look.was_unchanged:
                # Exclude the part from later comparisons, because a comparison costs time too.
                self._changing_parts.add(part)
            return None
        look.was_unchanged = True
        changing_state = look.glance.rest()
        if changing_state is None:
            return look.constant, look.tensors
        tree, new_tensors = flatten(part, changing_state)
        return None if new_tensors else ({"state": look.constant, **tree}, look.tensors)

    def _has_same_memory(self, part: str, look: _LastState) -> bool:
        record = self._records.get(part)
        if look.glance.is_by_value:
            return True
        return record is not None and record.tensors is look.tensors and record.has_same_memory()

    def flatten(self, part: str, value: Any) -> tuple[Any, Tensors]:
        """Return the result of :func:`~resilient.state_dict.flatten.flatten`.

        If all tensors have the same memory as in the last call, the result has the same tensors
        object.

        Crash: nothing was stored.

        Raises:
            UnsavableState: As for ``flatten``.
        """
        if part in self._uncacheable_parts:
            return flatten(part, value)
        record = self._records.pop(part, None)
        walk = _Walk(record.constants if record else ())
        try:
            tree = walk.visit(value)
        except (_NotCacheable, RecursionError):
            self._uncacheable_parts.add(part)
            return flatten(part, value)
        if record is None or not record.matches(walk):
            tree, tensors = flatten(part, value)
            if not tensors:
                self._uncacheable_parts.add(part)
                return tree, tensors
            record = _CachedPart(walk, tree, CachedTensors(tensors))
        record.live = walk.seen
        self._records[part] = record
        return tree, record.tensors


@dataclass(slots=True)
class _LastState:
    """Last state of a part.

    Attributes:
        stateful: The object that was captured.
        glance: Change detector of the state.
        constant: The state without ``glance.rest``.
        tensors: Tensors in the constant.
        was_unchanged: Whether a later capture found the state unchanged.
    """

    stateful: Any
    glance: ChangeDetector
    constant: CachedTree
    tensors: CachedTensors
    was_unchanged: bool = False


class _CachedPart:
    """One flattened part.

    Args:
        walk: Walk through the part.
        tree: Resulting tree.
        tensors: Tensors of the tree.

    Attributes:
        tensors: Tensors by name.
        live: Tensor objects of the training at the last walk.
        constants: Constant of the tree for each group of tensors in the walk.
    """

    live: Sequence[torch.Tensor]

    def __init__(self, walk: _Walk, tree: Any, tensors: CachedTensors) -> None:
        self.tensors = tensors
        self.constants = tuple(map(CachedTree, _constants(tree)))
        self._places = walk.places
        self._tensors_seen = [
            tensors[name] for constant in self.constants for name in _names(constant)
        ]
        self._dtypes = [*map(_dtype, self._tensors_seen)]

    def matches(self, walk: _Walk) -> bool:
        """Return whether the walk found the same views of the same memory in the same places."""
        return walk.places == self._places and self._is_memory_of(walk.seen)

    def has_same_memory(self) -> bool:
        """Return whether the tensors of the last walk still have the same memory."""
        return self._is_memory_of(self.live)

    def _is_memory_of(self, live: Sequence[torch.Tensor]) -> bool:
        if [*map(_dtype, live)] != self._dtypes:
            return False
        try:
            # `is_set_to` compares storage, offset, shape, strides, and the conjugate and negative
            # bits.
            is_same = all(map(torch.Tensor.is_set_to, live, self._tensors_seen))
            # Both tensors must share one change counter.
            return is_same and [*map(_changes, live)] == [*map(_changes, self._tensors_seen)]
        except RuntimeError:
            # A tensor has no storage or no change counter.
            return False


class _NotCacheable(Exception):
    """The value contains something that is not cached."""


class _Walk:
    """Walk through a value like ``flatten``, without the names of tensors.

    Args:
        constants: Known constants of the tree, in order: one for each tensor, or for each dict of
            only tensors.

    Attributes:
        seen: The tensors, in order.
        places: Kind and keys of each container, and the key of each non-plain value.
    """

    def __init__(self, constants: Iterable[Any]) -> None:
        self.seen: list[torch.Tensor] = []
        self.places: list[Any] = []
        self._constants = iter(constants)

    def visit(self, value: Any) -> Any:
        kind = type(value)
        if kind in PLAIN_VALUES or (kind is float and math.isfinite(value)):
            return value
        if kind in _TENSORS:
            self.seen.append(value)
            return next(self._constants, None)
        if kind is dict or kind is OrderedDict:
            return self._mapping(kind, value)
        if kind is list or kind is tuple:
            self.places.append((kind, len(value)))
            children = [self._child(index, item) for index, item in enumerate(value)]
            return children if kind is list else {"$tuple": children}
        raise _NotCacheable

    def _mapping(self, kind: type, value: Mapping[Any, Any]) -> Any:
        self.places.append((kind, *value))
        if not _WORDS.issuperset(map(type, value)) or "$" in "".join(value):
            # A key with `$` looks like a tag.
            raise _NotCacheable
        if _TENSORS.issuperset(map(type, value.values())):
            self.seen += value.values()
            self.places.append(_TENSORS)
            return next(self._constants, None)
        if kind is OrderedDict:
            return {"$odict": [[key, self._child(key, item)] for key, item in value.items()]}
        return {key: self._child(key, item) for key, item in value.items()}

    def _child(self, key: Any, value: Any) -> Any:
        kind = type(value)
        if kind in PLAIN_VALUES or (kind is float and math.isfinite(value)):
            return value
        self.places.append(key)
        return self.visit(value)


def _constants(tree: Any) -> Iterator[Any]:
    """Yield the constants of a tree in walk order; a constant changes only with its tensors."""
    if isinstance(tree, dict):
        if "$tensor" in tree or ("$tuple" not in tree and _is_all_tensors(_tree_values(tree))):
            yield tree
            return
        tree = _tree_values(tree)
    elif not isinstance(tree, list):
        return
    for node in tree:
        yield from _constants(node)


def _names(constant: Any) -> list[str]:
    """Return the names of the tensors in a constant."""
    if "$tensor" in constant:
        return [constant["$tensor"]]
    return [value["$tensor"] for value in _tree_values(constant)]


def _tree_values(tree: dict[str, Any]) -> Sequence[Any]:
    """Return the values of a tree that represents a dict."""
    return [node for _, node in tree["$odict"]] if "$odict" in tree else [*tree.values()]


def _is_all_tensors(trees: Sequence[Any]) -> bool:
    return all(isinstance(tree, dict) and "$tensor" in tree for tree in trees)
