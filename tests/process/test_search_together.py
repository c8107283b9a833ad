"""Two ranks search together: the same trials, one verdict, and on after a kill."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.endings import differences, ending
from tests.process.deepspeed_forks import run_forks

optuna = pytest.importorskip("optuna")
WORKER = Path(__file__).with_name("search_worker.py")
LIVES = 6
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    # All tests read what one process and its forks left.
    pytest.mark.xdist_group("search"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("searches")
    run_forks(WORKER, folder, LIVES)
    return folder


def seen(folder, rank):
    return [json.loads(line) for line in (folder / f"seen-{rank}.jsonl").read_text().splitlines()]


def found(folder, rank):
    return json.loads((folder / f"found-{rank}.json").read_text())


def trials(folder):
    """Return what the trials of a study were, what they reported, and how they ended."""
    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(folder / "study.log"))
    )
    study = optuna.load_study(study_name="search", storage=storage)
    return [
        (one.params, one.intermediate_values, one.values, one.state.name) for one in study.trials
    ]


def test_all_ranks_train_the_same_trials(runs):
    first, second = (seen(runs / "unbroken", rank) for rank in range(2))
    assert first == second
    begun = [one for one in first if "begins_at" in one]
    assert [one["folder"] for one in begun] == ["run-0", "run-1", "run-2", "run-3"]
    for one, (params, *_) in zip(begun, trials(runs / "unbroken"), strict=True):
        assert one["params"] == params
        assert one["name"] == f"batch {params['batch']}"
        assert [one["rate"], one["batch"], one["dropout"]] == [
            params[name] for name in ("rate", "batch", "dropout")
        ]
    assert found(runs / "unbroken", 0) == found(runs / "unbroken", 1)


def test_all_ranks_end_a_trial_that_rank_zero_prunes(runs):
    states = [state for *_, state in trials(runs / "unbroken")]
    assert states == ["COMPLETE", "PRUNED", "COMPLETE", "COMPLETE"]
    for rank in range(2):
        ends = [one["ends_at"] for one in seen(runs / "unbroken", rank) if "ends_at" in one]
        assert ends == [6, 4, 6, 6]


def test_a_search_that_was_killed_twice_comes_to_the_same_result(runs):
    killed, unbroken = runs / "killed", runs / "unbroken"
    begun = [(one["folder"], one["begins_at"]) for one in seen(killed, 1) if "begins_at" in one]
    assert begun == [
        *(("run-0", 0), ("run-1", 0)),
        *(("run-1", 0), ("run-2", 0)),
        *(("run-2", 2), ("run-3", 0)),
    ]
    assert trials(killed) == trials(unbroken)
    assert found(killed, 0) == found(killed, 1) == found(unbroken, 0)
    for number in range(4):
        assert (
            differences(ending(killed / f"run-{number}"), ending(unbroken / f"run-{number}")) == []
        )


@pytest.mark.parametrize(
    ("run", "error", "said"),
    [
        ("without a result", "ConfigError", "no trial of the search"),
        ("without a study", "ResilientError", "the study is out of reach"),
    ],
)
def test_what_ends_the_search_of_rank_zero_ends_that_of_all(runs, run, error, said):
    first, second = (found(runs / run, rank) for rank in range(2))
    assert first["error"] == error
    assert first["message"].startswith(said)
    assert second["error"] == error
    assert second["message"] == f"rank 0: {first['message']}"
