"""Each command that an answer on a damaged checkpoint names is one that helps."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from resilient.diff.verification import require_trainer_folder
from resilient.errors import ResilientError
from tests.damage.contradictions import GENERAL
from tests.damage.import_kinds import KINDS_OF_IMPORTS
from tests.damage.kinds import Inapplicable, Scene
from tests.damage.repairs import quiet
from tests.damage.samples import SAMPLES

GOLDEN = Path(__file__).parents[1] / "golden" / "transformers" / "gpt2_all" / "run"
KINDS = [*GENERAL, *KINDS_OF_IMPORTS]
LAYOUTS = [one for one in SAMPLES if not one.is_ours]
EVERY, OTHERS = 5, 25
"""One damage of so many is followed here: of the Trainer's layout, of each of the others."""
WRITES = "To write it: "
NOTHING = ("Nothing can be repaired", "nothing to repair", "No repair is possible")


def make(sample, folder, *, is_alone):
    """Write a checkpoint; that of the Trainer has a later one beside it, or is alone."""
    folder.mkdir(parents=True)
    if sample.name == "Trainer" and is_alone:
        return Path(shutil.copytree(GOLDEN / "checkpoint-8", folder / "checkpoint-8"))
    with quiet():
        return sample.make(folder)


def commands_of(call, path):
    """Return the commands that inspect, verify and repair name for a checkpoint."""
    found = {}
    for name in ("inspect", "verify"):
        outcome = call("ckpt", name, path, "--json")
        if not outcome.stdout:
            error = json.loads(outcome.stderr.splitlines()[-1])
            found[error["hint"]] = f"hint of {name}"
            continue
        told = json.loads(outcome.stdout)
        found |= {one["fix"]: f"fix of {name}" for one in told["problems"]}
        found[told["resumable"]["command"]] = f"next of {name}"
    outcome = call("ckpt", "repair", path)
    found |= dict.fromkeys(re.findall(f"(?:{WRITES}|hint: )(.*)", outcome.stdout), WRITES)
    found |= dict.fromkeys(re.findall("hint: (.*)", outcome.stderr), "hint of repair")
    return {command: source for command, source in found.items() if command.startswith("resil")}


def refusal_of_start(path):
    try:
        require_trainer_folder(path, strict=False)
    except ResilientError as error:
        return error.message
    return ""


def refusal_of(call, command, source, whole):
    """Return why a command does not help; empty if it does."""
    words = [str(whole) if word == "COPY" else word for word in shlex.split(command)[1:]]
    if words[0] == "train":
        # Inspect reads headers alone, so a start may still refuse what only its bytes show.
        reason = refusal_of_start(words[words.index("--resume") + 1])
        return "" if source == "next of inspect" else reason
    outcome = call(*words)
    if "error: " in outcome.stderr:
        return outcome.stderr
    if words[:2] == ["ckpt", "inspect"] and source.startswith("next") and outcome.status:
        return "it names a checkpoint that is not resumable"
    if words[:2] == ["ckpt", "repair"] and any(text in outcome.stdout for text in NOTHING):
        return outcome.stdout
    return ""


def follow(call, sample, kinds, tmp_path, *, is_alone):
    """Damage copies of a checkpoint, and return each command that does not help, and why."""
    whole = make(sample, tmp_path / "whole", is_alone=is_alone)
    wrong, count = [], 0
    for kind in kinds:
        folder = tmp_path / "copy"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole.parent, folder)
        scene = Scene(sample, folder / whole.name)
        try:
            with quiet():
                path = kind.spoil(scene) or scene.path
        except (Inapplicable, FileNotFoundError):
            continue
        if not path.exists():
            continue
        for command, source in commands_of(call, path).items():
            count += 1
            copy = whole.with_name(path.name)
            why = refusal_of(call, command, source, copy if copy.exists() else whole)
            wrong += [(sample.name, kind.name, source, command, why)] if why else []
    return wrong, count


@pytest.mark.parametrize("sample", LAYOUTS, ids=lambda one: one.name)
def test_command_named_for_a_damage_does_not_refuse(call, sample, tmp_path):
    every = EVERY if sample.name == "Trainer" else OTHERS
    at = LAYOUTS.index(sample)
    wrong, _ = follow(call, sample, KINDS[at % every :: every], tmp_path, is_alone=True)
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "siblings"])
@pytest.mark.parametrize("sample", LAYOUTS, ids=lambda one: one.name)
def test_each_named_command_for_each_damage_helps(call, sample, is_alone, tmp_path):
    if sample.name != "Trainer" and not is_alone:
        pytest.skip("only the Trainer's sample has a sibling")
    wrong, count = follow(call, sample, KINDS, tmp_path, is_alone=is_alone)
    assert count > 0
    assert not wrong, "\n".join(map(repr, wrong))
