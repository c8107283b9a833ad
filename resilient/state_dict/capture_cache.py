"""Skip re-flattening when nothing but values changed.

Ask a module for its state in less time than its own ``state_dict()`` takes, for the same answer.

Asked at each step, torch's way through a model costs more than the copy of what it finds. Modules
that do as ``torch.nn.Module`` does, and have nothing hooked to it, are gone through here.

See that a stateful still has what it had when it was asked, in less time than asking takes.

A held step asks at each step, and to put a state together that nobody changed costs more than to
copy its tensors. What the answer was made of is kept here and compared, object by object: the
containers, their keys and what lies in them. Whether a tensor still lies where it did is for
:mod:`~resilient.state_dict.capture_cache` to see.

Know a part's tensors again: the same memory as when it was captured last, named the same.

A held step is captured at each step, and mostly nothing is new but the numbers. What a part is
made of is asked of it each time, or seen at a glance (:mod:`~resilient.state_dict.capture_cache`); every key,
the kind of every container and the place of every tensor among them are compared with the last
time, and so is each tensor: its storage, offset, shape, strides and dtype. Only if all of that is
the same are the tensors the same *object*, :class:`Kept`, and what was derived from them holds.
Whatever else is there is taken apart anew, so nothing depends on what is remembered here but the
time that it takes.
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
    from resilient.state_dict.planner import PlannedFile

_Module = torch.nn.Module
ASKED = frozenset({"state_dict", "_save_to_state_dict"})
"""What torch calls of a module that is asked for its state, by the names of methods."""


def fast_state_dict(stateful: Any) -> Mapping[str, Any]:
    """Return what ``stateful.state_dict()`` does; tensors of a module may not be detached.

    Crash: nothing was stored.
    """
    if isinstance(stateful, _Module):
        found: OrderedDict[str, Any] = OrderedDict()
        if _gather(stateful, "", found):
            return found
    return stateful.state_dict()  # type: ignore[no-any-return]  # what a Stateful of anyone returns


def is_plain_module(module: torch.nn.Module) -> bool:
    """Say whether nothing in a module has a way of its own to say its state."""
    return _gather(module, "", {})


def has_default_state_dict(kind: type[torch.nn.Module]) -> bool:
    """Say whether a class of modules changes nothing of how torch asks for their state."""
    return (
        kind.state_dict is _Module.state_dict
        and kind._save_to_state_dict is _Module._save_to_state_dict  # noqa: SLF001
        and kind.get_extra_state is _Module.get_extra_state
    )


def _gather(module: torch.nn.Module, prefix: str, found: dict[str, Any]) -> bool:
    """Add the state of a module by name; False if it, or one in it, has a way of its own."""
    # What torch 2.13 does in Module.state_dict, for a class that changes nothing of it.
    own = vars(module)
    if (
        # A traced module keeps what it has where only its own way finds it.
        "_parameters" not in own
        or not has_default_state_dict(type(module))
        or not ASKED.isdisjoint(own)
        or own["_state_dict_pre_hooks"]
        or own["_state_dict_hooks"]
    ):
        return False
    for name, one in own["_parameters"].items():
        if isinstance(one, torch.nn.Parameter) and not _is_known(one):
            # Detached, as torch's own way does, one of a class of somebody else's is plain.
            return False
        if one is not None:
            found[prefix + name] = one
    if buffers := own["_buffers"]:
        passing = own["_non_persistent_buffers_set"]
        for name, one in buffers.items():
            if one is not None and name not in passing:
                found[prefix + name] = one
    return all(
        one is None or _gather(one, f"{prefix}{name}.", found)
        for name, one in own["_modules"].items()
    )


def _is_known(parameter: torch.nn.Parameter) -> bool:
    # torch's sharded tensors have a part here that is theirs.
    return type(parameter) in PLAIN or hasattr(parameter, "to_local")


# What torch asks of a module, by the names that it has in the module itself.
_WAYS = ("_state_dict_hooks", "_state_dict_pre_hooks")
_HELD = ("_parameters", "_buffers", "_modules")
_PASSING = "_non_persistent_buffers_set"
_DICTS = frozenset({dict, OrderedDict})
# The generators whose states are numbers in a tree.
_NUMBERS = ("python", "numpy")
# NumPy's and torch's; devices have more.
_RANDOM_TENSORS = 2


class ChangeDetector(Protocol):
    """What one stateful had when it was asked.

    Attributes:
        is_by_value: whether it compares the numbers, and not only whose memory they are in.
    """

    is_by_value: bool

    def is_same(self) -> bool:
        """Say whether it would give the same objects under the same keys, but for ``rest``."""

    def rest(self) -> dict[str, Any] | None:
        """Return what it gives besides ``state``, asked anew; None if there is nothing else."""


class ModuleChangeDetector:
    """Of a module, all of which does as ``torch.nn.Module`` does.

    Args:
        modules: itself and all within it, which were asked just now.
    """

    is_by_value = False

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._modules = modules
        self._kinds = [*map(type, self._modules)]
        self._owns = [*map(vars, self._modules)]
        self._dicts = _of_each(self._owns, *_HELD)
        self._passing = [set(one[_PASSING]) for one in self._owns]
        self._content = _Content(self._dicts)

    def is_same(self) -> bool:
        """Say whether no module, parameter or buffer came, went or was put in another's place."""
        owns = self._owns
        return (
            _are([*map(vars, self._modules)], owns)
            and _are([*map(type, self._modules)], self._kinds)
            and all(map(has_default_state_dict, frozenset(self._kinds)))
            and not any(_of_each(owns, *_WAYS))
            and not any(any(map(contains, owns, repeat(name))) for name in ASKED)
            and _are(_of_each(owns, *_HELD), self._dicts)
            and [*map(itemgetter(_PASSING), owns)] == self._passing
            and self._content.is_in(self._dicts)
        )

    def rest(self) -> None:
        """There is nothing else."""


