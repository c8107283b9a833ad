"""Optimizers by the field's names.

``groups``: what is decayed; ``options``: ``optim_args``; ``own``: torch's; ``packages``: those of
maintained packages; ``low_rank``: GaLore and APOLLO; ``muon``: Muon with AdamW beside it;
``create``: from arguments to an optimizer.
"""

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
