"""Which modules FSDP gathers one by one."""

from __future__ import annotations

import pytest
from torch import nn

from resilient.errors import ConfigError
from resilient.strategies.fsdp import units_of
from resilient.strategies.fsdp_options import FsdpOptions
from resilient.train.arguments import TrainingArguments, layer_classes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 8)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.block = Block()
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


def units(model, **options):
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(module)] for module in units_of(model, FsdpOptions(**options))]


def test_modules_of_a_class_are_units_inner_ones_first():
    assert units(Tied(), layer_classes=("Block",)) == ["block"]
    assert units(Tied(), layer_classes=("Block", "Linear")) == [
        "block.outer",
        "block.inner",
    ]


def test_a_tied_parameter_stays_with_the_module_that_holds_all_its_uses():
    assert "embed" not in units(Tied(), layer_classes=("Embedding", "Linear"))
    assert units(nn.ModuleDict({"one": Tied()}), layer_classes=("Tied", "Embedding")) == ["one"]


def test_a_module_with_enough_parameters_of_its_own_is_a_unit():
    assert units(Tied(), min_num_params=30) == ["block.outer"]
    assert units(Tied(), min_num_params=41) == ["block"]
    assert units(Tied(), min_num_params=1000) == []


def test_a_list_of_modules_is_none_as_nobody_calls_it():
    small = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    assert units(nn.Sequential(small), min_num_params=30) == []
    assert units(nn.Sequential(nn.Sequential(*small)), min_num_params=30) == ["0"]


def test_a_class_that_is_not_in_the_model_is_refused():
    with pytest.raises(ConfigError, match=r"no module of the model is a Stem; it has Block, "):
        units(Tied(), layer_classes=("Stem",))


def test_the_arguments_take_names_with_commas():
    args = TrainingArguments(parallelism="fsdp", fsdp_transformer_layer_cls_to_wrap="A, B,")
    assert layer_classes(args) == ("A", "B")
    assert layer_classes(TrainingArguments()) == ()


def test_an_unknown_parallelism_is_refused():
    with pytest.raises(ConfigError, match="did you mean `fsdp`"):
        TrainingArguments(parallelism="fsdp2")