class OptimizerChangeDetector:
    """Of a named optimizer that keeps nothing but tensors.

    Args:
        named: it was asked just now.
    """

    is_by_value = False

    def __init__(self, named: NamedOptimizer) -> None:
        self._named = named
        self._names = named.names
        self._parameters = [*named.optimizer.state]
        self._dicts: list[dict[str, Any]] = [*named.optimizer.state.values()]
        self._content = _Content(self._dicts)

    def is_same(self) -> bool:
        """Say whether no parameter and no tensor of the state came, went or became another."""
        named = self._named
        state = named.optimizer.state
        return (
            named.is_asked_plainly()
            and named.names is self._names
            and _are([*state], self._parameters)
            and _are([*state.values()], self._dicts)
            and self._content.is_in(self._dicts)
        )

    def rest(self) -> dict[str, Any]:
        """Return the groups: their numbers change without anybody telling."""
        return {"param_groups": self._named.groups()}


class RngChangeDetector:
    """Of the random generators of this process, where no device has one.

    torch's draws at nearly every step, and its state is a tensor: that is copied to where it was.

    Args:
        generators: of the process.
        said: what they have just said.
        cpu: a copy of torch's state, which nobody else changes.
    """

    is_by_value = True

    def __init__(self, generators: RandomState, said: Mapping[str, Any], cpu: torch.Tensor) -> None:
        self._generators = generators
        self._said = said
        self._cpu = cpu

    def is_same(self) -> bool:
        """Say whether nobody has drawn from the others, and bring torch's state up to date."""
        now, said = self._generators.state_dict(), self._said
        if [*now] != [*said] or any(not _are_equal(now[one], said[one]) for one in _NUMBERS):
            return False
        self._cpu.copy_(now["cpu"])
        return True

    def rest(self) -> None:
        """There is nothing else."""


class _Content:
    """What lies in dicts, in order.

    Args:
        dicts: as they are now.
    """

    def __init__(self, dicts: Sequence[dict[str, Any]]) -> None:
        self._lengths = [*map(len, dicts)]
        self._keys = [*chain.from_iterable(dicts)]
        self._values = _values(dicts)

    def is_in(self, dicts: Sequence[dict[str, Any]]) -> bool:
        """Say whether the same keys and the very same values lie in them."""
        return (
            [*map(len, dicts)] == self._lengths
            and [*chain.from_iterable(dicts)] == self._keys
            and _are(_values(dicts), self._values)
        )


