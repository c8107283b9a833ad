"""The strategies that the tests train under, by a name each; loads nothing of torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

DIE_AFTER = 4
# Folder -> the kind that is killed there, and the one that goes on.
CARRIED = {"from-tp-to-ddp": ("tp_fsdp", "ddp"), "from-flat-to-ddp": ("flat", "ddp")}
CARRIED["from-ddp-to-flat"] = ("ddp", "flat_grad_op")
# Folder -> the kinds that train there in turn, each to a step of its own, from what is there.
MOVES = {
    "from-pipeline": [("pp_still", 2), ("one", 2), ("still", 4), ("pp_still", 6)],
    "from-one": [("one", 2), ("pp_still", 2), ("pp_ddp", 4), ("still", 6)],
}


@dataclass(frozen=True)
class Kind:
    """How a run is parallel.

    Attributes:
        arguments: what it is told.
        ranks: over how many.
        strategy: what its checkpoints say.
        tensor: how many ranks compute a layer together.
        shards: how many ranks hold the model together; 0: each holds all.
        is_exact: whether it trains what replicas of as many ranks train, but for rounding.
        is_reference: whether others are compared with it.
        like: which kind it trains as, but for rounding.
        width: of the model.
        dropout: of the model.
        rows: of the data.
        has_spare: whether a layer of the model is never used.
        version: of FSDP.
        has_buffer: whether training changes a buffer of the model.
        overflows: whether gradients overflow once, in one rank's shard.
        in_ci: whether it runs outside of `make matrix`.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2
    strategy: str = "ddp"
    shards: int = 0
    is_exact: bool = True
    in_ci: bool = False
    is_reference: bool = False
    width: int = 10
    tensor: int = 1
    has_spare: bool = False
    dropout: float = 0.2
    like: str = "ddp"
    rows: int = 96
    version: int = 2
    has_buffer: bool = False
    overflows: bool = False


def fsdp1(mode="full_shard auto_wrap", **told):
    return replace(fsdp(mode, version=1, **told), version=1)


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
POWER = {"start_powerSGD_iter": 2, "matrix_approximation_rank": 1, "min_compression_rate": 1.5}
FP8 = {"fp8": True, "per_device_train_batch_size": 16, "per_device_eval_batch_size": 16}
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
MIXED = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
RECOMPUTE = {
    "activation_checkpointing": True,
    "activation_checkpointing_kwargs": {"every_n_layers": 2},
}


# The last step of an epoch has a smaller micro-batch, or one micro-batch less.
UNEVEN = 22


def pipeline(schedule="1f1b", *, ranks=2, strategy="pp", like="", args=None, **config):
    """Return a kind of pipelines, whose dropout is off where it is compared with another kind."""
    more = args or {}
    mesh = {"pp_size": 2, "pp_schedule": schedule, **config}
    tensor = config.get("tp_size", 1)
    return Kind(
        {**more, "parallelism_config": mesh},
        ranks,
        strategy,
        is_exact=bool(like),
        tensor=tensor,
        dropout=0.0 if like else 0.2,
        like=like,
        rows=UNEVEN,
    )


