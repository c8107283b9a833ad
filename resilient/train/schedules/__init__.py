"""Learning-rate schedules by the names that ``lr_scheduler_type`` accepts."""

from __future__ import annotations

from resilient.train.schedules.factory import (
    SCHEDULES,
    continue_schedule,
    create_scheduler,
    require_evaluations,
    require_own,
    step_after_evaluation,
    step_after_update,
)
from resilient.train.schedules.functions import (
    get_constant_schedule,
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_cosine_with_hard_restarts_schedule_with_warmup,
    get_inverse_sqrt_schedule,
    get_linear_schedule_with_warmup,
    get_polynomial_decay_schedule_with_warmup,
    get_scheduler,
)

__all__ = [
    "SCHEDULES",
    "continue_schedule",
    "create_scheduler",
    "get_constant_schedule",
    "get_constant_schedule_with_warmup",
    "get_cosine_schedule_with_warmup",
    "get_cosine_with_hard_restarts_schedule_with_warmup",
    "get_inverse_sqrt_schedule",
    "get_linear_schedule_with_warmup",
    "get_polynomial_decay_schedule_with_warmup",
    "get_scheduler",
    "require_evaluations",
    "require_own",
    "step_after_evaluation",
    "step_after_update",
]
