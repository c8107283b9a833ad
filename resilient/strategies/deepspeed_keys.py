"""The keys of DeepSpeed's config: what DeepSpeed reads, and what it would pass over (pure).

DeepSpeed says nothing of a key at the top that it does not know, so a misspelt one trains without
what it asks for. One that is near a known name is refused here; any other is left to whoever reads
it. Inside ``zero_optimization`` DeepSpeed knows every key, and so do we.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# What DeepSpeed 0.19 looks for at the top; some of it only to refuse it.
TOP = frozenset(
    {
        *("activation_checkpointing", "aio", "amp", "autotuning", "bf16", "bfloat16"),
        *("checkpoint", "comet", "comms_logger", "communication_data_type", "compile"),
        *("compression_training", "csv_monitor", "curriculum_learning", "data_efficiency"),
        *("data_types", "dataloader_drop_last", "datastates_ckpt", "disable_allgather"),
        *("disable_python_gc", "dump_state", "eigenvalue", "elasticity", "expert_parallel"),
        *("flops_profiler", "fp16", "gradient_accumulation_steps", "gradient_allreduce_op"),
        *("gradient_clipping", "gradient_predivide_factor", "graph_harvesting", "hybrid_engine"),
        *("inference", "log_level", "managed_gradient_accumulation", "memory_breakdown"),
        *("nebula", "optimizer", "pipeline", "prescale_gradients", "progressive_layer_drop"),
        *("quantize_training", "scheduler", "seq_parallel_communication_data_type"),
        *("sequence_parallel_size", "sparse_attention", "sparse_gradients", "steps_per_print"),
        *("tensor_parallel", "tensorboard", "timers", "torch_autocast", "train_batch_size"),
        *("train_micro_batch_size_per_gpu", "use_data_before_expert_parallelism"),
        *("vocabulary_size", "wall_clock_breakdown", "wandb", "weight_quantization"),
        *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_optimization"),
    }
)
# Keys with two names: alone, and with the stage before it.
_OF_STAGE_3 = (
    *("allgather_sequential", "gather_16bit_weights_on_model_save", "max_live_parameters"),
    *("max_reuse_distance", "model_persistence_threshold", "module_granularity_threshold"),
    *("param_persistence_threshold", "prefetch_bucket_size", "use_all_reduce_for_fetch_params"),
)
ZERO = frozenset(
    {
        *_OF_STAGE_3,
        *(f"stage3_{name}" for name in _OF_STAGE_3),
        *("allgather_bucket_size", "allgather_partitions", "compute_grad_norm"),
        *("contiguous_gradients", "cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"),
        *("elastic_checkpoint", "enable_sanity_checks", "ignore_unused_parameters", "leaf_module"),
        *("legacy_stage1", "load_from_fp32_weights", "log_trace_cache_warnings"),
        *("memory_efficient_linear", "mics_hierarchical_params_gather", "mics_shard_size"),
        *("offload_optimizer", "offload_param", "overlap_comm", "override_module_apply"),
        *("parameter_alignment", "pipeline_loading_checkpoint", "reduce_bucket_size"),
        *("reduce_scatter", "round_robin_gradients", "save_muon_momentum_buffer_in_memory"),
        *("stage", "stage3_gather_fp16_weights_on_model_save", "sub_group_size"),
        *("use_multi_rank_bucket_allreduce", "zenflow", "zero_hpz_partition_size"),
        *("zero_quantized_gradients", "zero_quantized_nontrainable_weights"),
        *("zero_quantized_weights", "zeropp_loco_param"),
    }
)
# A key of a tool of one's own is no misspelling; `gradient_cliping` is 0.97 alike.
_ALIKE = 0.8


def misspelt(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the keys of a config, at its top and in ``zero_optimization``."""
    for name in config:
        near = get_close_matches(str(name), TOP, n=1, cutoff=_ALIKE)
        if name not in TOP and near:
            yield f"{name} is no key of it; did you mean `{near[0]}`?"
    zero = config.get("zero_optimization")
    for name in zero if isinstance(zero, dict) else ():
        if name not in ZERO:
            near = get_close_matches(str(name), ZERO, n=1)
            hint = f"; did you mean `{near[0]}`?" if near else ""
            yield f"zero_optimization.{name} is no key of it{hint}"
