"""What ``reduction`` says together with other arguments (pure)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError
from resilient.train.arguments.distribution import BY_ELEMENT, syncs_each_batch

if TYPE_CHECKING:
    from resilient.train.arguments.arguments import TrainingArguments

CANONICAL = "canonical"
# Arguments -> what they may be with canonical reduction, and why not otherwise.
_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "parallelism": (
        ("ddp",),
        "its ranks join gradients in an order of their own; write shard_optimizer_state=True",
    ),
    "parallelism_config": ((None,), "a mesh ties ranks to parts of a step"),
    "gradient_accumulation_steps": (
        (1,),
        "how many micro-batches a rank computes follows from global_train_batch_size",
    ),
    "ddp_comm_hook": (("no",), "compressed gradients depend on who sends them"),
    "ddp_static_graph": ((None, False), "there is no DDP whose graph could be static"),
    "ddp_broadcast_buffers": ((None, True), "no pass may change a buffer"),
    "auto_find_batch_size": (
        (False,),
        "the micro-batch is fixed for the run; find its size with one short native run",
    ),
    "average_tokens_across_devices": (
        (True,),
        "the tokens of one rank depend on how many ranks there are",
    ),
    "random_numbers": (("own",), "each micro-batch has random numbers of its own"),
    "torch_compile": (
        (False,),
        "what is compiled depends on the shapes that a rank has seen before, and so on its place",
    ),
}
# Arguments that ask for nothing without it.
_NEEDING = ("global_train_batch_size", "shard_optimizer_state")


def is_canonical(args: TrainingArguments) -> bool:
    """Say whether gradients are joined in one fixed order."""
    return args.reduction == CANONICAL


def micro_batches(args: TrainingArguments) -> int:
    """Return into how many micro-batches a step is cut with canonical reduction."""
    assert args.global_train_batch_size is not None, "it was checked"  # noqa: S101
    return args.global_train_batch_size // args.per_device_train_batch_size


def check_reduction(args: TrainingArguments) -> None:
    """Refuse what cannot go with canonical reduction, and what needs it.

    Raises:
        ConfigError: names the argument and why.
    """
    if not is_canonical(args):
        for name in _NEEDING:
            if getattr(args, name):
                raise ConfigError(
                    f"`{name}`={getattr(args, name)!r} is about reduction='canonical', and "
                    f"`reduction`={args.reduction!r}: write that, or leave it out"
                )
        return
    for name, (accepted, why) in _ONLY.items():
        value = getattr(args, name)
        if value not in accepted:
            raise _refused(name, value, why)
    if syncs_each_batch(args):
        raise _refused("sync_each_batch", "True", "gradients are joined once a step")
    _check_batch(args)
    _check_shards(args)


def _refused(name: str, value: Any, why: str) -> ConfigError:
    return ConfigError(f"`{name}`={value!r} cannot be combined with reduction='canonical': {why}")


def _check_batch(args: TrainingArguments) -> None:
    each, all_together = args.per_device_train_batch_size, args.global_train_batch_size
    if all_together is None:
        raise ConfigError(
            "`reduction`='canonical' needs `global_train_batch_size`: how many samples a step "
            "trains on, whatever the number of ranks",
            hint=f"write a multiple of per_device_train_batch_size={each}, the size of one "
            "micro-batch",
        )
    if all_together % each:
        raise ConfigError(
            f"`global_train_batch_size`={all_together} is no multiple of "
            f"`per_device_train_batch_size`={each}, which is the size of one micro-batch"
        )


def _check_shards(args: TrainingArguments) -> None:
    if not args.shard_optimizer_state:
        return
    if args.optim not in BY_ELEMENT:
        raise ConfigError(
            f"`optim`={args.optim!r} looks at whole tensors, and with `shard_optimizer_state` a "
            f"rank steps pieces of them: use one of {', '.join(BY_ELEMENT)}"
        )
    if args.fp16:
        raise ConfigError(
            "`fp16` cannot be combined with `shard_optimizer_state`: ranks would have to agree "
            "on an overflow that one of them sees; write bf16=True"
        )
