from __future__ import annotations

import pytest

from resilient.errors import ConfigError
from resilient.train.arguments import TrainingArguments
from resilient.train.arguments.deprecated import MEANT, zero_of


@pytest.mark.parametrize(
    ("old", "now"),
    [
        ({"evaluation_strategy": "steps"}, {"eval_strategy": "steps"}),
        ({"no_cuda": True}, {"use_cpu": True}),
        ({"per_gpu_train_batch_size": 4}, {"per_device_train_batch_size": 4}),
        ({"per_gpu_eval_batch_size": 4}, {"per_device_eval_batch_size": 4}),
        ({"warmup_ratio": 0.1}, {"warmup_steps": 0.1}),
        ({"push_to_hub_model_id": "a"}, {"hub_model_id": "a"}),
        ({"xpu_backend": "gloo"}, {"ddp_backend": "gloo"}),
    ],
)
def test_an_old_name_means_the_new_one_and_warns(old, now):
    ((name, _),) = old.items()
    ((today, value),) = now.items()
    with pytest.warns(FutureWarning, match=f"`{name}` is deprecated: write {today}={value!r}"):
        assert TrainingArguments(**old) == TrainingArguments(**now)


@pytest.mark.parametrize(
    "old",
    [
        {"save_safetensors": True},
        {"overwrite_output_dir": False},
        {"fp16_backend": "auto"},
        {"fp16_opt_level": "O1"},
        {"half_precision_backend": "cuda_amp"},
        {"local_rank": 3},
        {"parallel_mode": "distributed"},
        {"gradient_checkpointing": False},
        {"adafactor": False},
        {"group_by_length": False},
        {"include_inputs_for_metrics": False},
    ],
)
def test_an_old_name_that_asks_for_nothing_changes_nothing_and_warns(old):
    with pytest.warns(FutureWarning, match="is deprecated"):
        args = TrainingArguments(**old)
    plain = TrainingArguments()
    if "gradient_checkpointing" in old:
        plain = TrainingArguments(activation_checkpointing=False)
    assert args == plain


@pytest.mark.parametrize(
    ("old", "said"),
    [
        ({"save_safetensors": False}, "no equivalent any more: checkpoints are safetensors"),
        ({"overwrite_output_dir": True}, "starts from scratch"),
        ({"fp16_backend": "apex"}, "apex is not supported any more"),
        ({"deepspeed_zero_stage": 4}, "no equivalent any more"),
    ],
)
def test_an_old_value_without_an_equal_is_refused_with_what_to_do(old, said):
    with pytest.raises(ConfigError, match=said):
        TrainingArguments(**old)


@pytest.mark.parametrize(
    ("name", "value", "written"),
    [
        ("adafactor", True, {"optim": "adafactor"}),
        ("group_by_length", True, {"train_sampling_strategy": "group_by_length"}),
        ("include_inputs_for_metrics", True, {"include_for_metrics": ["inputs"]}),
        ("learning_rate_end", 1e-7, {"lr_scheduler_kwargs": {"lr_end": 1e-7}}),
        ("power", 2.0, {"lr_scheduler_kwargs": {"power": 2.0}}),
        ("deepspeed_zero_stage", 1, {"deepspeed": {"zero_optimization": {"stage": 1}}}),
    ],
)
def test_an_old_argument_is_written_in_todays_words(name, value, written):
    assert MEANT[name].written(value) == written


def test_a_stage_alone_makes_the_whole_config_of_deepspeed():
    second, third = zero_of(2), zero_of(3)
    assert second["overlap_comm"] is second["reduce_scatter"] is second["contiguous_gradients"]
    assert second["allgather_bucket_size"] == second["reduce_bucket_size"] == 2e8
    assert not any(name.startswith("stage3") for name in second)
    assert third["stage3_max_live_parameters"] == third["stage3_max_reuse_distance"] == 1e9
    assert third["stage3_gather_16bit_weights_on_model_save"] is True
    with pytest.warns(FutureWarning, match="is deprecated"):
        args = TrainingArguments(deepspeed_zero_stage=3)
    assert args.parallelism == "deepspeed"
    assert args.deepspeed == {"zero_optimization": third}


def test_an_old_and_a_new_name_that_contradict_are_refused():
    with pytest.raises(ConfigError, match="old name of `eval_strategy`, and both are set"):
        both({"evaluation_strategy": "steps", "eval_strategy": "epoch"})
    assert both({"evaluation_strategy": "steps", "eval_strategy": "steps"}).eval_strategy == "steps"
    assert both({"warmup_ratio": 0.1, "warmup_steps": 30}).warmup_steps == 30
    assert both({"warmup_ratio": 0.1, "warmup_steps": 0}).warmup_steps == 0.1


def both(options):
    with pytest.warns(FutureWarning, match="is deprecated"):
        return TrainingArguments(**options)


def test_the_warning_points_at_the_users_line():
    with pytest.warns(FutureWarning, match="is deprecated") as told:
        TrainingArguments(no_cuda=True)
    assert told[0].filename == __file__


def test_old_names_can_be_read_where_the_field_reads_them():
    args = TrainingArguments(activation_checkpointing=False)
    assert args.gradient_checkpointing is False
    assert args.gradient_checkpointing_kwargs is None


def test_a_ratio_of_warm_up_is_one_of_all_steps():
    whole = both({"warmup_ratio": 1.0})
    assert [whole.get_warmup_steps(steps) for steps in (1, 7, 1000, 10**9)] == [1, 7, 1000, 10**9]
    assert both({"warmup_ratio": 0.25}).get_warmup_steps(10) == 3
    assert both({"warmup_ratio": 0}).get_warmup_steps(10) == 0


@pytest.mark.parametrize("ratio", [1.5, -0.1, float("nan"), "half", True])
def test_a_ratio_of_warm_up_that_is_none_is_refused_under_its_name(ratio):
    with pytest.raises(ConfigError, match=r"`warmup_ratio`=.*use a number from 0 to 1"):
        TrainingArguments(warmup_ratio=ratio)
