"""Defects of what scripts override, call and read of the trainer."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LOADERS = "tests/unit/train/test_own_loaders.py"

MUTANTS = [
    Mutant(
        "a train loader of the script's own is taken as it is",
        "resilient/train/assembly.py",
        "    loader = resumable_loader(hooks.args, made, sampler)\n",
        "    loader = made\n",
        LOADERS,
    ),
    Mutant(
        "a loader that is not shuffled is made again in a random order",
        "resilient/train/data/own_loaders.py",
        "        return Sequential()\n",
        "        return Sampling()\n",
        LOADERS,
    ),
]
