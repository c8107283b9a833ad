"""When and how a model is evaluated, and which one is the best."""

from __future__ import annotations

from dataclasses import dataclass

from resilient.train.arguments.fields.option import made_by, option


@dataclass
class EvaluationArguments:
    """Evaluation and the best model."""

    eval_strategy: str = option("no", "when to evaluate: no, steps, epoch")
    eval_steps: float | None = option(None, "steps between evaluations; None: logging_steps")
    eval_delay: float = option(0, "steps or epochs, as eval_strategy counts, without evaluation")
    eval_on_start: bool = option(default=False, help="evaluate before the first step")
    eval_accumulation_steps: int | None = option(
        None, "batches of predictions to keep on the device; None: all"
    )
    eval_do_concat_batches: bool = option(
        default=True, help="join predictions over batches; else give lists of batches"
    )
    eval_use_gather_object: bool = option(
        default=False, help="gather predictions as objects, for nested ones that are no tensors"
    )
    prediction_loss_only: bool = option(default=False, help="evaluate nothing but the loss")
    include_for_metrics: list[str] = made_by(list, "what else compute_metrics gets: inputs, loss")
    batch_eval_metrics: bool = option(
        default=False, help="call compute_metrics with each batch and `compute_result`"
    )

    load_best_model_at_end: bool = option(default=False, help="end with the best weights saved")
    metric_for_best_model: str | None = option(None, "metric that says which model is best")
    greater_is_better: bool | None = option(None, "None: unless the metric's name ends in loss")
