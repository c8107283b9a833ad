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

from resilient.storage.local import LocalStore
from tests.crash.__main__ import main as crash_command
from tests.crash.figures import Figures
from tests.crash.histories import history, setup_of
from tests.crash.objects import IMPATIENT, PATIENT, several, singles, sweep_cases
from tests.crash.parts import resumed
from tests.crash.remembering import remembering
from tests.crash.sweep import Depth, sweep_history

HERE = Path(__file__).resolve().parent
SHARDS = 9
STATES_PER_SHARD = 10_500
SEEDS_PER_SHARD = 1000
DEPTH = Depth(256, 0.15, 15)


@pytest.fixture
def pure_functions_remember():
    with remembering():
        yield


@pytest.mark.usefixtures("pure_functions_remember")
@pytest.mark.parametrize("shard", range(SHARDS))
def test_no_crash_state_of_a_recorded_history_breaks_an_invariant(shard, count_states):
    figures, seed = Figures(), shard * SEEDS_PER_SHARD
    while figures.states < STATES_PER_SHARD:
        figures.add(sweep_history(seed, DEPTH))
        seed += 1
    count_states(figures.states, figures.violated)
    assert not figures.violations, figures.violations[:5]
    assert figures.second_lives * 10 > figures.visible


@pytest.mark.usefixtures("pure_functions_remember")
def test_one_trouble_at_any_request_to_an_object_store_breaks_no_invariant(count_states, thinned):
    figures = sweep_cases(thinned(singles(PATIENT)[::2]))
    count_states(figures.states, figures.violated)
    assert not figures.violations, figures.violations[:5]


@pytest.mark.usefixtures("pure_functions_remember")
def test_one_trouble_at_a_request_to_an_object_store_that_gives_up_breaks_none(
    count_states, thinned
):
    """More of the troubles of exclusive creates than of the others."""
    cases = [*thinned(singles(IMPATIENT, "put_new")), *thinned(singles(IMPATIENT)[::3])]
    figures = sweep_cases(cases)
    count_states(figures.states, figures.violated)
    assert not figures.violations, figures.violations[:5]


@pytest.mark.usefixtures("pure_functions_remember")
@pytest.mark.parametrize("kind", ["parity", "tiers"])
def test_one_trouble_while_a_store_takes_promotions_or_repairs_breaks_none(
    kind, count_states, thinned
):
    """Some of them; `python -m tests.crash` takes more."""
    cases = [*singles(PATIENT, kind=kind)[::25], *singles(IMPATIENT, kind=kind)[7::25]]
    cases = thinned(cases)
    figures = sweep_cases(cases)
    count_states(figures.states, figures.violated)
    assert not figures.violations, figures.violations[:5]


@pytest.mark.usefixtures("pure_functions_remember")
@pytest.mark.parametrize("seed", range(2))
def test_several_troubles_with_an_object_store_break_no_invariant(seed, count_states, thinned):
    figures = sweep_cases(thinned(several(seed, 240)))
    count_states(figures.states, figures.violated)
    assert not figures.violations, figures.violations[:5]


@pytest.mark.usefixtures("pure_functions_remember")
@pytest.mark.parametrize("seed", [6, 9])
def test_the_same_seed_makes_the_same_states_again(seed, capsys):
    first = asdict(sweep_history(seed, Depth.deep()))
    assert crash_command(["--only", str(seed)]) == 0
    assert json.loads(capsys.readouterr().out) == first
    assert first["on_disk"] > 200


def test_histories_have_promotions_repairs_and_neither():
    setups = [setup_of(seed) for seed in range(40)]
    assert history(3)[0].setup == setups[3]
    assert {(one.tiering is not None, one.parity) for one in setups} == {
        (False, 0),
        (False, 1),
        (True, 0),
        (True, 1),
    }


def test_what_pure_functions_remember_changes_no_figure():
    with remembering():
        quick = sweep_history(8, DEPTH)
    assert quick == sweep_history(8, DEPTH)


def test_a_sweep_that_was_stopped_goes_on_and_adds_up(tmp_path, capsys):
    kept, seed = tmp_path / "report.json", 3
    first = resumed(kept, seed)
    first.add("one", Figures(on_disk=5, moments=7), 1.0)
    first.add_kills("two", {"seed": 4, "cycles": 3, "violations": []})
    again = resumed(kept, seed)
    again.add("three", Figures(on_disk=1, moments=2, broken={"1": 1}, violations=["x"]), 1.0)
    again.add_kills("four", {"seed": 5, "cycles": 4, "violations": ["y"]})
    last = resumed(kept, seed)
    assert last.done == ["one", "two", "three", "four"]
    assert (last.figures.states, last.figures.enumerated, last.figures.violated) == (6, 9, 1)
    assert last.kills == {"cycles": 7, "violations": ["y"]}
    assert crash_command(["--states", "1", "--seed", "3", "--report", str(kept)]) == 1
    assert json.loads(capsys.readouterr().out)["different"] == 6


def test_figures_of_other_code_or_another_seed_are_never_added(tmp_path):
    kept = tmp_path / "report.json"
    resumed(kept, 3).add("one", Figures(on_disk=5), 1.0)
    with pytest.raises(SystemExit, match="another seed or other code"):
        resumed(kept, 4)
    kept.write_text(kept.read_text().replace('"code": "', '"code": "0'))
    with pytest.raises(SystemExit, match="another seed or other code"):
        resumed(kept, 3)


def test_a_violation_is_counted_and_says_what_makes_it_again(monkeypatch, capsys):
    monkeypatch.setattr(LocalStore, "put", lambda *_: None)
    assert crash_command(["--only", "6"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert sum(told["broken"].values()) > 20
    assert all(one.startswith("seed 6, segment ") for one in told["violations"])


def test_processes_that_are_really_killed_leave_what_was_promised(tmp_path):
    done = subprocess.run(
        [sys.executable, str(HERE / "kills.py"), "--kills", "40", "--seed", "1"],
        env={**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.stdout, done.stderr
    figures = json.loads(done.stdout)
    assert figures["violations"] == []
    assert figures["kills"] == 40
    assert figures["cycles"] >= 40
    assert 5 < figures["in_operations"] < figures["kills"]
    assert figures["saves"] > 20
