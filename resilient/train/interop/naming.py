"""The names by which a model's tensors are saved, as they follow from the model alone."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError
from resilient.strategies.detour import detour_of, named_in
from resilient.train.model.adapters import adapter_of, is_adapted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch
    from torch import nn


@dataclass(frozen=True, slots=True)
class Naming:
    """What a checkpoint by position lacks.

    Attributes:
        trained: names of the parameters of each of the optimizer's groups, in its order.
        tied: names of one and the same tensor, of which a file of weights holds only one.
        adapter: names in a file of PEFT's -> those of the model; empty without an adapter.
        base: the tensors of an adapted model, of which such a file holds only a few.
    """

    trained: tuple[tuple[str, ...], ...]
    tied: tuple[tuple[str, ...], ...]
    adapter: Mapping[str, str] = field(default_factory=dict)
    base: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def complete(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return all tensors of the model, of which a file holds those that it needs."""
        if not self.adapter:
            return tie(tensors, self.tied)
        return {**self.base, **{self.adapter.get(key, key): one for key, one in tensors.items()}}


def naming_of(model: nn.Module, groups: Iterable[Mapping[str, Any]]) -> Naming:
    """Return the names of a model's tensors and of an optimizer's parameters.

    Args:
        model: the plain module; it may be on the meta device.
        groups: ``param_groups`` of the optimizer.

    Raises:
        KeyError: a group holds a parameter that is not the model's.
        ConfigError: the base of an adapter is in flat shards.
    """
    names: dict[int, str] = {}
    firsts: dict[int, str] = {}
    for one in named_in(model):
        if one.held() is not None:
            names.setdefault(one.number, one.name)
        if one.is_trained:
            firsts.setdefault(one.number, one.name)
    held = [[id(one) for one in group["params"]] for group in groups]
    trained: tuple[tuple[str, ...], ...] = (tuple(firsts.values()),)
    is_flat = detour_of(model) is not None and len(held) == 1 and names.keys().isdisjoint(held[0])
    if not is_flat:  # else vectors hold all that is trained
        trained = tuple(tuple(names[number] for number in numbers) for numbers in held)
    naming = Naming(trained, tied_names(model))
    if not is_adapted(model):
        return naming
    if detour_of(model) is not None:
        raise ConfigError(
            "an adapter's checkpoint of Transformers cannot be taken over into FSDP1, which does "
            "not give away the tensors of its base",
            hint="take it over without fsdp first, or write version=2 in fsdp_config",
        )
    return replace(naming, adapter=adapter_of(model)["names"], base=model.state_dict())


def tied_names(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return the names under which each parameter is known that has several."""
    known: defaultdict[int, list[str]] = defaultdict(list)
    for one in named_in(model):
        known[one.number].append(one.name)
    return tuple(tuple(names) for names in known.values() if len(names) > 1)


def tie(
    tensors: Mapping[str, torch.Tensor], tied: Sequence[Sequence[str]]
) -> dict[str, torch.Tensor]:
    """Return tensors with those added that are another one's under a second name."""
    whole = dict(tensors)
    for names in tied:
        held = next((tensors[name] for name in names if name in tensors), None)
        if held is not None:
            whole |= {name: held for name in names if name not in tensors}
    return whole
