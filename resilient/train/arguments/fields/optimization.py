"""What optimises, how fast, and over how many micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from resilient.train.arguments.fields.option import option


@dataclass
class OptimizationArguments:
    """Optimizer, schedule, accumulation and the loss."""

    optim: str = option("adamw_torch_fused", "name of the optimizer")
    optim_args: dict[str, Any] | str | None = option(
        None, 'more for the optimizer: "k=v,k=v" or a dict'
    )
    optim_target_modules: list[str] | str | None = option(
        None, "names or patterns of the modules that GaLore and APOLLO project"
    )
    learning_rate: float = option(5e-5, "peak learning rate")
    weight_decay: float = option(0.0, "decay of weights; never of biases and norms")
    adam_beta1: float = option(0.9, "decay of AdamW's first moment")
    adam_beta2: float = option(0.999, "decay of AdamW's second moment")
    adam_epsilon: float = option(1e-8, "AdamW's epsilon")
    max_grad_norm: float = option(1.0, "norm to clip gradients to; 0 only measures it")

    lr_scheduler_type: str = option("linear", "name of the learning-rate schedule")
    lr_scheduler_kwargs: dict[str, Any] | str | None = option(
        None, "more for the schedule, as a dict or JSON: lr_end, power, num_cycles, ..."
    )
    warmup_steps: float = option(0, "steps of linear warm-up; below 1 a ratio of all steps")

    gradient_accumulation_steps: int = option(1, "micro-batches per optimizer step")
    average_tokens_across_devices: bool = option(
        default=True, help="the loss is the mean over the tokens of all ranks"
    )
    label_smoothing_factor: float = option(0.0, "share of the target spread over all classes")
    neftune_noise_alpha: float | None = option(
        None, "strength of the noise on embeddings in training (NEFTune); None: none"
    )
