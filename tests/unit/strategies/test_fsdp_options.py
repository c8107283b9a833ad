"""What ``fsdp`` and ``fsdp_config`` say, in today's names and in old ones."""

from __future__ import annotations

import json

import pytest
import torch

from resilient.errors import ConfigError
from resilient.strategies.fsdp1 import Fsdp1Strategy
from resilient.strategies.fsdp_options import Dtypes, FsdpOptions, read_fsdp
from resilient.train.arguments import TrainingArguments
from resilient.train.arguments.derived import fsdp_options

FLAT = {"fsdp": True, "fsdp_config": {"version": 1}}


def read(fsdp=True, **config):
    return read_fsdp(fsdp, config, {})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (True, FsdpOptions()),
        ("full_shard", FsdpOptions()),
        ("shard_grad_op", FsdpOptions(reshard_after_forward=False)),
        (["hybrid_shard", "offload"], FsdpOptions(hybrid=True, cpu_offload=True)),
        ("hybrid_shard_zero2", FsdpOptions(hybrid=True, reshard_after_forward=False)),
        ("full_shard auto_wrap", FsdpOptions(wrap=True)),
    ],
)
def test_words_of_the_field_are_understood(words, expected):
    assert read(words) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"fsdp_min_num_params": 1e6}, FsdpOptions(min_num_params=1_000_000)),
        ({"transformer_layer_cls_to_wrap": "A,B"}, FsdpOptions(layer_classes=("A", "B"))),
        ({"fsdp_transformer_layer_cls_to_wrap": ["A"]}, FsdpOptions(layer_classes=("A",))),
        ({"forward_prefetch": "false"}, FsdpOptions()),
        ({"forward_prefetch": "true"}, FsdpOptions(forward_prefetch=True)),
        ({"fsdp_backward_prefetch": "BACKWARD_PRE"}, FsdpOptions()),
        ({"backward_prefetch": None}, FsdpOptions(backward_prefetch="no_prefetch")),
        ({"sharding_strategy": 2}, FsdpOptions(reshard_after_forward=False)),
        ({"sharding_strategy": "HYBRID_SHARD"}, FsdpOptions(hybrid=True)),
        ({"reshard_after_forward": False}, FsdpOptions(reshard_after_forward=False)),
        ({"reshard_after_forward": "shard_grad_op"}, FsdpOptions(reshard_after_forward=False)),
        ({"offload_params": True, "shard_size": 4}, FsdpOptions(cpu_offload=True, shard_size=4)),
        (
            {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "torch.float32"}},
            FsdpOptions(dtypes=Dtypes("bfloat16", "float32")),
        ),
        ({"mixed_precision": "fp16"}, FsdpOptions(dtypes=Dtypes("float16", "float16"))),
        ({"fsdp_version": "1"}, FsdpOptions(version=1)),
        ({"version": 1, "use_orig_params": "false"}, FsdpOptions(version=1, use_orig_params=False)),
        (
            {"version": 1, "backward_prefetch": "BACKWARD_POST", "limit_all_gathers": False},
            FsdpOptions(version=1, backward_prefetch="backward_post", limit_all_gathers=False),
        ),
        (
            {"version": 1, "mixed_precision": {"buffer_dtype": "bf16"}},
            FsdpOptions(version=1, dtypes=Dtypes(buffer="bfloat16")),
        ),
        (
            {"mixed_precision": "bf16", "version": 1},
            FsdpOptions(version=1, dtypes=Dtypes("bfloat16", "bfloat16", "bfloat16")),
        ),
        ({"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}, FsdpOptions(wrap=True)),
        ({"auto_wrap_policy": "NO_WRAP", "min_num_params": 3}, FsdpOptions()),
        ({"state_dict_type": "FULL_STATE_DICT", "xla": False}, FsdpOptions()),
    ],
)
def test_keys_of_the_config_are_understood(config, expected):
    assert read(**config) == expected


