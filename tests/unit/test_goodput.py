"""The replay of a trace: when machines are there, and what counts as kept of each contender."""

from __future__ import annotations

import json

from benchmarks.goodput import TRACE, Outcome, Phase, phases, report
from benchmarks.peers.jobs import saved_step, whole_checkpoints


def test_machines_are_there_while_all_of_them_are():
    found = phases([4, 4, 3, 0, 2, 4, 1], 2.0)
    assert found == [Phase(True, 4.0), Phase(False, 6.0), Phase(True, 2.0), Phase(False, 2.0)]


def test_the_trace_is_what_its_source_says():
    trace = json.loads(TRACE.read_text(encoding="utf-8"))
    assert trace["first_tick"] + len(trace["data"]) == 5131
    assert [one.is_up for one in phases(trace["data"], 1.0)] == [True, False] * 3 + [True]


def test_a_checkpoint_that_was_not_written_to_its_end_does_not_count(tmp_path):
    for step, is_whole in ((90, True), (100, True), (200, False)):
        place = tmp_path / "output" / f"checkpoint-{step}"
        place.mkdir(parents=True)
        (place / ("trainer_state.json" if is_whole else "model.safetensors")).touch()
    assert [step for step, _ in whole_checkpoints(tmp_path / "output")] == [90, 100]
    assert saved_step("torchrun_hf", tmp_path) == 100
    assert saved_step("torchrun_hf", tmp_path / "none") == 0


def test_the_ideal_is_the_faster_ones_pace_all_the_time():
    found = {
        "ours": [Outcome(300, 0, 4, 4, 5.0, 0.2)],
        "torchrun_hf": [Outcome(150, 90, 4, 4, 9.0, 0.1)],
    }
    ratios = report(found, 50.0, {}).ratios
    assert ratios["ours_over_torchrun_hf"] == 2.0
    assert (ratios["ours_over_ideal"], ratios["torchrun_hf_over_ideal"]) == (0.6, 0.3)
