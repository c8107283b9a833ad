"""Choice of the parallel strategy from the arguments.

With ``parallelism="auto"``, the size of the model and the machines determine the strategy. An event
reports the reasons.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from resilient.environment import read_integer
from resilient.errors import ConfigError
from resilient.events import Event
from resilient.strategies.activation_checkpointing import layers_of, recompute
from resilient.strategies.auto import MachineFacts, ModelFacts, choose
from resilient.strategies.base import SingleStrategy
from resilient.strategies.ddp import DdpStrategy
from resilient.strategies.module_wrapper import find_redirect
from resilient.strategies.parallelism_options import (
    PLAN,
    mesh_sizes,
    model_parallel_size,
    pipeline_size,
    read_pipeline,
    tensor_size,
)
from resilient.train.arguments.derived import (
    AUTO,
    compression_of,
    fsdp_options,
    is_canonical,
    layer_classes,
    micro_batches,
    recomputing,
    syncs_each_batch,
)
from resilient.train.arguments.validation import check
from resilient.train.model.precision import to_fp8
from resilient.train.optimizers.builtin import parameter_groups

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from resilient.strategies.base import Strategy
    from resilient.train.arguments import TrainingArguments
    from resilient.train.session import Session


def strategy_for(
    args: TrainingArguments, device: torch.device, ranks: int, model: nn.Module
) -> Strategy:
    """Return the strategy for ``model``, from the arguments and the number of ranks.

    The function also makes those changes to the layers that every strategy needs.

    Raises:
        ConfigError: DeepSpeed's config and the arguments contradict each other.
    """
    recompute_options = recomputing(args)
    if recompute_options is not None:
        recompute(model, recompute_options, fsdp_options(args).layer_classes)
    if args.fp8:
        to_fp8(model, args.fp8_recipe)
    if args.parallelism == "deepspeed":
        return _deepspeed(args, device, ranks, model)
    if is_canonical(args):
        return _canonical(args, device, ranks)
    if model_parallel_size(args.parallelism_config) > 1:
        has_pipeline = pipeline_size(args.parallelism_config) > 1
        return (_pipeline if has_pipeline else _tensor_parallel)(args, device, ranks, model)
    if ranks == 1:
        _refuse_alone(args)
        return SingleStrategy()
    return (_fsdp if args.parallelism == "fsdp" else _ddp)(args, device, ranks, model)


def _ddp(
    args: TrainingArguments,
    device: torch.device,
    ranks: int,
    model: nn.Module,  # noqa: ARG001 - all factories have one signature
) -> Strategy:
    mesh_sizes(args.parallelism_config, ranks, shards=False)
    return DdpStrategy(
        device,
        bool(args.ddp_find_unused_parameters),
        args.ddp_bucket_cap_mb,
        args.ddp_broadcast_buffers is not False,
        bool(args.ddp_static_graph),
        syncs_each_batch(args),
        compression_of(args),
    )


def _canonical(args: TrainingArguments, device: torch.device, ranks: int) -> Strategy:
    # Import here, because only runs that use the module should pay for the import.
    from resilient.strategies.canonical.strategy import CanonicalStrategy
    from resilient.strategies.canonical.tree_reduce import WINDOW_BYTES

    cap = args.ddp_bucket_cap_mb
    return CanonicalStrategy(
        device,
        dist.get_rank() if ranks > 1 else 0,
        ranks,
        micro_batches(args),
        args.shard_optimizer_state,
        WINDOW_BYTES if cap is None else max(1, int(cap * (1 << 20))),
    )


def _refuse_alone(args: TrainingArguments) -> None:
    """Raise if a single rank would train in another precision than requested."""
    if args.parallelism == "fsdp" and any(fsdp_options(args).dtypes):
        raise ConfigError(
            "`mixed_precision` in fsdp_config needs more than one rank: FSDP does not shard over "
            "one rank, and would ignore its precision",
            hint="omit it and write bf16=True",
        )


def _fsdp(args: TrainingArguments, device: torch.device, ranks: int, model: nn.Module) -> Strategy:
    sizes = mesh_sizes(args.parallelism_config, ranks, shards=True)
    options = fsdp_options(args)
    options = options if sizes.replicate == 1 else replace(options, shard_size=sizes.shard)
    # Import here, because only sharded training should pay for the import of FSDP.
    if options.version == 1:
        from resilient.strategies.fsdp1 import Fsdp1Strategy

        if not options.use_orig_params:
            _refuse_mixed_decay(args, model)
        return Fsdp1Strategy(device, options)
    from resilient.strategies.fsdp import FsdpStrategy

    return FsdpStrategy(device, options)


def _refuse_mixed_decay(args: TrainingArguments, model: nn.Module) -> None:
    """Raise if a flat vector would contain parameters with and without weight decay."""
    if find_redirect(model) is not None:
        return
    decays = {group["weight_decay"] for group in parameter_groups(model, args.weight_decay)}
    if len(decays) > 1:
        raise ConfigError(
            "`use_orig_params`=False flattens weights and biases into one vector, but only the "
            f"weights have weight decay (`weight_decay`={args.weight_decay})",
            hint="write use_orig_params=True in fsdp_config, or weight_decay=0",
        )


def _tensor_parallel(
    args: TrainingArguments, device: torch.device, ranks: int, model: nn.Module
) -> Strategy:
    from resilient.strategies.tensor_parallel import TensorParallelStrategy

    shards = args.parallelism == "fsdp"
    sizes = mesh_sizes(args.parallelism_config, ranks, shards=shards)
    plan = _tensor_plan(args, model)
    return TensorParallelStrategy(device, sizes, plan, fsdp_options(args) if shards else None)


def _pipeline(
    args: TrainingArguments, device: torch.device, ranks: int, model: nn.Module
) -> Strategy:
    # Import here, because only pipelines should pay for the import of torch's module.
    from resilient.strategies.pipeline.strategy import PipelineStrategy

    shards = args.parallelism == "fsdp"
    options = fsdp_options(args)
    return PipelineStrategy(
        device,
        mesh_sizes(args.parallelism_config, ranks, shards=shards),
        read_pipeline(args.parallelism_config),
        options.layer_classes,
        _tensor_plan(args, model) if tensor_size(args.parallelism_config) > 1 else None,
        options if shards else None,
    )


def _tensor_plan(args: TrainingArguments, model: nn.Module) -> Mapping[str, str]:
    plan: Any = args.parallelism_config.get(PLAN)
    if plan in (None, "auto"):
        plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not plan:
        raise ConfigError(
            f"`{type(model).__name__}` does not define how its layers are cut (`tp_plan`)",
            hint='name them: parallelism_config={"tp_plan": {"layers.*.up": "colwise", ...}}',
        )
    return plan  # type: ignore[no-any-return]  # as the user or the model says it


def _deepspeed(
    args: TrainingArguments, device: torch.device, ranks: int, model: nn.Module
) -> Strategy:
    from resilient.strategies.deepspeed import DeepSpeedStrategy
    from resilient.strategies.deepspeed_config import DeepSpeedInputs, complete, read_config

    values = {**args.to_dict(), "adam_betas": [args.adam_beta1, args.adam_beta2]}
    inputs = DeepSpeedInputs(values, ranks, hidden_size_of(model))
    return DeepSpeedStrategy(device, complete(read_config(args.deepspeed), inputs))


def hidden_size_of(model: nn.Module) -> int:
    """Return a model's hidden size from its config; 0 if unknown."""
    config: Any = getattr(model, "config", None)
    for candidate in (config, getattr(config, "text_config", None)):
        size = getattr(candidate, "hidden_size", None) or max(
            getattr(candidate, "hidden_sizes", None) or [0]
        )
        if size:
            return int(size)
    return 0


