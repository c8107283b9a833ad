"""The doors by which a damaged checkpoint comes into a run, and what each of them answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from resilient.errors import EXIT_CODES, ResilientError
from tests.damage import own
from tests.damage.our_trainer import HERE, resumed
from tests.damage.repairs import quiet, same
from tests.damage.samples import Loaded
from tests.damage.sharded import FSDP, SHARDS, ZERO2, ZERO3

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.damage.samples import Sample

LATER = "Trainer, a later step"
KINDS = {
    "Trainer": "8",
    LATER: "12",
    SHARDS: "12",
    **dict.fromkeys((FSDP, ZERO2, ZERO3), "sharded"),
}
"""Samples that our Trainer takes over, and the trainer that does."""
RESUMES, LOSES, REFUSES, RAISES = "resumes", "resumes with a loss", "refuses", "raises"
REPORTS = ("HFCheckpointImported", "ImportLossReported", "ImportOddityReported")
DOCUMENTED = {one.number for one in EXIT_CODES}
RESILIENT = Path(sys.executable).with_name("resilient")


@dataclass(frozen=True)
class Answer:
    """What a door answers.

    Attributes:
        word: :data:`RESUMES`, :data:`LOSES`, :data:`REFUSES`, or what went wrong.
        code: the exit code.
        why: the losses that were told, or the refusal.
        found: the weights before and after a step, if training went on.
        odd: the contradictions that were told, of which no loss is known.
    """

    word: str
    code: int
    why: str = ""
    found: Loaded | None = None
    odd: str = ""


def by_trainer(sample: Sample, path: Path) -> Answer:
    """Resume with ``train(resume_from_checkpoint=PATH)``."""
    if sample.is_ours:
        return _of_ours(path)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        try:
            with quiet():
                found = Loaded(*resumed(KINDS.get(sample.name, "8"), out, str(path)))
        except ResilientError as error:
            return Answer(REFUSES, error.exit_code, error.message)
        except Exception as error:  # noqa: BLE001 - no error of ours: a fault of the door
            return Answer(RAISES, 1, repr(error))
        return _of_run(out, found, 0)


def by_launcher(sample: Sample, path: Path) -> Answer:
    """Resume with ``resilient train --resume PATH``, as a user starts it."""
    with tempfile.TemporaryDirectory() as folder:
        out, answer = Path(folder) / "out", Path(folder) / "answer.pt"
        script = [str(HERE / "our_trainer.py"), KINDS.get(sample.name, "8"), str(out), str(answer)]
        ended = subprocess.run(
            [str(RESILIENT), "train", "--resume", str(path), *script],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
            cwd=folder,
        )
        if ended.returncode:
            return Answer(REFUSES, ended.returncode, ended.stderr[-2000:])
        found = Loaded(*torch.load(answer, weights_only=False)) if answer.exists() else None
        return _of_run(out, found, 0)


def _of_ours(path: Path) -> Answer:
    try:
        with quiet():
            return Answer(RESUMES, 0, "", Loaded(*own.resume(path)))
    except ResilientError as error:
        return Answer(REFUSES, error.exit_code, error.message)
    except Exception as error:  # noqa: BLE001 - no error of ours: a fault of the door
        return Answer(RAISES, 1, repr(error))


def _of_run(out: Path, found: Loaded | None, code: int) -> Answer:
    lost, odd = told_by(out, "lost"), told_by(out, "odd")
    return Answer(LOSES if lost else RESUMES, code, "; ".join(lost), found, "; ".join(odd))


def told_by(out: Path, name: str) -> list[str]:
    """Return the values of a field in the events by which a run reports its import."""
    records = [
        json.loads(line)
        for one in sorted(out.rglob("events/*.jsonl"))
        for line in one.read_text().splitlines()
    ]
    return [str(each) for one in records if one["event"] in REPORTS for each in one.get(name, ())]


def disagreements(
    verdict: str, answers: Sequence[Answer], whole: Loaded | None, older: Loaded | None = None
) -> list[str]:
    """Return where the doors contradict each other, or go silently wrong.

    Args:
        verdict: of the inspector: ``yes``, ``partly``, ``no`` or ``unknown``.
        answers: of the doors that train.
        whole: what training has of the undamaged checkpoint, None where no Trainer takes it.
        older: of a repository of ours, the same of the older checkpoint in it, from which a run
            continues if the newest is damaged; None of any other layout.
    """
    found = [fault for one in answers if (fault := _fault(verdict, one, whole, older))]
    if len({(one.word, one.code) for one in answers}) > 1:
        found.append(f"the doors differ: {[(one.word, one.code) for one in answers]}")
    return found


def _fault(verdict: str, one: Answer, whole: Loaded | None, older: Loaded | None) -> str:
    """Return why one door's answer is wrong, empty if it is right."""
    if one.word == RAISES:
        return f"raises {one.why}"
    if one.word == REFUSES:
        return _fault_of_refusal(verdict, one, is_taken=whole is not None)
    if older is not None:
        # Parity makes a damaged newest one whole as it is read; without, the older one is taken.
        allowed = (whole,) if verdict == "yes" else (whole, older)
        is_allowed = any(same(one.found, each) for each in allowed)
        return "" if is_allowed else "resumes with other numbers"
    return _fault_of_resume(verdict, one, whole)


def _fault_of_refusal(verdict: str, one: Answer, *, is_taken: bool) -> str:
    if one.code not in DOCUMENTED or one.code == 0:
        return f"refuses with the undocumented code {one.code}: {one.why}"
    if verdict == "yes" and is_taken:
        return f"refuses what the verdict calls whole: {one.why}"
    return ""


def _fault_of_resume(verdict: str, one: Answer, whole: Loaded | None) -> str:
    if verdict in ("no", "unknown"):
        return "resumes what the verdict refuses"
    if one.word == RESUMES and not one.odd and not same(one.found, whole):
        return "resumes with other numbers and tells neither a loss nor a contradiction"
    if (one.word == LOSES) != (verdict == "partly"):
        return f"{one.word} ({one.why}), and the verdict is {verdict}"
    return ""
