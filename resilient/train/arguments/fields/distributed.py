"""How several ranks train one model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from resilient.train.arguments.fields.option import option


@dataclass
class DistributedArguments:
    """DDP, FSDP, DeepSpeed and meshes."""

    parallelism: str = option(
        "ddp",
        "what several ranks hold: ddp (replicas), fsdp (shards), deepspeed (ZeRO); auto: by size",
    )
    reduction: str = option(
        "native",
        "order in which gradients are added: native (the backend's, the fastest), canonical (one "
        "fixed order: the same bits at any world size)",
    )
    global_train_batch_size: int | None = option(
        None, "samples of a step, of all ranks together; needed by reduction canonical"
    )
    shard_optimizer_state: bool = option(
        default=False, help="each rank keeps a share of the optimizer's state (reduction canonical)"
    )
    threads_per_rank: int | None = option(
        None, "threads of torch on each rank; None: as they are, and 1 with reduction canonical"
    )
    on_arithmetic_mismatch: str = option(
        "stop", "hosts that compute other bits, with reduction canonical: stop, continue"
    )
    ddp_backend: str | None = option(None, "gloo or nccl; None: what the device needs")
    ddp_timeout: float = option(1800, "seconds that a collective may take")
    ddp_find_unused_parameters: bool | None = option(None, "see torch's DDP; None: False")
    ddp_bucket_cap_mb: float | None = option(None, "size of DDP's buckets in MB; None: torch's")
    ddp_broadcast_buffers: bool | None = option(None, "see torch's DDP; None: as we align them")
    ddp_static_graph: bool | None = option(None, "see torch's DDP; None: False")
    ddp_comm_hook: str = option(
        "no", "how DDP sends gradients: no (as they are), fp16, bf16, power_sgd"
    )
    ddp_comm_wrapper: str = option("no", "dtype in which PowerSGD sends: no, fp16, bf16")
    ddp_comm_state_option: dict[str, Any] | str | None = option(
        None, "options of PowerSGD: matrix_approximation_rank, start_powerSGD_iter, ..."
    )

    fsdp: bool | str | list[str] | None = option(
        None, "True, or full_shard, shard_grad_op, hybrid_shard with auto_wrap, offload"
    )
    fsdp_config: dict[str, Any] | str | None = option(None, "more for FSDP: a dict or a JSON file")
    fsdp_transformer_layer_cls_to_wrap: str = option("", "classes to gather one by one: A,B")
    fsdp_min_num_params: int = option(0, "parameters of a module to gather it by itself; 0: off")
    fsdp_reshard_after_forward: bool = option(
        default=True, help="free gathered parameters between forward and backward"
    )
    deepspeed: dict[str, Any] | str | None = option(
        None, "DeepSpeed's config, a dict or a JSON file; None with parallelism deepspeed: ZeRO 2"
    )
    accelerator_config: dict[str, Any] | str | None = option(
        None, "more for accelerate: a dict or a JSON file"
    )
    parallelism_config: Any = option(
        None, "the mesh: dp_replicate_size, dp_shard_size, tp_size, tp_plan, pp_size, pp_schedule"
    )
