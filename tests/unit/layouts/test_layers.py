"""Layers whose weights have other names than those of the others."""

from __future__ import annotations

import pytest

from resilient.layouts.consistency import check_layer_names
from resilient.layouts.model import MODEL, OPTIMIZER, Tensor

OWN = {"attn.weight": (4, 4), "ln_1.weight": (4,), "mlp.weight": (4, 8)}


def model(count, *changes):
    """Return the tensors of a model, some of them under another name."""
    named = dict(changes)
    return [
        Tensor(named.get(name, name), MODEL, "F32", shape, ("model.safetensors",))
        for number in range(count)
        for own, shape in OWN.items()
        for name in (f"transformer.h.{number}.{own}",)
    ]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_layers_that_are_alike_are_not_odd(count):
    assert check_layer_names(model(count)) == []


def test_a_name_with_a_flipped_bit_is_told():
    change = ("transformer.h.0.ln_1.weight", "transformer.h.0.ln_9.weight")
    for count in (2, 5):
        (found,) = check_layer_names(model(count, change))
        assert "ln_9.weight" in found.what
        assert "`ln_1.weight`" in found.what
        assert (found.place, found.severity) == ("model.safetensors", "warning")


def test_two_layers_may_be_of_different_kinds():
    change = ("transformer.h.0.attn.weight", "transformer.h.0.mixer.weight")
    assert check_layer_names(model(2, change)) == []
    assert len(check_layer_names(model(3, change))) == 1


def test_a_layer_that_has_more_or_less_is_not_taken_for_one_with_another_name():
    tensors = model(4)
    assert check_layer_names([*tensors, Tensor("h.2.gate", MODEL, "F32", (2,), ("m",))]) == []
    assert check_layer_names(tensors[:-1]) == []


def test_another_shape_is_no_weight_with_another_name():
    tensors = model(4)[1:]
    assert (
        check_layer_names([*tensors, Tensor("transformer.h.0.x", MODEL, "F32", (2,), ("m",))]) == []
    )


def test_names_of_the_optimizer_are_none_of_the_model():
    tensors = [Tensor(one.name, OPTIMIZER, one.dtype, one.shape, one.files) for one in model(3)]
    assert check_layer_names(tensors[1:]) == []
