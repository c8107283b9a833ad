"""Automatic choice of a parallelism strategy for a model and its machines, with reasons.

All functions are pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

# Fraction of a device's memory that is reserved for activations, gathered layers and libraries.
ACTIVATION_FRACTION = 0.3
# A pipeline idles at the ends of each step. With this number of micro-batches per stage, the idle
# time is small. A pipeline is chosen only if it sends at most 1/TRAFFIC_RATIO_MIN of the bytes
# that FSDP sends.
MICRO_BATCHES_PER_STAGE = 4
TRAFFIC_RATIO_MIN = 4
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Properties of a model that decide its parallelism.

    Attributes:
        numbers: Number of parameters.
        number_bytes: Bytes of a parameter with its gradient and its optimizer state.
        weight_bytes: Bytes of a parameter in a transfer between ranks.
        largest_layer_parameters: Number of parameters of the largest layer.
        layers: Number of consecutive layers; the model can be cut between two of them.
        activation_bytes: Bytes that one layer passes to the next in a micro-batch; 0 if unknown.
        has_tensor_parallel_plan: Whether the model has a tensor-parallel plan (``tp_plan``).
    """

    numbers: int
    number_bytes: float = 16.0
    weight_bytes: int = 4
    largest_layer_parameters: int = 0
    layers: int = 0
    activation_bytes: int = 0
    has_tensor_parallel_plan: bool = False

    @property
    def state_bytes(self) -> float:
        """Bytes of parameters, gradients and the optimizer's state."""
        return self.numbers * self.number_bytes


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Properties of the machines that decide the parallelism.

    Attributes:
        ranks: Number of training ranks.
        ranks_per_host: Number of ranks per host; ranks of one host communicate fast.
        device_bytes: Memory of a rank.
        micro_batches: Micro-batches of a step (``gradient_accumulation_steps``).
    """

    ranks: int
    ranks_per_host: int
    device_bytes: int
    micro_batches: int = 1

    @property
    def state_capacity_bytes(self) -> float:
        """Memory of a rank for the state."""
        return self.device_bytes * (1 - ACTIVATION_FRACTION)

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return max(1, self.ranks // self.ranks_per_host)


@dataclass(frozen=True, slots=True)
class ParallelismChoice:
    """Chosen parallelism, as arguments of the trainer.

    Attributes:
        arguments: ``parallelism`` and its related arguments.
        reasons: Reasons in the order of the decisions, one sentence each.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()


def choose(model: ModelFacts, machine: MachineFacts) -> ParallelismChoice:
    """Choose the least parallelism of ``model`` that memory allows.

    Replicas send gradients once per step. Shards also send weights, which is fast within a host and
    slow between hosts. Layers are cut over ranks only if a layer does not fit on a rank. A model is
    cut into stages only if stages send far fewer bytes than shards.

    Raises:
        ConfigError: The model does not fit on all ranks together. The message has the sufficient
            number of ranks.
    """
    need, room = model.state_bytes, machine.state_capacity_bytes
    text = (
        f"parameters, gradients and optimizer take {_gib(need)}, and a rank has {_gib(room)} for "
        f"them ({ACTIVATION_FRACTION:.0%} of {_gib(machine.device_bytes)} is left for activations)"
    )
    reasons = [text]
    tensor = _tensor_ranks(model, machine, reasons)
    if need > room * machine.ranks:
        raise ConfigError(
            f"the model does not fit: {text}, so it needs {-int(-need // room)} ranks, and there "
            f"are {machine.ranks}",
            hint="start more ranks, use an optimizer with less state, or offload it: "
            'TrainingArguments(fsdp="full_shard offload")',
        )
    if tensor > 1:
        return _replicate_or_shard_groups(model, machine, tensor, reasons)
    if need <= room:
        reasons.append("it fits on each rank: replicas send only gradients, once a step")
        return ParallelismChoice({"parallelism": "ddp"}, tuple(reasons))
    stages = _stages(model, machine, reasons)
    if stages > 1:
        mesh = {"pp_size": stages, "pp_schedule": "1f1b"}
        return ParallelismChoice({"parallelism": "ddp", "parallelism_config": mesh}, tuple(reasons))
    return ParallelismChoice(_shards(model, machine, reasons), tuple(reasons))


