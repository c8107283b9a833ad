"""Conversion of user objects to named parts of a checkpoint, which have a ``state_dict()``.

User objects are modules, optimizers, other objects with a ``state_dict()``, and plain values.

The conversion removes wrappers. A model inside DDP or ``torch.compile`` is therefore saved under
the names of the unwrapped model. Optimizer state is saved under the names of its parameters.
Metrics and log entries are converted to plain numbers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from resilient.errors import ConfigError, UnsavableState
from resilient.state_dict.flatten import flatten
from resilient.state_dict.optimizer import NamedOptimizer
from resilient.state_dict.rng_state import RandomState
from resilient.state_dict.snapshot import Part

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

RNG = "rng_state"
# Suffix of a per-rank part in a checkpoint, see resilient.format.keys.rank_part.
_WITHOUT_RANK = re.compile(r"_\d+$")


@dataclass(slots=True)
class PlainValue:
    """A plain value as a Stateful; dicts and lists are restored in place.

    Attributes:
        value: Value of a type that :func:`resilient.state_dict.flatten.flatten` accepts.
    """

    value: Any

    def state_dict(self) -> dict[str, Any]:
        """Return the value."""
        return {"value": self.value}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the value. A dict or list is changed in place, for all references to it.

        Raises:
            ValueError: The saved value is of another kind.
        """
        saved_value, value = state_dict["value"], self.value
        if isinstance(value, dict | list) and type(saved_value) is not type(value):
            raise ValueError(
                f"it was a {type(saved_value).__name__}, but is a {type(value).__name__} here"
            )
        if isinstance(value, dict):
            value.clear()
            value.update(saved_value)
        elif isinstance(value, list):
            value[:] = saved_value
        else:
            self.value = saved_value


@dataclass(frozen=True, slots=True)
class Generator:
    """A ``torch.Generator`` as a Stateful."""

    generator: torch.Generator

    def state_dict(self) -> dict[str, Any]:
        """Return its state."""
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the saved state."""
        self.generator.set_state(state_dict["state"])


@dataclass(frozen=True, slots=True)
class RankLocalBuffers:
    """Buffers of a replica that may differ from those of other ranks."""

    model: nn.Module

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return persistent buffers by name."""
        return dict(_buffers(self.model))

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Load the buffers that the model still has."""
        for name, buffer in _buffers(self.model):
            if name in state_dict:
                buffer.copy_(state_dict[name])


def _buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        non_persistent = module._non_persistent_buffers_set  # noqa: SLF001 - torch has no public way
        for name, buffer in module.named_buffers(recurse=False):
            if name not in non_persistent and type(buffer) in (torch.Tensor, nn.Buffer):
                yield f"{prefix}.{name}".removeprefix("."), buffer


def bare(model: nn.Module) -> nn.Module:
    """Return the user's module inside wrappers: DDP, DataParallel, DeepSpeed, ``torch.compile``."""
    while True:
        if isinstance(model, DataParallel | DistributedDataParallel) or _is_engine(model):
            model = cast("nn.Module", model.module)
        elif "_orig_mod" in model._modules:  # noqa: SLF001 - asking dynamo would load it
            model = model.get_submodule("_orig_mod")
        else:
            return model


@dataclass(frozen=True, slots=True)
class TrackedObjects:
    """All objects that one training loop saves, as parts.

    Attributes:
        parts: Parts by name, in the order of loading.
        values: Plain values among the parts.
        strategy: Parallelism of the models, as named in a manifest.
        replicas: DDP models, whose buffers are saved from rank 0.
    """

    parts: dict[str, Part]
    values: dict[str, PlainValue] = field(default_factory=dict)
    strategy: str = "single"
    replicas: tuple[DistributedDataParallel, ...] = ()

    @property
    def is_collective(self) -> bool:
        """True if a save uses collectives of the training backend."""
        return bool(self.replicas) or self.strategy not in ("single", "ddp")

    def align(self) -> None:
        """Give every rank the buffers of rank 0, as DDP's next forward pass would. Collective.

        Running statistics differ between replicas after a step. Without this call a checkpoint
        could contain the statistics of another rank.
        """
        for replica in self.replicas:
            group = replica.process_group
            for buffer in replica.module.buffers():
                dist.broadcast(buffer, group=group, group_src=0)

    def left_out(self, stored_names: Iterable[str]) -> tuple[str, ...]:
        """Return the names in a checkpoint that match no part."""
        rank_names = {RNG} | {name for name, part in self.parts.items() if part.scope == "rank"}
        rank_names |= {f"{name}_buffers" for name in self.parts}
        unmatched_names = (name for name in stored_names if name not in self.parts)
        return tuple(
            sorted(
                name for name in unmatched_names if _WITHOUT_RANK.sub("", name) not in rank_names
            )
        )


