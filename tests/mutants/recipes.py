"""Defects of optimizers and schedules that a resume must not have."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MATRIX = "tests/unit/train/test_matrix.py"

MUTANTS = [
    Mutant(
        "a projector in an optimizer's state is made anew at a resume",
        "resilient/state/objects.py",
        '        vars(made).update(value["fields"])\n',
        '        made.__init__(value["fields"]["rank"], update_proj_gap=3)\n',
        f"{MATRIX} -k galore_adamw",
    ),
    Mutant(
        "the two halves of Muon with AdamW keep their own state at a resume",
        "resilient/train/optimizers/muon.py",
        "        super().load_state_dict(state_dict)\n        self._share()\n",
        "        super().load_state_dict(state_dict)\n",
        f"{MATRIX} -k muon-",
    ),
    Mutant(
        "a schedule that follows a metric hears of no evaluation",
        "resilient/train/schedules/metric.py",
        "        scheduler.step(metric_of(args, metrics))\n",
        "        pass\n",
        f"{MATRIX} -k moved_by_the_metric",
    ),
]
