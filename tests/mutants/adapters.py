"""Defects of the adapters to other trainers."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

POINTS = "tests/process/test_adapters.py -k every_checkpoint"

MUTANTS = [
    Mutant(
        "Transformers goes on with random state from before it skipped batches",
        "resilient/integrations/transformers.py",
        'after it has skipped batches."""\n        self._rng.restore()\n',
        'after it has skipped batches."""\n',
        POINTS,
    ),
    Mutant(
        "Transformers' best model is not known to who goes on from it",
        "resilient/integrations/transformers.py",
        'lambda: {"checkpoint": str(self._best or "")}',
        'lambda: {"checkpoint": ""}',
        POINTS,
    ),
    Mutant(
        "Transformers forgets what it had accumulated for its log",
        "resilient/integrations/transformers.py",
        "        self._gathered = state\n",
        "        self._gathered = None\n",
        POINTS,
    ),
    Mutant(
        "accelerate's epoch is drawn from random state of now",
        "resilient/integrations/accelerate.py",
        "            RandomState().load_state_dict(self._streams)\n",
        "",
        POINTS,
    ),
    Mutant(
        "Lightning trains again on what it has trained on",
        "resilient/integrations/lightning.py",
        "            next(fetcher)\n",
        "            pass\n",
        POINTS,
    ),
    Mutant(
        "Lightning saves an epoch's last batch before its validation",
        "resilient/integrations/lightning.py",
        "is_due = self._every and not is_last and ",
        "is_due = self._every and ",
        POINTS,
    ),
    Mutant(
        "the hooks of accelerate's load_state are not called",
        "resilient/integrations/hook_files.py",
        "                hook(self._models(), folder)\n",
        "                pass\n",
        "tests/process/test_accelerate_state.py -k hooks_are_called",
    ),
    Mutant(
        "an object that was prepared after the checkpointer is left out in silence",
        "resilient/integrations/accelerate.py",
        '        self._require_known("save()")\n',
        "",
        "tests/process/test_accelerate_state.py -k prepared_after",
    ),
    Mutant(
        "the order of a seedable sampler follows the seed of the new start",
        "resilient/integrations/accelerate.py",
        "self._sampler.initial_seed if seed is None else seed",
        "self._sampler.initial_seed",
        "tests/process/test_accelerate_state.py -k seedable",
    ),
    Mutant(
        "Lightning loads a damaged checkpoint that fit() names",
        "resilient/integrations/lightning.py",
        "        if self._judged is None or self._judged.refusal is None:\n",
        "        if True:\n",
        "tests/process/test_lightning_judge.py -k passed_over",
    ),
]
