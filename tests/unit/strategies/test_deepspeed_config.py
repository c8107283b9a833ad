"""DeepSpeed's config: filled from what the run was told, refused where the two differ."""

from __future__ import annotations

import json

import pytest
from torch import nn

from resilient import TrainingArguments
from resilient.errors import ConfigError
from resilient.strategies.deepspeed_config import DeepSpeedInputs, complete, read_config, stage_in
from resilient.train.strategy_selection import hidden_size_of


def told(ranks=3, hidden_size=0, **more):
    args = TrainingArguments(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=3e-4,
        weight_decay=0.01,
        warmup_steps=5,
        max_steps=100,
        max_grad_norm=0.7,
        **more,
    )
    values = {**args.to_dict(), "adam_betas": [args.adam_beta1, args.adam_beta2]}
    return DeepSpeedInputs(values, ranks, hidden_size)


AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
            "warmup_type": "linear",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
}


def test_auto_becomes_what_the_run_was_told():
    made = complete(AUTO, told(hidden_size=64, bf16=True))
    assert made["train_batch_size"] == 4 * 2 * 3
    assert made["train_micro_batch_size_per_gpu"] == 4
    assert made["gradient_accumulation_steps"] == 2
    assert made["gradient_clipping"] == 0.7
    assert (made["bf16"], made["fp16"]) == ({"enabled": True}, {"enabled": False})
    assert made["zero_optimization"] == {
        "stage": 3,
        "reduce_bucket_size": 4096,
        "stage3_prefetch_bucket_size": 3686,
        "stage3_param_persistence_threshold": 640,
    }
    assert not {"optimizer", "scheduler"} & made.keys(), "they are the loop's"
    assert AUTO["train_batch_size"] == "auto", "what was given stays as it is"


def test_what_is_left_out_is_filled_too():
    assert complete({}, told())["train_batch_size"] == 24
    assert complete(read_config(None), told())["zero_optimization"] == {"stage": 2}
    assert stage_in({}) == 0


def test_a_model_that_says_no_width_leaves_buckets_to_deepspeed():
    assert complete(AUTO, told())["zero_optimization"] == {"stage": 3}


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("train_batch_size", 32, "train_batch_size=32 where 3 ranks take 24 a step"),
        ("train_micro_batch_size_per_gpu", 8, "=8 where per_device_train_batch_size=4"),
        ("gradient_accumulation_steps", 1, "=1 where gradient_accumulation_steps=2"),
        ("gradient_clipping", 1.0, "=1.0 where max_grad_norm=0.7"),
        ("bf16.enabled", True, "bf16.enabled=True where bf16=False"),
        ("optimizer.params.lr", 1e-3, "=0.001 where learning_rate=0.0003"),
        ("optimizer.params.betas", [0.8, 0.9], "adam_betas=[0.9, 0.999]"),
        ("optimizer.type", "Lamb", "optimizer.type='Lamb' where optim='adamw_torch_fused'"),
        ("scheduler.type", "OneCycle", "'OneCycle' is none of WarmupLR, WarmupDecayLR"),
        ("scheduler.params.warmup_max_lr", 1e-3, "=0.001 where learning_rate=0.0003"),
        ("scheduler.params.warmup_min_lr", [0, 0], "=[0, 0] is not a number"),
        ("scheduler.params.total_num_steps", 90, "=90 where max_steps=100"),
        ("scheduler.params.cycle", 1, "scheduler.params.cycle is none of warmup_min_lr"),
        ("scheduler.params.warmup_num_steps", 9, "=9 where warmup_steps=5"),
        ("scheduler.params.warmup_type", "sqrt", "warmup_type='sqrt' is none of"),
        ("zero_optimization.offload_optimizer", {"device": "nvme"}, "NVMe cannot be saved"),
        ("zero_optimization.stage", 4, "there is no other"),
        ("zero_optimization.mics_shard_size", 2, "MiCS"),
        ("flops_profiler.enabled", "auto", "flops_profiler.enabled='auto' is not known"),
    ],
)
def test_a_contradiction_is_refused_with_both_values(key, value, says):
    config = json.loads(json.dumps(AUTO))
    place, (*folders, last) = config, key.split(".")
    for name in folders:
        place = place.setdefault(name, {})
    place[last] = value
    with pytest.raises(ConfigError) as refusal:
        complete(config, told())
    assert says in refusal.value.message


def test_all_contradictions_are_named_at_once():
    with pytest.raises(ConfigError, match=r"batch_size=32 .*; gradient_clipping=1"):
        complete({"train_batch_size": 32, "gradient_clipping": 1}, told())


def test_equal_values_are_no_contradiction():
    made = complete({"gradient_clipping": 0.7, "train_batch_size": 24}, told())
    assert made["gradient_clipping"] == 0.7


def test_a_path_is_read_and_what_is_no_config_is_refused(tmp_path):
    path = tmp_path / "zero.json"
    path.write_text('{"zero_optimization": {"stage": 1}}')
    assert stage_in(read_config(str(path))) == 1
    path.write_text("[1]")
    with pytest.raises(ConfigError, match="holds a list"):
        read_config(str(path))
    path.write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        read_config(str(path))
    with pytest.raises(ConfigError, match="absent"):
        read_config(str(tmp_path / "absent.json"))


def test_a_config_of_deepspeed_is_a_wish_for_it():
    assert TrainingArguments(deepspeed={"zero_optimization": {}}).parallelism == "deepspeed"
    assert TrainingArguments().parallelism == "ddp"
    with pytest.raises(ConfigError, match="`deepspeed` is given and `parallelism`='fsdp'"):
        TrainingArguments(deepspeed={"zero_optimization": {}}, parallelism="fsdp")


def test_the_width_is_the_config_s():
    model = nn.Linear(1, 1)
    assert hidden_size_of(model) == 0
    model.config = nn.Module()
    model.config.hidden_size = 12
    assert hidden_size_of(model) == 12
    model.config = nn.Module()
    model.config.hidden_sizes = [3, 9]
    assert hidden_size_of(model) == 9
