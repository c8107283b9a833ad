"""What a loop of one's own gives wrongly is an error of ours, that names it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from resilient import Checkpointer
from resilient.errors import ConfigError, UnsavableState
from resilient.state_dict.snapshot import Part, capture
from resilient.state_dict.statefuls import PlainValue


@pytest.mark.parametrize("value", [torch.tensor([1.0, 2.0]), "x", None, [1]], ids=repr)
def test_a_metric_that_is_no_number_is_named(tmp_path, value):
    with Checkpointer(tmp_path, notes={}) as checkpointer:
        checkpointer.resume()
        with pytest.raises(UnsavableState, match="`metrics/loss` is not a number"):
            checkpointer.save(1, metrics={"loss": value})
        checkpointer.save(1, metrics={"loss": torch.tensor(1.0, requires_grad=True)})


@pytest.mark.parametrize("value", ["x", 3, [1]])
def test_storage_options_that_are_none_are_refused(tmp_path, value):
    with pytest.raises(ConfigError, match=r"`storage_options` is a \w+, not a mapping") as caught:
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
        with pytest.raises(
            UnsavableState, match=r"`notes/value/\S*` is nested deeper than"
        ) as caught:
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
    with pytest.raises(ConfigError, match="`dir://` leads to another filesystem"):
        Checkpointer("dir://x", notes={}).resume()


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda: torch.eye(3).to_sparse(), "to_dense"),
        (lambda: torch.empty(3, device="meta"), "to_empty"),
        (lambda: torch.nn.LazyLinear(2).weight, "first forward pass"),
        (lambda: np.array(["a", "b"]), "tolist"),
        (lambda: np.array([object()]), "tolist"),
        (lambda: np.array(["2026-01-01"], dtype="datetime64[D]"), "tolist"),
    ],
    ids=["sparse", "meta", "lazy", "texts", "objects", "days"],
)
def test_what_has_no_plain_bytes_is_named_with_what_to_do(tmp_path, make, advice):
    with Checkpointer(tmp_path, notes={"odd": make()}) as checkpointer:
        checkpointer.resume()
        with pytest.raises(UnsavableState, match="`notes/value/odd`") as caught:
            checkpointer.save(1)
        assert advice in caught.value.hint
        checkpointer["notes"] = {}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_quantized_tensor_is_named_with_what_to_do(tmp_path):
    made = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    with Checkpointer(tmp_path, notes={"odd": made}) as checkpointer:
        checkpointer.resume()
        with pytest.raises(UnsavableState) as caught:
            checkpointer.save(1)
        assert "dequantize" in caught.value.hint
        checkpointer["notes"] = {}


@pytest.mark.parametrize("thing", [torch.ones(2), np.ones(2), (1, 2), b"abc"], ids=repr)
def test_a_thing_without_a_state_goes_into_a_dict_and_comes_back(tmp_path, thing):
    with pytest.raises(ConfigError, match="`kept` is a") as caught:
        Checkpointer(tmp_path, kept=thing).resume()
    assert "kept={'value': ...}" in caught.value.hint
    with Checkpointer(tmp_path, kept={"value": thing}) as checkpointer:
        checkpointer.resume()
        checkpointer.save(1)
    kept = {}
    with Checkpointer(tmp_path, kept=kept) as checkpointer:
        assert checkpointer.resume() == 1
    assert np.array_equal(np.asarray(kept["value"]), np.asarray(thing))


def test_what_only_pickle_could_save_is_not_sent_into_a_dict(tmp_path):
    with pytest.raises(ConfigError) as caught:
        Checkpointer(tmp_path, kept=object()).resume()
    assert "state_dict()" in caught.value.hint


def test_a_part_that_cannot_be_named_so_is_refused_with_what_to_do():
    with pytest.raises(ConfigError, match=r"`a\.b` cannot name a part") as caught:
        capture(1, {"a.b": Part(PlainValue(1))}, 0)
    assert "another name" in caught.value.hint


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_save_without_time_is_refused_at_once(tmp_path, seconds):
    with pytest.raises(ConfigError, match=r"`within_seconds`=.* is not accepted"):
        Checkpointer(tmp_path, notes={}, within_seconds=seconds).resume()