# Bytes of optimizer state per parameter, by a substring of the optimizer's name.
_KEPT = (
    ("4bit", 1.0),
    ("8bit", 2.0),
    ("adafactor", 0.1),
    ("galore", 2.0),
    ("apollo", 2.0),
    ("lion", 4.0),
    ("adagrad", 4.0),
    ("rmsprop", 4.0),
    ("muon", 4.0),
    ("schedule_free_sgd", 4.0),
    ("sgd", 4.0),
)
_TWO_MOMENTS = 8.0


@dataclass(frozen=True, slots=True)
class ParallelismChosen(Event):
    """A parallelism was chosen from the model's size and the ranks' memory."""

    arguments: Mapping[str, object]
    reasons: tuple[str, ...]

    def message(self) -> str:
        """Format the choice and its reasons, one per line."""
        text = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return f"parallelism auto: {text}" + "".join(f"\n  {reason}" for reason in self.reasons)


def choose_parallelism(args: TrainingArguments, session: Session, model: nn.Module) -> None:
    """Replace ``parallelism="auto"`` by the chosen arguments. Collective.

    Raises:
        ConfigError: The model does not fit on this number of ranks.
    """
    if args.parallelism != AUTO:
        return
    choice = choose(model_facts(args, model), machine_facts(args, session))
    for name, value in choice.arguments.items():
        setattr(args, name, value)
    check(args)
    if session.world.is_coordinator:
        session.emit(ParallelismChosen(choice.arguments, choice.reasons))


