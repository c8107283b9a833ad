"""Crash states by the ten thousand: a POSIX disk, a disk that lies, an object store, real kills.

``make crash`` runs the same code for hours; these are its first minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from figures import Figures
from objects import IMPATIENT, PATIENT, several, singles, sweep_cases
from sweep import sweep_history

from resilient.storage.local import LocalStore
from tests.crash.__main__ import main as crash_command

HERE = Path(__file__).resolve().parent
SHARDS = 10
STATES_PER_SHARD = 10_500
SEEDS_PER_SHARD = 1000


@pytest.mark.parametrize("shard", range(SHARDS))
def test_no_crash_state_of_a_recorded_history_breaks_an_invariant(shard, count_states):
    figures, seed = Figures(), shard * SEEDS_PER_SHARD
    while figures.states < STATES_PER_SHARD:
        figures.add(sweep_history(seed))
        seed += 1
    count_states(figures.states, figures.violated)
    assert not figures.violations, figures.violations[:5]
    assert figures.second_lives * 8 > figures.visible


@pytest.mark.parametrize("third", range(3))
def test_one_trouble_at_any_request_to_an_object_store_breaks_no_invariant(third, count_states):
    figures = sweep_cases(singles(PATIENT)[third::3])
    count_states(figures.states, figures.violated)
    assert not figures.violations, figures.violations[:5]


def test_one_trouble_at_a_request_to_an_object_store_that_gives_up_breaks_none(count_states):
    """All troubles of exclusive creates, of the others every sixth; make crash takes all."""
    figures = sweep_cases([*singles(IMPATIENT, "put_new"), *singles(IMPATIENT)[::6]])
    count_states(figures.states, figures.violated)
    assert not figures.violations, figures.violations[:5]


@pytest.mark.parametrize("seed", range(2))
def test_several_troubles_with_an_object_store_break_no_invariant(seed, count_states):
    figures = sweep_cases(several(seed, 150))
    count_states(figures.states, figures.violated)
    assert not figures.violations, figures.violations[:5]


@pytest.mark.parametrize("seed", [6, 9])
def test_the_same_seed_makes_the_same_states_again(seed, capsys):
    first = asdict(sweep_history(seed))
    assert crash_command(["--only", str(seed)]) == 0
    assert json.loads(capsys.readouterr().out) == first
    assert first["on_disk"] > 200


def test_a_violation_is_counted_and_says_what_makes_it_again(monkeypatch, capsys):
    monkeypatch.setattr(LocalStore, "put", lambda *_: None)
    assert crash_command(["--only", "6"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert sum(told["broken"].values()) > 20
    assert all(one.startswith("seed 6, segment ") for one in told["violations"])


def test_processes_that_are_really_killed_leave_what_was_promised(tmp_path):
    path = os.pathsep.join([str(HERE), str(HERE.parent.parent)])
    done = subprocess.run(
        [sys.executable, str(HERE / "kills.py"), "--cycles", "50", "--seed", "1"],
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.stdout, done.stderr
    figures = json.loads(done.stdout)
    assert figures["violations"] == []
    assert figures["cycles"] >= 50
    assert figures["kills"] > 20
    assert 5 < figures["in_operations"] < figures["kills"]
    assert figures["saves"] > 20
