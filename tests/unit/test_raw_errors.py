"""What a loop of one's own gives wrongly is an error of ours, that names it."""

from __future__ import annotations

import pytest
import torch

from resilient import Checkpointer
from resilient.errors import ConfigError, UnsavableState


@pytest.mark.parametrize("value", [torch.tensor([1.0, 2.0]), "x", None, [1]], ids=repr)
def test_a_metric_that_is_no_number_is_named(tmp_path, value):
    with Checkpointer(tmp_path, notes={}) as checkpointer:
        checkpointer.resume()
        with pytest.raises(UnsavableState, match="`metrics/loss` is no number"):
            checkpointer.save(1, metrics={"loss": value})
        checkpointer.save(1, metrics={"loss": torch.tensor(1.0, requires_grad=True)})


@pytest.mark.parametrize("value", ["x", 3, [1]])
def test_storage_options_that_are_none_are_refused(tmp_path, value):
    with pytest.raises(ConfigError, match=r"`storage_options` is a \w+, and no mapping") as caught:
        Checkpointer(tmp_path, notes={}, storage_options=value).resume()
    assert repr(value) not in str(caught.value), "it may be a secret"


def endless():
    one = []
    one.append(one)
    return one


def deep(levels, wrap=lambda one: {"in": one}):
    one = {}
    for _ in range(levels):
        one = wrap(one)
    return one


@pytest.mark.parametrize(
    "make",
    [
        endless,
        lambda: deep(3000),
        lambda: deep(196),
        lambda: {"in": deep(98, lambda one: (one,))},
        lambda: deep(66, lambda one: {1: one}),
    ],
)
def test_a_value_that_nests_without_an_end_is_named(tmp_path, make):
    with Checkpointer(tmp_path, notes=make()) as checkpointer:
        checkpointer.resume()
        with pytest.raises(UnsavableState, match=r"`notes/value/\S*` nests deeper than") as caught:
            checkpointer.save(1)
        assert len(str(caught.value)) < 300
        checkpointer["notes"] = {}


@pytest.mark.parametrize(
    ("levels", "wrap"),
    [
        (190, lambda one: {"in": one}),
        (60, lambda one: {"in": (one,)}),
        (63, lambda one: {1: one}),
    ],
)
def test_what_nests_as_deep_as_is_read_comes_back(tmp_path, levels, wrap):
    with Checkpointer(tmp_path, rng=False, notes=deep(levels, wrap)) as checkpointer:
        checkpointer.resume()
        checkpointer.save(1)
    notes = {}
    with Checkpointer(tmp_path, rng=False, notes=notes) as checkpointer:
        assert checkpointer.resume() == 1
    assert notes == deep(levels, wrap)


def test_a_protocol_that_only_wraps_others_is_a_configuration_error():
    with pytest.raises(ConfigError, match="`dir://` leads on to another filesystem"):
        Checkpointer("dir://x", notes={}).resume()
