"""Where a model is cut, what each stage holds, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from resilient.errors import ConfigError
from resilient.strategies.parallelism_options import PipelineOptions
from resilient.strategies.pipeline.partition import beside, split_model


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4)
        self.places = nn.Embedding(9, 4)
        self.drop = nn.Dropout(0.1)


class Deep(nn.Module):
    def __init__(self, layers=5) -> None:
        super().__init__()
        self.embed = Embeddings()
        self.body = nn.Module()
        self.body.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 9)
        self.register_buffer("mask", torch.ones(3))
        self.register_buffer("unsaved", torch.ones(3), persistent=False)


def cut(model, ranks, points=(), **more):
    return split_model(model, PipelineOptions(ranks, split_points=tuple(points)), **more)


def test_layers_are_dealt_evenly_and_what_is_before_and_after_goes_with_them():
    found = cut(Deep(), 2)
    assert found.entries == ("body.layers.3",)
    assert found.units == {
        "embed": 0,
        "body.layers.0": 0,
        "body.layers.1": 0,
        "body.layers.2": 0,
        "body.layers.3": 1,
        "body.layers.4": 1,
        "norm": 1,
        "head": 1,
    }


@pytest.mark.parametrize(
    ("layers", "ranks", "starts"),
    [(4, 2, [2]), (4, 4, [1, 2, 3]), (5, 4, [2, 3, 4]), (8, 3, [3, 6]), (7, 2, [4])],
)
def test_where_layers_do_not_divide_the_last_stage_has_fewer(layers, ranks, starts):
    assert cut(Deep(layers), ranks).entries == tuple(f"body.layers.{n}" for n in starts)


def test_layers_may_be_told_by_their_class():
    class Layer(nn.Linear):
        pass

    model = Deep()
    for place in (0, 2, 4):
        model.body.layers[place] = Layer(4, 4)
    assert cut(model, 3, layer_classes=("Layer",)).entries == ("body.layers.2", "body.layers.4")


def test_a_model_may_say_where_it_is_cut():
    class Own(Deep):
        def pp_split_points(self, stages):
            return ["body.layers.1", "norm"][: stages - 1]

    assert cut(Own(), 3).entries == ("body.layers.1", "norm")
    assert cut(Own(), 3).units["head"] == 2
    told = cut(Own(), 3, ["body.layers.2", "body.layers.4"])
    assert told.entries == ("body.layers.2", "body.layers.4"), "who trains knows better"
    with pytest.raises(ConfigError, match=r"pp_split_points\(4\)` names 2 modules, but 4 stages"):
        cut(Own(), 4)


def test_buffers_beside_modules_are_everywhere():
    model = Deep()
    assert beside(model, cut(model, 2)) == ("mask",)


def test_a_module_that_is_cut_inside_is_not_held_whole():
    found = cut(Deep(), 2, ["embed.places"])
    assert found.units["embed.words"] == 0
    assert found.units["embed.places"] == 1
    assert "embed" not in found.units


@pytest.mark.parametrize(
    ("points", "said"),
    [
        (["body.layers.9"], "no module inside the model is `body.layers.9`"),
        ([""], "no module inside the model is ``"),
        (["body.layers"], "`body.layers` is a list, which is never called"),
        (["head", "norm"], "head, norm are not in the order"),
        (["head", "head"], "head, head are not in the order"),
        (["embed.drop"], "`embed.drop` holds nothing that is trained"),
    ],
)
def test_points_where_no_stage_can_begin_are_refused(points, said):
    with pytest.raises(ConfigError, match=said):
        cut(Deep(), len(points) + 1, points)


def test_a_model_without_layers_enough_is_refused_with_what_to_do():
    with pytest.raises(ConfigError, match="`Deep` has 2 layers in lists, and the pipeline 3 stage"):
        cut(Deep(2), 3)


def test_a_parameter_that_two_stages_would_need_is_refused():
    tied = Deep()
    tied.head.weight = tied.embed.words.weight
    with pytest.raises(
        ConfigError, match=r"`head\.weight` is tied to a parameter of another stage"
    ):
        cut(tied, 2)
    near = Deep()
    near.embed.places.weight = near.embed.words.weight
    assert cut(near, 2).units["embed"] == 0
    lying = Deep()
    lying.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(ConfigError, match="`scale` is beside modules that the pipeline separates"):
        cut(lying, 2)
    lying = Deep()
    lying.body.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(ConfigError, match=r"`body\.scale` is beside modules"):
        cut(lying, 2)
