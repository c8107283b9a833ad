"""What was seen of a struck run, and which promises that keeps or breaks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from resilient.format.keys import CheckpointId
from resilient.testing.chaos.plan import FaultKind, Injection, PlannedFault, Target
from resilient.testing.chaos.verdict import (
    ExperimentResult,
    GuaranteeState,
    InjectionResult,
    RunResult,
    evaluate_guarantees,
    interval_steps,
    is_proven,
)

CALM = RunResult(0, step=40, steps=(10, 20, 30, 40))
WELL = RunResult(0, step=40, flaws=())
AGENT = Injection(PlannedFault(FaultKind.KILL, Target.AGENT), 0.5, 0.5, 1)
FLIP = Injection(PlannedFault(FaultKind.BIT_FLIP), 0.5, 0.5, 1)


def saved(step, generation=1):
    return CheckpointId(generation, step)


KILLED = InjectionResult(
    AGENT,
    "SIGKILL to the agent",
    23,
    code=137,
    codes=(137,),
    is_new_life=True,
    before=saved(20),
    after=saved(20),
    restored=saved(20),
)
STOPPED = replace(KILLED, what="SIGTERM", code=75, codes=(75, 0), step=20)
FLIPPED = replace(
    KILLED,
    strike=FLIP,
    what="one bit flipped",
    damaged=saved(20),
    after=saved(10),
    restored=saved(10),
    is_found=True,
)


def states(*struck, ended=WELL, missed=()):
    promises = evaluate_guarantees(ExperimentResult(CALM, ended, struck, missed))
    return {one.name: one for one in promises}


def broken(*struck, **more):
    return {
        name for name, one in states(*struck, **more).items() if one.state is GuaranteeState.BROKEN
    }


def test_a_run_that_goes_on_as_it_should_breaks_nothing():
    found = states(KILLED, STOPPED, FLIPPED)
    assert {one.state for one in found.values()} == {GuaranteeState.KEPT}


def test_what_nothing_tested_is_not_called_kept():
    found = states(ended=RunResult(0))
    kept = {name for name, one in found.items() if one.state is GuaranteeState.KEPT}
    assert kept == {"survival", "atomic", "exact"}
    assert all(one.why for one in found.values() if one.state is GuaranteeState.UNTESTED)


@pytest.mark.parametrize(
    ("struck", "name"),
    [
        (replace(KILLED, problem="nothing happened within 90 s"), "survival"),
        (replace(KILLED, code=1), "exit_codes"),
        (replace(STOPPED, code=143), "exit_codes"),
        (replace(KILLED, after=saved(10), restored=saved(10), step=13), "durable"),
        (replace(KILLED, after=None, restored=None, step=3), "durable"),
        (replace(FLIPPED, is_found=False), "detection"),
        (replace(KILLED, restored=saved(10), step=12), "available"),
        (replace(KILLED, restored=None, step=4), "available"),
        (replace(KILLED, step=41), "bounded"),
        (replace(FLIPPED, step=41), "bounded"),
        (replace(STOPPED, step=21), "bounded"),
        (replace(KILLED, orphans=(17,)), "one_writer"),
    ],
)
def test_each_promise_is_broken_by_what_breaks_it_and_by_nothing_else(struck, name):
    assert broken(struck) == {name}


@pytest.mark.parametrize(
    ("ended", "name"),
    [
        (RunResult(70, flaws=()), "survival"),
        (RunResult(0, "nothing happened within 600 s", flaws=()), "survival"),
        (RunResult(0, damages={"checkpoint-40-g1": "short"}, flaws=()), "atomic"),
        (RunResult(0, differences=("/model: 1 and 2",), flaws=()), "exact"),
        (RunResult(0, flaws=("ledger/x: it was replaced",)), "exactly_once"),
    ],
)
def test_the_end_is_judged_as_well(ended, name):
    assert broken(KILLED, ended=ended) == {name}


def test_a_run_that_did_not_get_to_its_end_is_not_compared():
    assert states(ended=RunResult(70))["exact"].state is GuaranteeState.UNTESTED


def test_as_much_may_be_lost_as_two_intervals_and_with_damage_three():
    assert interval_steps(ExperimentResult(CALM, CALM)) == 10
    assert not broken(replace(KILLED, step=40))
    assert not broken(replace(FLIPPED, step=40))
    assert interval_steps(ExperimentResult(RunResult(0), CALM)) == 0


def test_what_was_mended_may_be_resumed_from():
    mended = replace(FLIPPED, is_reconstructed=True, restored=saved(20))
    assert not broken(mended)


def test_a_save_that_landed_late_may_be_resumed_from():
    assert not broken(replace(KILLED, step=31, restored=saved(30)))


def test_a_fault_that_did_not_strike_proves_nothing():
    evidence = ExperimentResult(CALM, RunResult(0, flaws=()), (KILLED,), (FLIP,))
    assert not is_proven(evidence, evaluate_guarantees(evidence))
    evidence = replace(evidence, missed=())
    assert is_proven(evidence, evaluate_guarantees(evidence))
    assert not is_proven(evidence, evaluate_guarantees(replace(evidence, ended=RunResult(70))))


def test_many_causes_are_not_all_told():
    why = states(ended=RunResult(0, differences=tuple("abcde")))["exact"].why
    assert why == "a; b; c; and 2 more"
