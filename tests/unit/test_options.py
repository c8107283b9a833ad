"""What a loop of one's own names: options are taken, things are saved, slips are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from resilient import Checkpointer, Part, Retention, Tiering, open_checkpointer
from resilient.errors import ConfigError


def left(repository):
    return {path.parent.name for path in repository.glob("checkpoint-*/manifest.json")}


@pytest.mark.parametrize(
    "options",
    [
        {"keep_last": 2},
        {"save_total_limit": 2},
        {"retention": Retention(keep_last=2)},
        {"retention": {"keep_last": 2}},
        {"save_total_limit": 2, "keep_last": None},
    ],
)
def test_a_limit_is_a_limit_however_it_is_said(tmp_path, options):
    with Checkpointer(tmp_path, notes={}, **options) as checkpointer:
        checkpointer.resume()
        for step in range(1, 6):
            checkpointer.save(step)
    assert left(tmp_path) == {"checkpoint-4-g1", "checkpoint-5-g1"}


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True])
@pytest.mark.parametrize("name", ["save_total_limit", "keep_last"])
def test_a_limit_that_means_nothing_is_refused(tmp_path, name, value):
    with pytest.raises(ConfigError, match=f"`{name}`={value!r} is not accepted"):
        Checkpointer(tmp_path, notes={}, **{name: value}).resume()


@pytest.mark.parametrize("other", ["keep_last", "retention"])
def test_two_limits_are_one_too_many(tmp_path, other):
    value = 2 if other == "keep_last" else Retention(keep_last=2)
    with pytest.raises(ConfigError, match=f"`save_total_limit` and `{other}` mean the same"):
        Checkpointer(tmp_path, notes={}, save_total_limit=2, **{other: value})


@pytest.mark.parametrize("value", ["loss:3", 3, ["loss"], {"keep_lsat": 2}])
def test_a_retention_that_is_none_is_refused_at_once(tmp_path, value):
    with pytest.raises(ConfigError, match=r"retention"):
        Checkpointer(tmp_path, notes={}, retention=value).resume()


@pytest.mark.parametrize("tiering", [Tiering(durable_every=2), {"durable_every": 2}])
def test_each_other_save_goes_on_to_the_durable_tier(tmp_path, tiering):
    near, far = tmp_path / "near", tmp_path / "far"
    with Checkpointer(far, notes={}, near_url=str(near), tiering=tiering) as checkpointer:
        checkpointer.resume()
        for step in range(1, 5):
            checkpointer.save(step)
            checkpointer.wait()
    # Nothing is there before the first.
    assert left(far) == {"checkpoint-1-g1", "checkpoint-2-g1", "checkpoint-4-g1"}


@pytest.mark.parametrize(
    "value",
    [3, ["durable_every"], {"durable_evry": 2}, {"durable_every": 0}, {"durable_every": 1.5},
     {"near_total_limit": True}, {"durable_every_seconds": "1"}],
)  # fmt: skip
def test_a_tiering_that_is_none_is_refused(tmp_path, value):
    with pytest.raises(ConfigError, match=r"tiering|durable|near_total"):
        Checkpointer(tmp_path, notes={}, near_url=str(tmp_path / "near"), tiering=value).resume()


def test_a_script_that_evaluates_reads_beside_a_job_that_trains(tmp_path):
    """As the README says: it takes the run over if it resumes, and does not if it loads."""
    mine, theirs = nn.Linear(2, 2), nn.Linear(2, 2)
    with Checkpointer(tmp_path, model=mine) as training:
        training.resume()
        training.save(1, metrics={"loss": 0.5})
        training.wait()
        reading = open_checkpointer(str(tmp_path))
        reading.load_part("best:loss", "model", Part(theirs))
        assert torch.equal(theirs.weight, mine.weight)
        training.save(2)
    assert left(tmp_path) == {"checkpoint-1-g1", "checkpoint-2-g1"}


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("keeplast", "keep_last"),
        ("keep_lst", "keep_last"),
        ("save_total_limits", "save_total_limit"),
        ("retentions", "retention"),
        ("storage_option", "storage_options"),
        ("within_second", "within_seconds"),
        ("overlaps", "overlap"),
        ("keep_best", "retention"),
        ("keep_every", "retention"),
        ("max_to_keep", "keep_last"),
        ("total_limit", "keep_last"),
        ("save_top_k", "keep_last"),
        ("Keep_Last", "keep_last"),
    ],
)
@pytest.mark.parametrize("value", [2, None, {"a": 1}, (1, 2), Retention()])
def test_a_slip_of_an_option_is_not_saved_as_a_thing(tmp_path, slip, meant, value):
    with pytest.raises(ConfigError, match=f"`{slip}` is not an option.*`{meant}") as caught:
        Checkpointer(tmp_path, notes={}, **{slip: value})
    assert "Part(" in caught.value.hint


@pytest.mark.parametrize(
    "name", ["notes", "log", "place", "tries", "epoch", "step", "best", "history", "config", "last"]
)
def test_usual_names_of_plain_values_are_left_alone(tmp_path, name):
    assert Checkpointer(tmp_path, **{name: 1}) is not None


def test_what_has_state_or_is_a_part_may_have_any_name(tmp_path):
    keeplast, retentions = Part({"at": 1}), nn.Linear(1, 1)
    with Checkpointer(tmp_path, keeplast=keeplast, retentions=retentions) as checkpointer:
        checkpointer.resume()
        keeplast.stateful["at"] = 2
        checkpointer.save(1)
    fresh = {"at": 0}
    other = nn.Linear(1, 1)
    with Checkpointer(tmp_path, keeplast=Part(fresh), retentions=other) as checkpointer:
        assert checkpointer.resume() == 1
        assert checkpointer["keeplast"] is fresh
    assert fresh == {"at": 2}
    assert torch.equal(other.weight, retentions.weight)