@pytest.mark.parametrize(
    ("words", "config", "said"),
    [
        ("full_shart", {}, "did you mean `full_shard`"),
        ("full_shard shard_grad_op", {}, "use one of them"),
        ("no_shard", {}, 'parallelism="ddp"'),
        (True, {"min_num_parms": 3}, "did you mean `min_num_params`"),
        (True, {"min_num_params": "many"}, "a whole number"),
        (True, {"forward_prefetch": "perhaps"}, "True or False"),
        (True, {"backward_prefetch": "backward_pre_"}, "did you mean `backward_pre`"),
        (True, {"backward_prefetch": "backward_post"}, "FSDP2 gathers before.* version=1"),
        (True, {"use_orig_params": "false"}, "FSDP2 flattens nothing: write version=1"),
        (True, {"limit_all_gathers": False}, "FSDP2 limits them always: write version=1"),
        (True, {"version": 3}, "use one of 1, 2"),
        (
            True,
            {"version": 1, "mixed_precision": {"output_dtype": "bf16"}},
            "FSDP1 leaves outputs as they are.* version=2",
        ),
        (True, {"version": 1, "sharding_strategy": "NO_SHARD"}, 'parallelism="ddp"'),
        (True, {"mixed_precision": {"param_dtype": "fp8"}}, "use one of fp32"),
        (True, {"mixed_precision": {"params": "bf16"}}, "param_dtype"),
        (
            True,
            {"mixed_precision": {"buffer_dtype": "bf16"}},
            "does not change buffers.* version=1",
        ),
        (True, {"auto_wrap_policy": "SIZE_BASED_WRAP"}, "set `min_num_params`"),
        (True, {"xla": True}, "torch_xla"),
        (True, {"sync_module_states": False}, "always"),
        (True, {"cpu_ram_efficient_loading": True}, "leave it out"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(words, config, said):
    with pytest.raises(ConfigError, match=said):
        read(words, **config)


def test_the_config_can_be_a_file(tmp_path):
    path = tmp_path / "fsdp.json"
    path.write_text(json.dumps({"fsdp_offload_params": True}))
    assert read_fsdp(True, str(path), {}).cpu_offload
    path.write_text("[]")
    with pytest.raises(ConfigError, match="does not hold a JSON object"):
        read_fsdp(True, str(path), {})
    with pytest.raises(ConfigError, match="cannot read `fsdp_config`"):
        read_fsdp(True, str(tmp_path / "none"), {})


def test_the_config_wins_over_arguments_of_their_own():
    args = TrainingArguments(
        fsdp="full_shard",
        fsdp_config={"min_num_params": 7},
        fsdp_min_num_params=5,
        fsdp_transformer_layer_cls_to_wrap="A",
    )
    assert args.parallelism == "fsdp"
    assert fsdp_options(args) == FsdpOptions(layer_classes=("A",), min_num_params=7)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"fsdp": "full_shart"}, "did you mean"),
        ({"fsdp": True, "parallelism": "deepspeed"}, "`fsdp` is given"),
        ({"fsdp_config": {"shard_size": 2}}, "write parallelism='fsdp'"),
        ({"fsdp": True, "fsdp_config": {"xla": True}}, "torch_xla"),
        ({**FLAT, "optim": "adafactor"}, "`optim`='adafactor' with FSDP1.* whole tensors"),
        ({**FLAT, "torch_compile": True}, "`torch_compile`=True with FSDP1"),
        ({**FLAT, "parallelism_config": {"tp_size": 2}}, "`parallelism_config`=.* with FSDP1"),
    ],
)
def test_arguments_that_contradict_are_refused_at_once(arguments, said):
    with pytest.raises(ConfigError, match=said):
        TrainingArguments(**arguments)


@pytest.mark.parametrize(("kind", "offloads"), [("cuda:0", True), ("cpu", False)])
def test_what_is_in_host_memory_is_not_brought_there(kind, offloads):
    strategy = Fsdp1Strategy(torch.device(kind), FsdpOptions(version=1, cpu_offload=True))
    assert strategy.offload().offload_params is offloads
