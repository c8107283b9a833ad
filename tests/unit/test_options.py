"""What a loop of one's own names: options are taken, things are saved, slips are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from resilient import Checkpointer, Part, Retention
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
    with pytest.raises(ConfigError, match=f"`save_total_limit` and `{other}` say the same"):
        Checkpointer(tmp_path, notes={}, save_total_limit=2, **{other: value})


@pytest.mark.parametrize("value", ["loss:3", 3, ["loss"], {"keep_lsat": 2}])
def test_a_retention_that_is_none_is_refused_at_once(tmp_path, value):
    with pytest.raises(ConfigError, match=r"retention"):
        Checkpointer(tmp_path, notes={}, retention=value).resume()


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
    with pytest.raises(ConfigError, match=f"`{slip}` is no option.*`{meant}") as caught:
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
