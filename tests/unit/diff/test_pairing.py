"""Which tensor of one checkpoint is which of another."""

from __future__ import annotations

import pytest

from resilient.diff.model import CheckpointView
from resilient.diff.tensor_names import bare, matched
from resilient.layouts.model import MODEL, OPTIMIZER, OTHER, Tensor
from resilient.storage.folder import DirectoryListing

SHAPES = {"h.0.weight": (4, 3), "h.0.bias": (4,), "h.1.weight": (4, 4), "lm_head.weight": (9, 4)}


def side(tensors, order=()):
    return CheckpointView(
        "x", "torch", "x", None, None, None, DirectoryListing({}), tuple(tensors), order=order
    )


def model(prefix="", *, without=()):
    return [
        Tensor(prefix + name, MODEL, "F32", shape)
        for name, shape in SHAPES.items()
        if name not in without
    ]


def states(names, prefix="", kinds=("exp_avg",)):
    return [
        Tensor(f"{prefix}state.{label}.{kind}", OPTIMIZER, "F32", SHAPES[name])
        for label, name in names.items()
        for kind in kinds
    ]


def met(before, after):
    pairs, notes = matched(before, after)
    both = {
        one.name: (one.before.name, one.after.name) for one in pairs if one.before and one.after
    }
    alone = [one.name for one in pairs if not (one.before and one.after)]
    return both, alone, notes


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "model.",
        "module.",
        "state.model.",
        "module._orig_mod.",
        "_fsdp_wrapped_module.",
        "a.b.c.",
    ],
)
def test_what_a_wrapper_puts_before_all_names_is_taken_away(prefix):
    both, alone, notes = met(side(model()), side(model(prefix)))
    assert set(both) == {f"model/{name}" for name in SHAPES}
    assert (alone, notes) == ([], [])
    assert both["model/h.0.bias"][1] == f"{prefix}h.0.bias"


def test_a_prefix_that_some_names_lack_is_taken_from_the_others():
    base = [Tensor(one, MODEL, "F32", SHAPES[one]) for one in SHAPES if one != "lm_head.weight"]
    whole = [
        Tensor(one if one == "lm_head.weight" else f"transformer.{one}", MODEL, "F32", shape)
        for one, shape in SHAPES.items()
    ]
    both, alone, _ = met(side(base), side(whole))
    assert len(both) == 3
    assert alone == ["model/lm_head.weight"]


def test_wrappers_within_a_name_are_taken_away():
    assert bare("h.0._checkpoint_wrapped_module.weight") == "h.0.weight"
    assert bare("_orig_mod") == "_orig_mod"


def test_one_name_of_two_shapes_is_one_tensor_all_the_same():
    other = [Tensor(one, MODEL, "F32", (7,)) for one in SHAPES]
    assert len(met(side(model()), side(other))[0]) == len(SHAPES)


def test_state_is_matched_by_the_name_of_its_parameter():
    ours = [*model(), *states({name: name for name in SHAPES})]
    theirs = [*model("model."), *states({f"model.{name}": name for name in SHAPES}, "optimizer.")]
    both, alone, _ = met(side(ours), side(theirs))
    assert "optimizer/h.1.weight.exp_avg" in both
    assert (len(both), alone) == (2 * len(SHAPES), [])


ORDER = ("h.0.weight", "h.1.weight", "lm_head.weight", "h.0.bias")


@pytest.mark.parametrize("is_first", [True, False])
def test_numbers_become_names_in_the_order_that_was_written_down(is_first):
    numbered = side(states({str(nth): name for nth, name in enumerate(ORDER)}))
    named = side(states({name: name for name in SHAPES}), order=ORDER)
    both, alone, notes = met(*((numbered, named) if is_first else (named, numbered)))
    assert (alone, notes) == ([], [])
    number, name = both["optimizer/h.0.bias.exp_avg"][:: 1 if is_first else -1]
    assert (number, name) == ("state.3.exp_avg", "state.h.0.bias.exp_avg")


@pytest.mark.parametrize("order", [(), tuple(SHAPES), ORDER[:2]])
def test_without_an_order_that_fits_state_is_not_compared_and_that_is_said(order):
    numbered = side([*model(), *states({str(nth): name for nth, name in enumerate(ORDER)})])
    named = side([*model(), *states({name: name for name in SHAPES})], order=order)
    both, alone, notes = met(numbered, named)
    assert set(both) == {f"model/{name}" for name in SHAPES}
    assert alone == []
    assert "numbers on one side" in notes[0]


def test_numbers_on_both_sides_are_positions():
    one = side(states({"0": "h.0.bias", "10": "h.1.weight", "2": "lm_head.weight"}))
    pairs, notes = matched(one, one)
    assert [pair.name for pair in pairs] == [
        "optimizer/0.exp_avg", "optimizer/2.exp_avg", "optimizer/10.exp_avg",
    ]  # fmt: skip
    assert notes == []


def test_two_names_that_a_prefix_makes_one_keep_their_own():
    twice = [Tensor(name, MODEL, "F32", (2,)) for name in ("model.w", "w", "model.b", "b")]
    once = [Tensor(name, MODEL, "F32", (2,)) for name in ("w", "b")]
    pairs, _ = matched(side(twice), side(once))
    assert sum(one.before is not None for one in pairs) == 4
    assert sum(one.after is not None for one in pairs) == 2


def test_what_is_neither_keeps_its_name():
    one = side([Tensor("seen", OTHER, "I64", ())])
    assert [pair.name for pair in matched(one, one)[0]] == ["other/seen"]