def collect_parts(tracked: Mapping[str, Any], ranks: int, *, rng: bool) -> TrackedObjects:
    """Convert the objects that a user named to parts.

    Args:
        tracked: Modules, optimizers, objects with ``state_dict`` and ``load_state_dict``,
            ``torch.Generator``, plain values, or a ``Part`` around one of these.
        ranks: Number of ranks that train together.
        rng: Whether the global random state is also a part.

    Raises:
        ConfigError: An object has no known state, an optimizer's model is missing, a name is
            taken, or the ranks train independently.
    """
    _require_together(tracked, ranks)
    unwrapped = {name: unwrap(value) for name, value in tracked.items()}
    models = {name: value for name, value in unwrapped.items() if isinstance(value, nn.Module)}
    parts: dict[str, Part] = {}
    for name, stateful in tracked.items():
        parts[name] = _part(name, stateful, models)
        if ranks > 1 and isinstance(stateful, nn.Module) and _replica(stateful) is None:
            local_buffers = RankLocalBuffers(bare(stateful))
            if local_buffers.state_dict():
                parts[f"{name}_buffers"] = Part(local_buffers, "rank", optional=True)
    if rng:
        if RNG in parts:
            raise ConfigError(f"`{RNG}` is reserved for the random state: choose another name")
        # Load the random state last, so that no other load draws from the restored generators.
        parts[RNG] = Part(RandomState(), "rank")
    values = {
        n: part.stateful for n, part in parts.items() if isinstance(part.stateful, PlainValue)
    }
    replicas = tuple(replica for replica in map(_replica, models.values()) if replica and ranks > 1)
    return TrackedObjects(parts, values, _strategy(models, ranks), replicas)


def _require_together(tracked: Mapping[str, Any], ranks: int) -> None:
    """Raise if the ranks would save independently trained models as one model.

    The ranks write a replicated object once, in shares. The shares of different models would form a
    model that never existed.
    """
    if ranks == 1 or dist.is_initialized():
        return
    tracked_name = next(
        (n for n, value in tracked.items() if isinstance(value, nn.Module | Optimizer)), None
    )
    if tracked_name is not None:
        raise ConfigError(
            f"this is one of {ranks} ranks (WORLD_SIZE), and each trains its own `{tracked_name}`: "
            "torch.distributed is not initialized, so the ranks are not connected",
            hint="call torch.distributed.init_process_group() before resume(); on CPUs accelerate "
            "needs Accelerator(cpu=True), and Transformers needs use_cpu=True",
        )


def unwrap(value: Any) -> Any:
    """Return the object inside a Part; return any other object unchanged."""
    return value.stateful if isinstance(value, Part) else value


def _is_unwrapped(value: Any) -> bool:
    """Return whether a save ignores the object's own ``state_dict``."""
    return isinstance(value, nn.Module | Optimizer) or _is_a(value, "DeepSpeedOptimizer")


def _part(name: str, value: Any, models: Mapping[str, nn.Module]) -> Part:
    if isinstance(value, Part):
        inner: Any = value.stateful
        if _is_unwrapped(inner) or not hasattr(inner, "state_dict"):
            inner = _part(name, inner, models).stateful
        return replace(value, stateful=inner)
    if isinstance(value, nn.Module):
        return _model(name, value)
    if isinstance(value, Optimizer) or _is_a(value, "DeepSpeedOptimizer"):
        return _optimizer(name, value, models)
    if isinstance(value, torch.Generator):
        return Part(Generator(value), "rank")
    return _stateful(name, value)


