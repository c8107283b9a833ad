"""How a run is parallel, from what it was told."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from resilient.errors import ConfigError
from resilient.strategies.ddp import DdpStrategy
from resilient.strategies.detour import detour_of
from resilient.strategies.meshes import PLAN, mesh_sizes, tensor_size, together_size
from resilient.strategies.pipeline.options import pipeline_size, read_pipeline
from resilient.strategies.recomputing import recompute
from resilient.strategies.single import SingleStrategy
from resilient.train.arguments.distribution import (
    compression_of,
    fsdp_options,
    recomputing,
    syncs_each_batch,
)
from resilient.train.arguments.reduction import is_canonical, micro_batches
from resilient.train.model.lowering import to_fp8
from resilient.train.optimizers.groups import parameter_groups

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import nn

    from resilient.strategies.strategy import Strategy
    from resilient.train.arguments import TrainingArguments


def strategy_for(
    args: TrainingArguments, device: torch.device, ranks: int, model: nn.Module
) -> Strategy:
    """Return how ``model`` is parallel: by DeepSpeed, or as soon as there is more than one rank.

    What is done to the layers of any model, however it is parallel, is done here.

    Raises:
        ConfigError: DeepSpeed's config and the arguments contradict each other.
    """
    how = recomputing(args)
    if how is not None:
        recompute(model, how, fsdp_options(args).layer_classes)
    if args.fp8:
        to_fp8(model, args.fp8_recipe)
    if args.parallelism == "deepspeed":
        return _deepspeed(args, device, ranks, model)
    if is_canonical(args):
        return _canonical(args, device, ranks)
    if together_size(args.parallelism_config) > 1:
        inside = pipeline_size(args.parallelism_config) > 1
        return (_pipeline if inside else _tensor_parallel)(args, device, ranks, model)
    if ranks == 1:
        _refuse_alone(args)
        return SingleStrategy()
    return (_fsdp if args.parallelism == "fsdp" else _ddp)(args, device, ranks, model)


def _ddp(
    args: TrainingArguments,
    device: torch.device,
    ranks: int,
    model: nn.Module,  # noqa: ARG001 - as of all the others
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
    # Only runs that ask for it pay for loading it.
    from resilient.strategies.canonical.exchange import WINDOW_BYTES
    from resilient.strategies.canonical.strategy import CanonicalStrategy

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
    """Raise if one rank alone would train in another precision than it was told."""
    if args.parallelism == "fsdp" and any(fsdp_options(args).dtypes):
        raise ConfigError(
            "`mixed_precision` in fsdp_config needs more than one rank: FSDP does not shard over "
            "one, and its precision would be ignored",
            hint="leave it out and write bf16=True",
        )


def _fsdp(args: TrainingArguments, device: torch.device, ranks: int, model: nn.Module) -> Strategy:
    sizes = mesh_sizes(args.parallelism_config, ranks, shards=True)
    options = fsdp_options(args)
    options = options if sizes.replicate == 1 else replace(options, shard_size=sizes.shard)
    # Only sharded training pays for loading torch's parts about it.
    if options.version == 1:
        from resilient.strategies.fsdp1 import Fsdp1Strategy

        if not options.use_orig_params:
            _refuse_mixed_decay(args, model)
        return Fsdp1Strategy(device, options)
    from resilient.strategies.fsdp import FsdpStrategy

    return FsdpStrategy(device, options)


def _refuse_mixed_decay(args: TrainingArguments, model: nn.Module) -> None:
    """Raise if one vector would hold parameters that decay and others that do not."""
    if detour_of(model) is not None:
        return
    decays = {group["weight_decay"] for group in parameter_groups(model, args.weight_decay)}
    if len(decays) > 1:
        raise ConfigError(
            "`use_orig_params`=False flattens weights and biases into one vector, of which only "
            f"the weights are to decay (`weight_decay`={args.weight_decay})",
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
    # Only pipelines pay for loading torch's part about them.
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
            f"`{type(model).__name__}` does not say how its layers are cut (`tp_plan`)",
            hint='name them: parallelism_config={"tp_plan": {"layers.*.up": "colwise", ...}}',
        )
    return plan  # type: ignore[no-any-return]  # as the user or the model says it


def _deepspeed(
    args: TrainingArguments, device: torch.device, ranks: int, model: nn.Module
) -> Strategy:
    from resilient.strategies.deepspeed import DeepSpeedStrategy
    from resilient.strategies.deepspeed_config import Told, complete, read_config

    values = {**args.to_dict(), "adam_betas": [args.adam_beta1, args.adam_beta2]}
    told = Told(values, ranks, hidden_size_of(model))
    return DeepSpeedStrategy(device, complete(read_config(args.deepspeed), told))


def hidden_size_of(model: nn.Module) -> int:
    """Return a model's width as its config says it, 0 if it does not."""
    config: Any = getattr(model, "config", None)
    for one in (config, getattr(config, "text_config", None)):
        size = getattr(one, "hidden_size", None) or max(getattr(one, "hidden_sizes", None) or [0])
        if size:
            return int(size)
    return 0
