"""The schedule that DeepSpeed's config names, stepped by our loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LambdaLR

from resilient.errors import ConfigError
from resilient.strategies.deepspeed_config import read_config
from resilient.strategies.deepspeed_warmup import contradictions, read_warmup
from resilient.train.state import absolute_steps

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from resilient.train.arguments import TrainingArguments


class RateLR(LambdaLR):
    """A LambdaLR whose functions return rates, not factors on the first rates.

    Its state is that of a LambdaLR: the step. A run that goes on without DeepSpeed takes it over.
    """

    def get_lr(self) -> list[Any]:
        """Return the rate of each group."""
        return [rate(self.last_epoch) for rate in self.lr_lambdas]


def scheduler_block(args: TrainingArguments) -> dict[str, Any] | None:
    """Return the ``scheduler`` block of the run's config of DeepSpeed, if it has one.

    Raises:
        ConfigError: the config cannot be read.
    """
    if args.parallelism != "deepspeed":
        return None
    block: dict[str, Any] | None = read_config(args.deepspeed).get("scheduler")
    return block


def warmup_by_deepspeed(
    args: TrainingArguments, block: dict[str, Any], optimizer: Optimizer, total: int
) -> RateLR:
    """Return the schedule of a block over ``total`` steps.

    Raises:
        ConfigError: the block is not understood, or contradicts the arguments.
    """
    if wrong := list(contradictions(block, args.to_dict())):
        raise ConfigError(
            f"the config of DeepSpeed and the arguments of the run differ: {'; '.join(wrong)}"
        )
    warmup = absolute_steps(args.warmup_steps, total)
    shape = read_warmup(block, args.learning_rate, warmup, total)

    # Plain functions: LambdaLR then keeps them out of its state, which so needs no pickle.
    def of_group(base: float) -> Any:
        return lambda step: shape.rate(step, base)

    bases = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
    return RateLR(optimizer, [of_group(base) for base in bases])


def require_own(args: TrainingArguments, scheduler: object) -> None:
    """Raise if the config names a schedule and another one was given or made.

    Raises:
        ConfigError: says so.
    """
    if not isinstance(scheduler, RateLR) and (block := scheduler_block(args)) is not None:
        raise ConfigError(
            f"the config of DeepSpeed names the schedule {block.get('type')!r}, and the trainer "
            f"was given `{type(scheduler).__name__}`: leave one of them out"
        )