def _stateful(name: str, value: Any) -> Part:
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return Part(value)
    if value is None or isinstance(value, bool | int | float | str | list | dict):
        return Part(PlainValue(value))
    raise ConfigError(
        f"`{name}` is a {type(value).__module__}.{type(value).__qualname__}, which has no state "
        "that could be saved",
        hint=f"put it in a dict, which is restored in place: {name}={{'value': ...}}"
        if _can_be_inside(value)
        else "give it the methods state_dict() and load_state_dict(state_dict)",
    )


def _can_be_inside(value: Any) -> bool:
    """Return whether a value can be saved inside a dict: a tensor, an array, a tuple or bytes."""
    try:
        flatten("value", value)
    except UnsavableState:
        return False
    return True


def _model(name: str, model: nn.Module) -> Part:
    if _is_engine(model):
        # Import inside the function, because only training with DeepSpeed needs this module.
        from resilient.state_dict.deepspeed import ZeroModel

        return Part(ZeroModel(model))
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise ConfigError(
            f"`{name}` has parameters that ZeRO-3 has partitioned, and only its engine can "
            "collect them",
            hint=f"pass the first result of deepspeed.initialize: {name}=engine",
        )
    if _is_flat(model):
        # Import inside the function, because only a model with FSDP1 needs torch's FSDP1 modules.
        from resilient.state_dict.fsdp1 import Fsdp1Model

        return Part(Fsdp1Model(model))
    return Part(bare(model))


def _optimizer(name: str, optimizer: Any, models: Mapping[str, nn.Module]) -> Part:
    engines: list[Any] = [model for model in models.values() if _is_engine(model)]
    for engine in engines:
        if optimizer is engine.optimizer or optimizer is engine.basic_optimizer:
            from resilient.state_dict.deepspeed import ZeroOptimizer

            return Part(ZeroOptimizer(engine))
    if _is_a(optimizer, "DeepSpeedOptimizer"):
        raise ConfigError(
            f"`{name}` belongs to DeepSpeed, but its engine was not passed",
            hint="also pass the first result of deepspeed.initialize: model=engine",
        )
    return _plain_optimizer(name, optimizer, models)


def _plain_optimizer(name: str, optimizer: Optimizer, models: Mapping[str, nn.Module]) -> Part:
    if _is_a(optimizer, "ZeroRedundancyOptimizer"):
        raise ConfigError(
            f"`{name}` is a ZeroRedundancyOptimizer, which hides the state of other ranks",
            hint="shard by FSDP2 (torch.distributed.fsdp.fully_shard) instead",
        )
    members = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    owners = {
        n: m for n, m in models.items() if members & {id(parameter) for parameter in m.parameters()}
    }
    if not members and len(models) == 1:
        # All groups may be empty at first, because parameters may be added later.
        owners = dict(models)
    if not owners:
        raise ConfigError(
            f"`{name}` trains none of the modules passed",
            hint="also pass its model: the optimizer's state is stored by parameter names",
        )
    full_models = [
        m for m in owners.values() if members <= {id(parameter) for parameter in m.parameters()}
    ]
    if not full_models:
        owner: nn.Module = nn.ModuleDict({n: bare(m) for n, m in owners.items()})
        return Part(NamedOptimizer(owner, optimizer))
    if _is_flat(full_models[0]):
        from resilient.state_dict.fsdp1 import Fsdp1Optimizer

        return Part(Fsdp1Optimizer(full_models[0], optimizer))
    return Part(NamedOptimizer(bare(full_models[0]), optimizer))


def _is_engine(model: nn.Module) -> bool:
    return _is_a(model, "DeepSpeedEngine")


def _is_a(value: object, name: str) -> bool:
    """Return whether an object has a class of this name, without an import of the class."""
    return name in {cls.__name__ for cls in type(value).__mro__}