def _tensor_ranks(model: ModelFacts, machine: MachineFacts, reasons: list[str]) -> int:
    """Return the number of ranks per layer, so that a gathered layer fits in memory."""
    spare = machine.device_bytes - machine.state_capacity_bytes
    # The gathered weights and gradients of this layer and of the prefetched layer.
    layer = 4.0 * model.largest_layer_parameters * model.weight_bytes
    if layer <= spare or machine.ranks == 1:
        return 1
    sizes = [size for size in _divisors(machine.ranks_per_host) if layer / size <= spare]
    text = f"its largest layer takes {_gib(layer)} while it is computed, and {_gib(spare)} are left"
    if not sizes:
        raise ConfigError(f"the model does not fit: {text}, on all ranks of a host as well")
    if not model.has_tensor_parallel_plan:
        raise ConfigError(
            f"{text}: it must be cut over {sizes[0]} ranks, and the model does not define how",
            hint='name its layers: parallelism_config={"tp_plan": {"layers.*.up": "colwise", ...}}',
        )
    reasons.append(f"{text}: layers are cut over {sizes[0]} ranks of a host")
    return sizes[0]


def _replicate_or_shard_groups(
    model: ModelFacts, machine: MachineFacts, tensor: int, reasons: list[str]
) -> ParallelismChoice:
    """Return replicas or shards over groups that share each layer."""
    mesh: dict[str, Any] = {"tp_size": tensor}
    if model.state_bytes <= machine.state_capacity_bytes * tensor:
        reasons.append(f"{tensor} ranks together hold the whole model: groups of them are replicas")
        return ParallelismChoice({"parallelism": "ddp", "parallelism_config": mesh}, tuple(reasons))
    reasons.append("such groups hold a share of it each (FSDP)")
    return ParallelismChoice({"parallelism": "fsdp", "parallelism_config": mesh}, tuple(reasons))


def _stages(model: ModelFacts, machine: MachineFacts, reasons: list[str]) -> int:
    """Return the number of ranks of a host in a pipeline; 1 for no pipeline."""
    room, count = machine.state_capacity_bytes, machine.micro_batches
    # The first stage also has the embeddings and the last stage the head, so each stage is counted
    # 1.5 times.
    sizes = [
        size
        for size in _divisors(machine.ranks_per_host)
        if 1 < size <= model.layers
        and 1.5 * model.state_bytes / size <= room
        and count >= MICRO_BATCHES_PER_STAGE * size
    ]
    if not sizes or not model.activation_bytes:
        return 1
    sent_bytes = 2.0 * count * model.activation_bytes
    weights = _bytes_sent_by_shards(model, count)
    if sent_bytes * TRAFFIC_RATIO_MIN > weights:
        return 1
    reasons.append(
        f"in a step of {count} micro-batches shards would send {_gib(weights)} of weights and "
        f"gradients, and {sizes[0]} stages {_gib(sent_bytes)} of activations"
    )
    reasons.append(
        f"it is cut into {sizes[0]} stages in a host"
        + ("" if machine.ranks == sizes[0] else ", and such pipelines are replicas")
    )
    return sizes[0]


def _bytes_sent_by_shards(model: ModelFacts, micro_batches: int) -> float:
    """Return the bytes that FSDP sends in a step: weights for each pass, and gradients once."""
    return (2.0 * micro_batches + 1) * model.numbers * model.weight_bytes


def _shards(model: ModelFacts, machine: MachineFacts, reasons: list[str]) -> dict[str, Any]:
    is_several = machine.hosts > 1
    if is_several and model.state_bytes <= machine.state_capacity_bytes * machine.ranks_per_host:
        reasons.append(
            f"the {machine.ranks_per_host} ranks of a host hold the whole model: weights are sent "
            "inside hosts, gradients once a step between hosts"
        )
        config = {"shard_size": machine.ranks_per_host}
        return {"parallelism": "fsdp", "fsdp": "hybrid_shard", "fsdp_config": config}
    ranks_text = "all ranks of all hosts" if is_several else "all ranks"
    reasons.append(f"{ranks_text} hold a share of it each (FSDP)")
    return {"parallelism": "fsdp", "fsdp": "full_shard"}


def _divisors(number: int) -> Iterator[int]:
    return (divisor for divisor in range(1, number + 1) if number % divisor == 0)


def _gib(size: float) -> str:
    return f"{size / _GIB:.2f} GiB"
