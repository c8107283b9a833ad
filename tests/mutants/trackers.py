"""Defects of what trackers are given."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MODELS = "tests/unit/train/trackers/test_models_uploaded.py"

MUTANTS = [
    Mutant(
        "models of a line of lives that was abandoned are uploaded",
        "resilient/train/hf_interop/saved_models.py",
        "for candidate in known.candidates if",
        "for candidate in (*known.candidates, *known.abandoned) if",
        f"{MODELS} -k abandoned",
    ),
    Mutant(
        "each model is uploaded again at each save",
        "resilient/train/trackers/reporting.py",
        "        self._uploaded = checkpoint.folder\n",
        "",
        f"{MODELS} -k given_once",
    ),
    Mutant(
        "a run ends without the upload of its last model",
        "resilient/train/trackers/reporting.py",
        'courier.upload_final(kwargs["shelf"], best=args.load_best_model_at_end)',
        "pass",
        f"{MODELS} -k given_once",
    ),
    Mutant(
        "the last model stands for the best",
        "resilient/train/hf_interop/saved_models.py",
        "if best and self.best.checkpoint is not None:",
        "if False:",
        f"{MODELS} -k the_best_is_final",
    ),
    Mutant(
        "models that no earlier life could send are sent by no later one",
        "resilient/train/trackers/reporting.py",
        'str(saved.get("model", began))',
        'str(saved.get("model") or began)',
        f"{MODELS} -k no_earlier_life",
    ),
    Mutant(
        "a tool that is new to the run is sent what was saved before it",
        "resilient/train/trackers/reporting.py",
        'str(saved.get("model", began))',
        'str(saved.get("model", ""))',
        f"{MODELS} -k no_earlier_life_had",
    ),
    Mutant(
        "what is being saved is sent before its turn",
        "resilient/train/trackers/reporting.py",
        "before is None or item.step < before",
        "True",
        f"{MODELS} -k slow",
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
        "resilient/train/search/runner.py",
        "return {**dict(zip(names, given, strict=False)), **named}",
        "return {**dict(zip(names[1:], given, strict=False)), **named}",
        "tests/unit/train/test_constructor.py -k a_trial_is_made",
    ),
]