EACH_BLOCK = {"pp_split_points": ["blocks.0", "blocks.1", "blocks.2"]}
SHARDS = {"fsdp": True, "fsdp_transformer_layer_cls_to_wrap": "Block"}
STILL = Kind(dropout=0.0, is_reference=True, is_exact=False, rows=UNEVEN)
PIPELINES = {
    "one": replace(STILL, ranks=1, strategy="single"),
    "still": STILL,
    "pp": pipeline(),
    "pp_still": replace(pipeline("gpipe", like="one"), is_reference=True),
    "pp_bf16": pipeline(args={"bf16": True, "activation_checkpointing": True}),
    "pp_bfs": pipeline("loopedbfs", like="one", **EACH_BLOCK),
    "pp_interleaved": pipeline("interleaved1f1b", like="one", **EACH_BLOCK),
    "pp_zero_bubble": pipeline("interleavedzerobubble", like="one", **EACH_BLOCK),
    "pp_ddp": pipeline(ranks=4, strategy="pp+ddp", like="still"),
    "pp_fsdp": pipeline(ranks=4, strategy="pp+fsdp", like="still", args=SHARDS),
    "tp_pp": pipeline(ranks=4, strategy="tp+pp", tp_size=2, tp_plan=PLAN),
    "tp_pp_ddp": pipeline(ranks=8, strategy="tp+pp+ddp", like="still", tp_size=2, tp_plan=PLAN),
    "tp_pp_fsdp": pipeline(
        ranks=8, strategy="tp+pp+fsdp", like="still", tp_size=2, tp_plan=PLAN, args=SHARDS
    ),
}
TP = Kind({"parallelism_config": {"tp_size": 2, "tp_plan": PLAN}}, strategy="tp", is_exact=False)
PIPELINES_IN_CI = ["one", "still", "pp", "pp_still", "pp_interleaved", "pp_ddp"]
KINDS = {
    **PIPELINES,
    "ddp": Kind(in_ci=True, is_reference=True),
    "recompute": Kind(RECOMPUTE, in_ci=True, is_reference=True),
    "reentrant": Kind(
        {**RECOMPUTE, "activation_checkpointing_kwargs": {"use_reentrant": True}},
    ),
    "told": Kind(
        {
            "ddp_backend": "gloo",
            "ddp_timeout": 77,
            "ddp_find_unused_parameters": True,
            "ddp_bucket_cap_mb": 0.002,
            "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
        },
        has_spare=True,
        is_exact=False,
        in_ci=True,
    ),
    "static_graph": Kind(
        {
            "ddp_static_graph": True,
            "ddp_broadcast_buffers": False,
            "gradient_accumulation_steps": 1,
        },
        is_exact=False,
    ),
    "ddp_comm_fp16": Kind({"ddp_comm_hook": "fp16"}, is_exact=False),
    "ddp_comm_bf16": Kind({"ddp_comm_hook": "bf16", "bf16": True}, is_exact=False),
    "power_sgd": Kind(
        {"ddp_comm_hook": "power_sgd", "ddp_comm_state_option": POWER}, is_exact=False, in_ci=True
    ),
    "power_sgd_bf16": Kind(
        {
            "ddp_comm_hook": "power_sgd",
            "ddp_comm_wrapper": "bf16",
            "ddp_comm_state_option": POWER,
        },
        is_exact=False,
    ),
    "power_sgd_cold": Kind(
        {"ddp_comm_hook": "power_sgd", "ddp_comm_state_option": {**POWER, "warm_start": False}},
        ranks=3,
        is_exact=False,
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
    "fsdp_fp8": replace(fsdp(args={**FP8, "bf16": True}, is_exact=False), width=16),
    "fsdp_bf16": fsdp(args={"bf16": True}, is_exact=False),
    "fsdp_fp16": replace(
        fsdp(args={"fp16": True, "activation_checkpointing": True}, is_exact=False, in_ci=True),
        overflows=True,
    ),
    "flat": fsdp1(in_ci=True, limit_all_gathers=False, backward_prefetch="backward_post"),
    "flat_grad_op": fsdp1(
        "shard_grad_op offload auto_wrap",
        forward_prefetch=True,
        backward_prefetch="no_prefetch",
        use_orig_params=False,
        in_ci=True,
        **BY_SIZE,
    ),
    "flat_hybrid": fsdp1("hybrid_shard auto_wrap", ranks=4, shard_size=2, in_ci=True),
    "flat_zero2": fsdp1(
        "hybrid_shard_zero2", ranks=4, shard_size=2, use_orig_params=False, is_exact=False
    ),
    "flat_mixed": replace(
        fsdp1(
            mixed_precision={**MIXED, "buffer_dtype": "bf16"},
            activation_checkpointing=True,
            is_exact=False,
            in_ci=True,
        ),
        has_buffer=True,
    ),
    "flat_bf16": fsdp1(args={"bf16": True}, is_exact=False),
    "flat_fp16": replace(fsdp1(args={"fp16": True}, is_exact=False, in_ci=True), overflows=True),
    "flat_fp8": replace(fsdp1(args={**FP8, "bf16": True}, is_exact=False), width=16),
    **{
        f"flat_{optim}": fsdp1(args={"optim": optim}, is_exact=False)
        for optim in ("sgd", "adagrad", "rmsprop", "lion")
    },
    "tp": TP,
    "tp_bf16": replace(TP, arguments={**TP.arguments, "bf16": True}),
    "tp_fp16": replace(TP, arguments={**TP.arguments, "fp16": True}, in_ci=True, overflows=True),
    "tp_ddp": Kind(
        {"parallelism_config": {"tp_size": 2, "tp_plan": PLAN}},
        ranks=4,
        strategy="tp+ddp",
        tensor=2,
    ),
    "tp_fsdp": Kind(
        {
            "parallelism": {
                "strategy": "fsdp",
                "tp_size": 2,
                "tp_plan": PLAN,
                "fsdp_transformer_layer_cls_to_wrap": "Block",
            },
        },
        ranks=4,
        strategy="tp+fsdp",
        tensor=2,
        in_ci=True,
    ),
    "tp_fsdp_fp16": Kind(
        {"parallelism_config": {"tp_size": 2, "tp_plan": PLAN}, **SHARDS, "fp16": True},
        ranks=4,
        strategy="tp+fsdp",
        tensor=2,
        is_exact=False,
        overflows=True,
    ),
    "auto": Kind({"parallelism": "auto"}),
    "ddp_fp8": Kind(FP8, is_exact=False, width=16),
    "ddp_half_eval": Kind({"bf16_full_eval": True}, is_exact=False, in_ci=True, is_reference=True),
    "ddp_bf16": Kind({"bf16": True}, is_exact=False),
    "ddp_fp16": Kind({"fp16": True}, is_exact=False),
}


def in_ci():
    """Return the kinds that run always."""
    return [kind for kind in KINDS if KINDS[kind].in_ci]


def worlds_of(kinds):
    """Return the worlds of some kinds: (folder, kind, the step after which all are killed, steps).

    A world that trains to the end is given no number of steps.
    """
    carried = [
        life
        for folder, (first, second) in CARRIED.items()
        if first in kinds and second in kinds
        for life in ((folder, first, DIE_AFTER), (folder, second, 0))
    ]
    moved = [(folder, kind, 0, steps) for folder, moves in MOVES.items() for kind, steps in moves]
    lives = (("unbroken", 0), ("killed", DIE_AFTER), ("killed", 0))
    worlds = [
        (f"{kind}-{end}", kind, die_after)
        for kind in kinds
        for end, die_after in (lives if is_killed(kind, kinds) else lives[:1])
    ] + carried
    return [(*one, 0) for one in worlds] + (moved if "pp_ddp" in kinds else [])


def is_killed(kind, kinds):
    """Say whether a kind is killed; what others are compared with is not, but among all."""
    return not KINDS[kind].is_reference or len(kinds) == len(KINDS)
