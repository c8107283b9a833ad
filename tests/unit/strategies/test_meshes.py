"""How ranks are laid out, and how the layers of a model are cut over them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from resilient.errors import ConfigError
from resilient.strategies.parallelism_options import mesh_sizes
from resilient.strategies.tensor_parallel import Replicated, whole_plan
from resilient.train.arguments import TrainingArguments


@pytest.mark.parametrize(
    ("config", "ranks", "shards", "shape", "names"),
    [
        ({"tp_size": 2}, 2, False, (2,), ("tp",)),
        ({"tp_size": 2}, 8, False, (4, 1, 2), ("dp_replicate", "dp_shard", "tp")),
        ({"tp_size": 2}, 8, True, (4, 2), ("dp_shard", "tp")),
        ({"tp_size": 2, "dp_replicate_size": 2}, 8, True, (2, 2, 2), None),
        ({"tp_size": 2, "dp_shard_size": 4}, 8, True, (4, 2), None),
        ({"dp_shard_size": 2}, 4, True, (2, 2, 1), None),
    ],
)
def test_what_is_not_said_is_what_is_left(config, ranks, shards, shape, names):
    sizes = mesh_sizes(config, ranks, shards=shards)
    assert sizes.shape == shape
    assert names is None or sizes.names == names


def test_sizes_that_do_not_fit_the_ranks_are_refused():
    with pytest.raises(ConfigError, match=r"has 1 x 1 x 2 ranks .* but there are 3"):
        mesh_sizes({"tp_size": 2}, 3, shards=False)
    with pytest.raises(ConfigError, match="there are 8"):
        mesh_sizes({"tp_size": 2, "dp_shard_size": 3}, 8, shards=True)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"tp_size": 0}, "at least 1"),
        ({"cp_size": 2}, "sequences are not cut"),
        ({"tp_sizes": 2}, "did you mean `tp_size`"),
        ({"tp_plan": "colwise"}, "a dict of names"),
        ({"tp_handler": object()}, "belongs to accelerate"),
        ({"dp_shard_size": 2}, "write fsdp=True"),
    ],
)
def test_what_a_mesh_cannot_be_is_refused(config, said):
    with pytest.raises(ConfigError, match=said):
        TrainingArguments(parallelism_config=config)


def test_an_object_of_accelerates_is_understood():
    @dataclass
    class ParallelismConfig:
        dp_replicate_size: int = 2
        tp_size: int = 2
        cp_size: int = 1
        cp_backend: str = "torch"
        tp_handler: object = None

    args = TrainingArguments(parallelism_config=ParallelismConfig())
    assert args.parallelism_config["tp_size"] == 2


def test_one_section_says_all_about_parallelism(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        """
        max_steps = 3
        [parallelism]
        strategy = "fsdp"
        tp_size = 2
        fsdp = "shard_grad_op"
        ddp_timeout = 60
        [parallelism.tp_plan]
        "layers.*.up" = "colwise"
        """
    )
    args = TrainingArguments.from_file(path)
    assert (args.parallelism, args.fsdp, args.ddp_timeout) == ("fsdp", "shard_grad_op", 60)
    assert args.parallelism_config == {"tp_size": 2, "tp_plan": {"layers.*.up": "colwise"}}
    again = TrainingArguments(**args.to_dict())
    assert again.parallelism_config == args.parallelism_config
    assert TrainingArguments(parallelism={"fsdp": True}).parallelism == "fsdp"


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"tpsize": 2}, "did you mean `tp_size`"),
        ({"learning_rate": 1.0}, "it is not a key of the section"),
        ({"strategy": "fsdp2"}, "did you mean `fsdp`"),
        ({"strategy": "deepspeed", "tp_size": 2}, "cannot be combined"),
    ],
)
def test_a_section_says_nothing_else(section, said):
    with pytest.raises(ConfigError, match=said):
        TrainingArguments(parallelism=section)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}) for _ in range(2)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(4)


def test_a_plan_names_modules_and_the_rest_is_replicated():
    styles = whole_plan(Layers(), {"blocks.*.up": "colwise", "blocks.1.down": "rowwise"})
    assert {name: type(one) for name, one in styles.items()} == {
        "blocks.0.up": ColwiseParallel,
        "blocks.1.up": ColwiseParallel,
        "blocks.1.down": RowwiseParallel,
        "blocks.0.down": Replicated,
        "norm": Replicated,
    }


def test_plans_that_would_do_nothing_or_break_ties_are_refused():
    with pytest.raises(ConfigError, match=r"`layers.\*`: no module has this name"):
        whole_plan(Layers(), {"layers.*": "colwise"})
    with pytest.raises(ConfigError, match="style `cols` is none of colwise"):
        whole_plan(Layers(), {"blocks.*.up": "cols"})
    tied = Layers()
    tied.blocks[0]["up"].weight = tied.blocks[1]["up"].weight
    with pytest.raises(ConfigError, match=r"`blocks\.0\.up\.weight` is tied"):
        whole_plan(tied, {"blocks.*.up": "colwise"})
    beside = Layers()
    beside.scale = nn.Parameter(nn.Linear(1, 1).weight)
    with pytest.raises(ConfigError, match="is beside modules"):
        whole_plan(beside, {"blocks.*.up": "colwise"})
