"""See that a stateful still has what it had when it was asked, in less time than asking takes.

A held step asks at each step, and to put a state together that nobody changed costs more than to
copy its tensors. What the answer was made of is kept here and compared, object by object: the
containers, their keys and what lies in them. Whether a tensor still lies where it did is for
:mod:`~resilient.state.recall` to see.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain, repeat
from operator import contains, is_, itemgetter
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from resilient.state.asking import ASKED, asks_as_torch_does, has_torchs_ways
from resilient.state.optimizer import NamedOptimizer
from resilient.state.rng import RandomState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# What torch asks of a module, by the names that it has in the module itself.
_WAYS = ("_state_dict_hooks", "_state_dict_pre_hooks")
_HELD = ("_parameters", "_buffers", "_modules")
_PASSING = "_non_persistent_buffers_set"
_DICTS = frozenset({dict, OrderedDict})
# The generators whose states are numbers in a tree.
_NUMBERS = ("python", "numpy")
# NumPy's and torch's; devices have more.
_RANDOM_TENSORS = 2


class Glance(Protocol):
    """What one stateful had when it was asked.

    Attributes:
        is_by_value: whether it compares the numbers, and not only whose memory they are in.
    """

    is_by_value: bool

    def is_same(self) -> bool:
        """Say whether it would give the same objects under the same keys, but for ``rest``."""

    def rest(self) -> dict[str, Any] | None:
        """Return what it gives besides ``state``, asked anew; None if there is nothing else."""


class ModuleGlance:
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
            and all(map(has_torchs_ways, frozenset(self._kinds)))
            and not any(_of_each(owns, *_WAYS))
            and not any(any(map(contains, owns, repeat(name))) for name in ASKED)
            and _are(_of_each(owns, *_HELD), self._dicts)
            and [*map(itemgetter(_PASSING), owns)] == self._passing
            and self._content.is_in(self._dicts)
        )

    def rest(self) -> None:
        """There is nothing else."""


class OptimizerGlance:
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


class RandomGlance:
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


def glance_at(
    stateful: Any, said: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> Glance | None:
    """Return what a stateful has now, if that can be seen without asking it.

    Crash: nothing was stored.

    Args:
        stateful: any.
        said: what it has just said.
        tensors: those in that, by name.
    """
    if isinstance(stateful, torch.nn.Module):
        modules = _within(stateful) if asks_as_torch_does(stateful) else []
        return ModuleGlance(modules) if modules else None
    if type(stateful) is NamedOptimizer and stateful.is_asked_plainly():
        states = stateful.optimizer.state.values()
        is_all_tensors = all(type(one) is dict for one in states) and all(
            type(value) is torch.Tensor for one in states for value in one.values()
        )
        return OptimizerGlance(stateful) if is_all_tensors else None
    cpu = [one for name, one in tensors.items() if name.endswith("/cpu")]
    is_random = type(stateful) is RandomState and len(tensors) == _RANDOM_TENSORS
    return RandomGlance(stateful, said, cpu[0]) if is_random and cpu else None


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