def model_facts(args: TrainingArguments, model: nn.Module) -> ModelFacts:
    """Return the properties of the model and its training that determine the parallelism."""
    parameters = list(model.parameters())
    trained_parameters = [parameter for parameter in parameters if parameter.requires_grad]
    numbers = sum(parameter.numel() for parameter in parameters)
    moment_bytes = next((size for word, size in _KEPT if word in args.optim), _TWO_MOMENTS)
    state = sum(parameter.nbytes for parameter in parameters)
    state += sum(
        parameter.nbytes + int(moment_bytes * parameter.numel()) for parameter in trained_parameters
    )
    layers = layers_of(model, layer_classes(args))
    return ModelFacts(
        numbers,
        state / max(1, numbers),
        max((parameter.element_size() for parameter in parameters), default=4),
        max((sum(p.numel() for p in layer.parameters()) for layer in layers), default=numbers),
        len(layers),
        _between_bytes(args, model),
        bool(getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)),
    )


def _between_bytes(args: TrainingArguments, model: nn.Module) -> int:
    """Return the bytes between layers for a micro-batch of the longest samples; 0: unknown."""
    config = getattr(model, "config", None)
    longest = int(getattr(config, "max_position_embeddings", 0) or 0)
    number_bytes = 2 if args.bf16 or args.fp16 else 4
    return hidden_size_of(model) * longest * args.per_device_train_batch_size * number_bytes


def machine_facts(args: TrainingArguments, session: Session) -> MachineFacts:
    """Return the properties of the ranks; the smallest memory of a rank counts. Collective."""
    ranks = session.world.size
    ranks_per_host = min(ranks, read_integer(os.environ, "LOCAL_WORLD_SIZE", 0, least=0) or ranks)
    if ranks % ranks_per_host:
        ranks_per_host = ranks  # If the hosts differ, no layout fits all of them.
    size = torch.tensor(_memory_bytes(session.device, ranks_per_host), device=session.device)
    if ranks > 1:
        dist.all_reduce(size, dist.ReduceOp.MIN)
    return MachineFacts(ranks, ranks_per_host, int(size), args.gradient_accumulation_steps)


def _memory_bytes(device: torch.device, local_ranks: int) -> int:
    """Return a rank's memory: its accelerator's, or its share of the host's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    # Use total memory, not free memory, because every attempt must make the same choice.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // local_ranks
