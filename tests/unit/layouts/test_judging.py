"""The judge is one function: the same facts give the same verdict and the best next command."""

from __future__ import annotations

import pytest

from resilient.layouts.model import Contents, Problem, Remedy
from resilient.layouts.resumability import Alternatives, RepairOutcome, assess_resumability

STOCK = "trainer.train(resume_from_checkpoint='{path}')"
FIX = "resilient ckpt repair '/my run'"
OTHER = "resilient ckpt inspect /run/checkpoint-4"
CUT = Problem("a.bin", "it is cut", is_fatal=True, help="resilient ckpt repair {path}")
NAN = Problem("a.bin", "it has 3 NaN", is_fatal=True, cure=Remedy.EARLIER)
LOST = Problem("o.pt", "it is missing", "the optimizer's state")
RANDOM = Problem(".", "rank 1 has none", "random state")
SIBLING = "/run/checkpoint-4"


def verdict(*problems, **others):
    contents = Contents("hf-trainer", "Trainer", STOCK, problems=problems)
    return assess_resumability(contents, "/my run", Alternatives(**others))


def test_judge_whole_checkpoint_is_resumable():
    found = verdict()
    assert (found.answer, found.line(), found.lost) == ("yes", "resumable", ())
    assert found.command == "resilient train SCRIPT --resume '/my run'"


def test_judge_losses_are_named_once():
    found = verdict(LOST, RANDOM, LOST)
    assert found.lost == ("the optimizer's state", "random state")
    assert found.line() == "resumable with loss of the optimizer's state; random state"


def test_judge_fatal_problem_is_not_resumable():
    found = verdict(LOST, NAN)
    assert found.line() == "not resumable because a.bin: it has 3 NaN"
    assert found.lost == ()


@pytest.mark.parametrize(
    ("problem", "others", "command"),
    [
        (CUT, {}, FIX),
        (CUT, {"sibling": SIBLING}, FIX),  # no repair was planned: its plan may say more
        (CUT, {"sibling": SIBLING, "repair": RepairOutcome.LOSSLESS}, FIX),
        (CUT, {"sibling": SIBLING, "repair": RepairOutcome.LOSSY}, OTHER),
        (CUT, {"sibling": SIBLING, "repair": RepairOutcome.NONE}, OTHER),
        (CUT, {"repair": RepairOutcome.LOSSY}, FIX),
        (CUT, {"repair": RepairOutcome.NONE}, ""),
        (NAN, {}, ""),
        (NAN, {"sibling": SIBLING}, OTHER),
        (LOST, {"sibling": SIBLING}, OTHER),
        (LOST, {"sibling": SIBLING, "repair": RepairOutcome.LOSSLESS}, FIX),
        (RANDOM, {"repair": RepairOutcome.LOSSLESS}, FIX),
    ],
)
def test_judge_names_the_best_command_at_hand(problem, others, command):
    assert verdict(problem, **others).command == command


def test_judge_small_loss_is_no_reason_for_an_older_step():
    assert "checkpoint-4" not in verdict(RANDOM, sibling=SIBLING).command
