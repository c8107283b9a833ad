"""How a run is parallel, from what it was told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilient.strategies.ddp import DdpStrategy
from resilient.strategies.single import SingleStrategy
from resilient.train.arguments import layer_classes

if TYPE_CHECKING:
    import torch
    from torch import nn

    from resilient.strategies.strategy import Strategy
    from resilient.train.arguments import TrainingArguments


def strategy_for(
    args: TrainingArguments, device: torch.device, ranks: int, model: nn.Module
) -> Strategy:
    """Return how ``model`` is parallel: by DeepSpeed, or as soon as there is more than one rank.

    Raises:
        ConfigError: DeepSpeed's config and the arguments contradict each other.
    """
    if args.parallelism == "deepspeed":
        return _deepspeed(args, device, ranks, model)
    if ranks == 1:
        return SingleStrategy()
    if args.parallelism == "fsdp":
        # Only sharded training pays for loading torch's part about it.
        from resilient.strategies.fsdp import FsdpStrategy

        return FsdpStrategy(
            device,
            layer_classes(args),
            args.fsdp_min_num_params,
            args.fsdp_reshard_after_forward,
        )
    return DdpStrategy(device, bool(args.ddp_find_unused_parameters), args.ddp_bucket_cap_mb)


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