def make_change_detector(
    stateful: Any, said: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> ChangeDetector | None:
    """Return what a stateful has now, if that can be seen without asking it.

    Crash: nothing was stored.

    Args:
        stateful: any.
        said: what it has just said.
        tensors: those in that, by name.
    """
    if isinstance(stateful, torch.nn.Module):
        modules = _within(stateful) if is_plain_module(stateful) else []
        return ModuleChangeDetector(modules) if modules else None
    if type(stateful) is NamedOptimizer and stateful.is_asked_plainly():
        states = stateful.optimizer.state.values()
        is_all_tensors = all(type(one) is dict for one in states) and all(
            type(value) is torch.Tensor for one in states for value in one.values()
        )
        return OptimizerChangeDetector(stateful) if is_all_tensors else None
    cpu = [one for name, one in tensors.items() if name.endswith("/cpu")]
    is_random = type(stateful) is RandomState and len(tensors) == _RANDOM_TENSORS
    return RngChangeDetector(stateful, said, cpu[0]) if is_random and cpu else None


def _within(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return a module and all within it, each once; none if one keeps them in a way of its own."""
    found: dict[int, torch.nn.Module] = {}
    left = [module]
    while left:
        one = left.pop()
        own = vars(one)
        if not _DICTS.issuperset(type(own[name]) for name in _HELD):
            return []
        if id(one) not in found:
            found[id(one)] = one
            inner = [each for each in own["_modules"].values() if each is not None]
            left += reversed(inner)
    return [*found.values()]


def _values(dicts: Iterable[dict[str, Any]]) -> list[Any]:
    return [*chain.from_iterable(map(dict.values, dicts))]


def _are_equal(one: Any, other: Any) -> bool:
    """Say whether two states of generators are the same numbers."""
    if isinstance(one, dict):
        return [*one] == [*other] and all(map(_are_equal, one.values(), other.values()))
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else bool(one == other)


def _are(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Say whether these are the very same objects."""
    return len(some) == len(others) and all(map(is_, some, others))


def _of_each(owns: Iterable[dict[str, Any]], *names: str) -> list[Any]:
    return [*chain.from_iterable(map(itemgetter(*names), owns))]


_TENSORS = frozenset(PLAIN)
_WORDS = frozenset({str})
_dtype, _changes = attrgetter("dtype"), attrgetter("_version")


class CachedTensors(dict[str, torch.Tensor]):
    """Tensors of a part by name; they share memory with training, and keep it alive.

    Attributes:
        drafts: the files that they become, by who writes them.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.drafts: dict[World, list[PlannedFile]] = {}


class CachedTree(dict[str, Any]):
    """What stands in a tree for tensors that are known again; nobody changes it."""

    @cached_property
    def text(self) -> str:
        """Itself as JSON."""
        return json.dumps(self)


class CaptureCache:
    """What parts were made of when they were captured last. It keeps their memory alive."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._looks: dict[str, _Look] = {}
        self._restless: set[str] = set()
        self._strange: set[str] = set()

    def take_apart(self, part: str, stateful: Any) -> tuple[Any, Tensors]:
        """Return the state of a stateful as a tree, and the tensors in it.

        Crash: nothing was stored.

        Raises:
            UnsavableState: as ``flatten`` does.
        """
        same = self._at_a_glance(part, stateful)
        if same is not None:
            return same
        said = fast_state_dict(stateful)
        tree, tensors = self.flatten(part, said)
        glance = (
            make_change_detector(stateful, said, tensors) if part not in self._restless else None
        )
        if glance is not None and (glance.is_by_value or isinstance(tensors, CachedTensors)):
            self._remember(part, stateful, glance, tree, tensors)
        return tree, tensors

    def _remember(
        self, part: str, stateful: Any, glance: ChangeDetector, tree: Any, tensors: Tensors
    ) -> None:
        rest = glance.rest()
        if rest is not None and flatten(part, rest)[1]:
            # What is asked each time shall not be among what is kept.
            return
        kept = tensors if isinstance(tensors, CachedTensors) else CachedTensors(tensors)
        constant = CachedTree(tree if rest is None else tree["state"])
        self._looks[part] = _Look(stateful, glance, constant, kept)

    def _at_a_glance(self, part: str, stateful: Any) -> tuple[Any, Tensors] | None:
        """Return what ``take_apart`` does if nothing is new but numbers; None if more may be."""
        look = self._looks.get(part)
        if look is None or look.stateful is not stateful:
            return None
        if not look.glance.is_same() or not self._is_still_there(part, look):
            del self._looks[part]
            if not look.has_proved:
                # To look costs time, too.
                self._restless.add(part)
            return None
        look.has_proved = True
        rest = look.glance.rest()
        if rest is None:
            return look.constant, look.tensors
        tree, more = flatten(part, rest)
        return None if more else ({"state": look.constant, **tree}, look.tensors)

    def _is_still_there(self, part: str, look: _Look) -> bool:
        known = self._known.get(part)
        if look.glance.is_by_value:
            return True
        return known is not None and known.tensors is look.tensors and known.is_still_there()

    def flatten(self, part: str, value: Any) -> tuple[Any, Tensors]:
        """Return what :func:`~resilient.state_dict.flatten.flatten` does.

        The tensors are the same object as the last time if they are the same memory.

        Crash: nothing was stored.

        Raises:
            UnsavableState: as ``flatten`` does.
        """
        if part in self._strange:
            return flatten(part, value)
        known = self._known.pop(part, None)
        walk = _Walk(known.constants if known else ())
        try:
            tree = walk.visit(value)
        except (_Unlike, RecursionError):
            self._strange.add(part)
            return flatten(part, value)
        if known is None or not known.is_like(walk):
            tree, tensors = flatten(part, value)
            if not tensors:
                self._strange.add(part)
                return tree, tensors
            known = _Known(walk, tree, CachedTensors(tensors))
        known.live = walk.seen
        self._known[part] = known
        return tree, known.tensors


@dataclass(slots=True)
class _Look:
    """What a part was when it was asked last.

    Attributes:
        stateful: what was asked.
        glance: sees whether it would say the same.
        constant: what it said, but for ``glance.rest``.
        tensors: what that names.
        has_proved: whether it has been the same since.
    """

    stateful: Any
    glance: ChangeDetector
    constant: CachedTree
    tensors: CachedTensors
    has_proved: bool = False


class _Known:
    """One part as it was taken apart.

    Args:
        walk: through it.
        tree: what it became.
        tensors: the same ones.

    Attributes:
        tensors: by name.
        live: the objects that training has of them, as the last walk saw them.
        constants: what stands in the tree for each group of tensors that the walk saw.
    """

    live: Sequence[torch.Tensor]

    def __init__(self, walk: _Walk, tree: Any, tensors: CachedTensors) -> None:
        self.tensors = tensors
        self.constants = tuple(map(CachedTree, _constants(tree)))
        self._places = walk.places
        self._seen = [tensors[name] for one in self.constants for name in _names(one)]
        self._dtypes = [*map(_dtype, self._seen)]

    def is_like(self, walk: _Walk) -> bool:
        """Say whether the walk saw the same memory in the same places, under the same eyes."""
        return walk.places == self._places and self._is_memory_of(walk.seen)

    def is_still_there(self) -> bool:
        """Say whether the very tensors that the last walk saw are still the same memory."""
        return self._is_memory_of(self.live)

    def _is_memory_of(self, live: Sequence[torch.Tensor]) -> bool:
        if [*map(_dtype, live)] != self._dtypes:
            return False
        try:
            # The same storage, offset, shape and strides, and neither conjugated nor negated.
            is_same = all(map(torch.Tensor.is_set_to, live, self._seen))
            # What counts changes of the one must count those of the other.
            return is_same and [*map(_changes, live)] == [*map(_changes, self._seen)]
        except RuntimeError:
            # One has no storage, or counts no changes.
            return False


class _Unlike(Exception):
    """The value has something that is not looked for again."""


class _Walk:
    """Goes through a value as ``flatten`` does, but for the names of tensors.

    Args:
        constants: what stands for each tensor, or dict of nothing but tensors, in the tree, in
            order, as far as that is known.

    Attributes:
        seen: the tensors, in order.
        places: where they are: the kind and the keys of each container, and the key in it of
            whatever is not plain.
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
            made = [self._child(index, one) for index, one in enumerate(value)]
            return made if kind is list else {"$tuple": made}
        raise _Unlike

    def _mapping(self, kind: type, value: Mapping[Any, Any]) -> Any:
        self.places.append((kind, *value))
        if not _WORDS.issuperset(map(type, value)) or "$" in "".join(value):
            # A key may be taken for a tag.
            raise _Unlike
        if _TENSORS.issuperset(map(type, value.values())):
            self.seen += value.values()
            self.places.append(_TENSORS)
            return next(self._constants, None)
        if kind is OrderedDict:
            return {"$odict": [[key, self._child(key, one)] for key, one in value.items()]}
        return {key: self._child(key, one) for key, one in value.items()}

    def _child(self, key: Any, value: Any) -> Any:
        kind = type(value)
        if kind in PLAIN_VALUES or (kind is float and math.isfinite(value)):
            return value
        self.places.append(key)
        return self.visit(value)


def _constants(tree: Any) -> Iterator[Any]:
    """Yield what does not change of a tree as long as the tensors are the same, as a walk does."""
    if isinstance(tree, dict):
        if "$tensor" in tree or ("$tuple" not in tree and _is_all_tensors(_recall_values(tree))):
            yield tree
            return
        tree = _recall_values(tree)
    elif not isinstance(tree, list):
        return
    for one in tree:
        yield from _constants(one)


def _names(constant: Any) -> list[str]:
    """Return the names of the tensors in what ``_constants`` yields."""
    if "$tensor" in constant:
        return [constant["$tensor"]]
    return [one["$tensor"] for one in _recall_values(constant)]


def _recall_values(tree: dict[str, Any]) -> Sequence[Any]:
    """Return what a tree has in place of the values of a dict."""
    return [one for _, one in tree["$odict"]] if "$odict" in tree else [*tree.values()]


def _is_all_tensors(trees: Sequence[Any]) -> bool:
    return all(isinstance(one, dict) and "$tensor" in one for one in trees)
