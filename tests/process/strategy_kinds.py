"""The strategies that the tests train under, by a name each; loads nothing of torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

DIE_AFTER = 4


@dataclass(frozen=True)
class Kind:
    """How a run is parallel.

    Attributes:
        arguments: what it is told.
        ranks: over how many.
        strategy: what its checkpoints say.
        shards: how many ranks hold the model together; 0: each holds all.
        is_exact: whether it trains what replicas of as many ranks train, but for rounding.
        in_ci: whether it runs outside of `make matrix`.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2
    strategy: str = "ddp"
    shards: int = 0
    is_exact: bool = True
    in_ci: bool = False


def fsdp(
    mode="full_shard auto_wrap",
    *,
    ranks=2,
    shards=2,
    args=None,
    is_exact=True,
    in_ci=False,
    **config,
):
    config = {"transformer_layer_cls_to_wrap": ["Block"], **config}
    arguments = {"fsdp": mode, "fsdp_config": config, **(args or {})}
    return Kind(arguments, ranks, "fsdp", shards, is_exact, in_ci)


BY_SIZE = {"transformer_layer_cls_to_wrap": [], "min_num_params": 200}
MIXED = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
RECOMPUTE = {
    "activation_checkpointing": True,
    "activation_checkpointing_kwargs": {"every_n_layers": 2},
}
KINDS = {
    "ddp": Kind(in_ci=True),
    "recompute": Kind(RECOMPUTE, in_ci=True),
    "reentrant": Kind(
        {**RECOMPUTE, "activation_checkpointing_kwargs": {"use_reentrant": True}},
    ),
    "full_shard": fsdp(),
    "shard_grad_op": fsdp(
        "shard_grad_op offload auto_wrap",
        forward_prefetch="true",
        backward_prefetch="no_prefetch",
        in_ci=True,
        **BY_SIZE,
    ),
    "hybrid_shard": fsdp("hybrid_shard auto_wrap", ranks=4, shard_size=2, in_ci=True),
    "hybrid_zero2": fsdp("hybrid_shard_zero2 offload", ranks=4, shard_size=2),
    "mixed": fsdp(mixed_precision=MIXED, activation_checkpointing=True, is_exact=False, in_ci=True),
    "fsdp_bf16": fsdp(args={"bf16": True}, is_exact=False),
    "fsdp_fp16": fsdp(
        args={"fp16": True, "activation_checkpointing": True}, is_exact=False, in_ci=True
    ),
    "ddp_bf16": Kind({"bf16": True}, is_exact=False),
    "ddp_fp16": Kind({"fp16": True}, is_exact=False),
}


def in_ci():
    """Return the kinds that run always."""
    return [kind for kind in KINDS if KINDS[kind].in_ci]


def worlds_of(kinds):
    """Return the worlds of some kinds: (folder, kind, the step after which all are killed)."""
    return [
        (f"{kind}-{end}", kind, die_after)
        for kind in kinds
        for end, die_after in (("unbroken", 0), ("killed", DIE_AFTER), ("killed", 0))
    ]
