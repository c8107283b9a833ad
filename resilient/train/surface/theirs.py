"""Methods that scripts override in Transformers' Trainer and that nothing here would call."""

from __future__ import annotations

from resilient.errors import ConfigError

_EVALUATING = "override `prediction_step`, `evaluate` or `get_eval_dataloader`"
_SAVING = "what a checkpoint holds more is said by `trainer.register(name, thing)`"
NOT_CALLED = {
    "evaluation_loop": _EVALUATING,
    "prediction_loop": _EVALUATING,
    "_evaluate": _EVALUATING,
    "_save": _SAVING,
    "_save_checkpoint": _SAVING,
    "_save_optimizer_and_scheduler": _SAVING,
    "_load_optimizer_and_scheduler": _SAVING,
    "_load_from_checkpoint": _SAVING,
    "_load_rng_state": _SAVING,
    "_save_rng_state": _SAVING,
    "_rotate_checkpoints": "what stays is said by `save_total_limit` and `save_retention`",
    "_inner_training_loop": "override `training_step` or `compute_loss`, or use callbacks",
    "_maybe_log_save_evaluate": "callbacks say when to log, evaluate and save",
    "create_accelerator_and_postprocess": "arguments say how ranks train together",
}
"""Each with what does the same here."""


def require_called(kind: type) -> None:
    """Raise if a subclass of our trainer overrides what nothing calls, instead of ignoring it.

    Raises:
        ConfigError: names the method, and what to do instead.
    """
    found = next((name for name in NOT_CALLED if hasattr(kind, name)), None)
    if found is not None:
        raise ConfigError(
            f"`{kind.__name__}.{found}` would never be called: that method of Transformers' "
            "Trainer is not one of this",
            hint=NOT_CALLED[found],
        )