def _is_flat(model: nn.Module) -> bool:
    """Return whether FSDP1 has flattened parameters of the model."""
    if not dist.is_available() or not dist.is_initialized():
        return False
    from torch.distributed.fsdp import FullyShardedDataParallel

    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def _replica(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DDP wrapper of a model, if DDP keeps buffers equal."""
    inner: Any = model._modules.get("_orig_mod", model)  # noqa: SLF001 - asking dynamo would load it
    is_kept = isinstance(inner, DistributedDataParallel) and inner.broadcast_buffers
    return inner if is_kept else None


def _strategy(models: Mapping[str, nn.Module], ranks: int) -> str:
    for model in models.values():
        if _is_engine(model):
            from resilient.state_dict.deepspeed import stage_of

            return f"zero-{stage_of(model)}"
    if ranks == 1:
        return "single"
    for model in models.values():
        spread = any(
            type(parameter) not in (torch.Tensor, nn.Parameter) for parameter in model.parameters()
        )
        if spread or _is_flat(model):
            return "fsdp"
    return "ddp"


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as plain numbers; tensors of one element become their value.

    Raises:
        UnsavableState: A metric is not a number.
    """
    plain = {}
    for name, value in metrics.items():
        try:
            plain[name] = float(value.detach() if hasattr(value, "detach") else value)
        except (TypeError, ValueError, RuntimeError) as error:
            path = f"metrics/{name}"
            raise UnsavableState(
                f"`{path}` is not a number: it is a {type(value).__name__}",
                path=path,
                hint="pass one number for each name; for a tensor, its mean() or item()",
            ) from error
    return plain


_PLAIN = frozenset({type(None), bool, int, float, str})


def plain_value(value: Any) -> Any:
    """Return a logged value with NumPy numbers and one-element tensors as Python numbers.

    The conversion includes the contents of dicts, lists and tuples. All other values stay
    unchanged.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, dict):
        return {name: plain_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value.item() if _elements(value) == 1 else value


def plain_numbers(value: Any) -> Any:
    """Return dicts, lists and tuples with NumPy numbers and one-element tensors as numbers.

    All other values and the types of containers stay unchanged.
    """
    if type(value) is dict:
        return {name: plain_numbers(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(plain_numbers, value))
    return value if isinstance(value, dict | list | tuple) else plain_value(value)


def plain_log(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a log as plain values.

    Raises:
        UnsavableState: An entry is not a number, a text, or a dict or list of numbers and texts.
    """
    plain = {name: plain_value(value) for name, value in logs.items()}
    for name, value in plain.items():
        odd_value = _first_not_plain(value)
        if odd_value is not None:
            raise UnsavableState(
                f"cannot log `{name}`: {_described(odd_value)} is neither a number nor a text, and "
                "the log is saved with each checkpoint; older checkpoints are intact",
                path=f"log_history/{name}",
                hint=f"log one number for each name, as `{name}_0`, or the mean as `{name}`",
            )
    return plain


def _elements(value: Any) -> int:
    """Return the number of elements of an array, a tensor or a NumPy number, else 0."""
    if not callable(getattr(value, "item", None)):
        return 0
    count = getattr(value, "numel", None)
    size = count() if callable(count) else getattr(value, "size", 0)
    return size if isinstance(size, int) else 0


def _first_not_plain(value: Any) -> Any:
    """Return the first value inside that is not plain; None without one."""
    if isinstance(value, dict):
        items = [*value.values(), *(name for name in value if type(name) is not str)]
        return next(
            (odd_value for odd_value in map(_first_not_plain, items) if odd_value is not None),
            None,
        )
    if isinstance(value, list):
        return next(
            (odd_value for odd_value in map(_first_not_plain, value) if odd_value is not None), None
        )
    return None if type(value) in _PLAIN else value


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    kind = f"a value of the class `{type(value).__name__}`"
    return kind if shape is None else f"{kind} with the shape {tuple(shape)}"
