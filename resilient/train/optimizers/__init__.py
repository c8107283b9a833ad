"""Optimizers by the names that ``optim`` accepts, and their parameter groups."""

from __future__ import annotations

from resilient.train.optimizers.builtin import decay_parameter_names, parameter_groups
from resilient.train.optimizers.factory import (
    MAKERS,
    create_optimizer,
    make_optimizer,
    optimizer_recipe,
)

__all__ = [
    "MAKERS",
    "create_optimizer",
    "decay_parameter_names",
    "make_optimizer",
    "optimizer_recipe",
    "parameter_groups",
]
