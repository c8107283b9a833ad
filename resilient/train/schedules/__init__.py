"""Learning-rate schedules by the field's names.

``shapes``: closed forms of the step; ``metric``: those that an evaluation feeds; ``create``: from
arguments to a scheduler, and from one length of the run to another.
"""

from __future__ import annotations

from resilient.train.schedules.create import SCHEDULES, carry_over, create_scheduler
from resilient.train.schedules.metric import (
    require_evaluations,
    step_after_evaluation,
    step_after_update,
)

__all__ = [
    "SCHEDULES",
    "carry_over",
    "create_scheduler",
    "require_evaluations",
    "step_after_evaluation",
    "step_after_update",
]
