"""Defects of what trackers are given."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MODELS = "tests/unit/train/trackers/test_models_uploaded.py"

MUTANTS = [
    Mutant(
        "models of a line of lives that was abandoned are uploaded",
        "resilient/train/interop/shelf.py",
        "mine = [one for one in found if one.generation == self.generation]",
        "mine = list(found)",
        f"{MODELS} -k abandoned",
    ),
    Mutant(
        "each model is uploaded again at each save",
        "resilient/train/trackers/courier.py",
        "        self._uploaded = checkpoint.folder\n",
        "",
        f"{MODELS} -k given_once",
    ),
    Mutant(
        "a run ends without the upload of its last model",
        "resilient/train/trackers/report.py",
        'courier.upload(kwargs["shelf"], at_end=True',
        'courier.upload(kwargs["shelf"], at_end=False',
        f"{MODELS} -k given_once",
    ),
    Mutant(
        "the last model stands for the best",
        "resilient/train/interop/shelf.py",
        "if best and self.best.checkpoint is not None:",
        "if False:",
        f"{MODELS} -k the_best_is_final",
    ),
    Mutant(
        "half a line of an offline session of ClearML stays where it is",
        "resilient/train/trackers/clearml.py",
        "            opened.truncate(len(whole))\n",
        "            pass\n",
        "tests/unit/train/trackers/test_other_tools.py -k session_of_clearml",
    ),
    Mutant(
        "the arguments of a constructor by position are those of another",
        "resilient/train/surface/searching.py",
        "return {**dict(zip(names, given, strict=False)), **named}",
        "return {**dict(zip(names[1:], given, strict=False)), **named}",
        "tests/unit/train/test_constructor.py -k a_trial_is_made",
    ),
]
