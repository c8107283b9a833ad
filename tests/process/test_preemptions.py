"""One run, preempted in each phase: the agreed step is saved in time, and the next life goes on."""

from __future__ import annotations

import pytest

from benchmarks.preemptions import PHASES, draw, preempt_all


@pytest.mark.long
def test_every_preemption_leaves_the_agreed_step_within_the_deadline(tmp_path):
    outcomes = preempt_all(tmp_path, len(PHASES), seed=7)
    assert [one.problem for one in outcomes] == [""] * len(PHASES), outcomes
    assert {one.blow.phase for one in outcomes} == set(PHASES)


def test_the_same_seed_draws_the_same_preemptions():
    assert [draw(n, 3) for n in range(12)] == [draw(n, 3) for n in range(12)]
    assert [draw(n, 3) for n in range(12)] != [draw(n, 4) for n in range(12)]
