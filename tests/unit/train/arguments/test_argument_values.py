from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from resilient.errors import ConfigError
from resilient.train.arguments import TrainingArguments
from resilient.train.arguments.choices import CHOICES
from resilient.train.arguments.deprecated import ELSEWHERE, OLD_NAMES, RENAMED
from resilient.train.arguments.validation import INSTEAD, NAMES_NOT_YET, NEVER, NOT_YET, ONLY
from resilient.train.state import TrainerState


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr_scheduler_type": "cosin"}, "did you mean `cosine`"),
        ({"optim": "adamw_troch"}, "did you mean `adamw_torch`"),
        ({"save_strategy": "step"}, "did you mean `steps`"),
        ({"on_save_failure": "ignore"}, "`on_save_failure`='ignore'"),
        ({"ddp_backend": "mpi"}, "gloo, nccl"),
        ({"per_device_train_batch_size": 0}, "`per_device_train_batch_size`=0"),
        ({"gradient_accumulation_steps": 1.5}, "use a whole number, not float"),
        (
            {"learning_rate": "5e-5"},
            "`learning_rate`='5e-5' is not accepted: use a number, not str",
        ),
        ({"max_steps": 10.5}, "`max_steps`=10.5 is not accepted: use a whole number, not float"),
        ({"max_steps": True}, "`max_steps`=True is not accepted: use a whole number, not bool"),
        ({"fp16": "no"}, "`fp16`='no' is not accepted: use True or False, not str"),
        ({"save_steps": None}, "use a number, not NoneType"),
        ({"storage_options": "canary"}, "^`storage_options`: use a dict, not str$"),
        ({"hub_token": ["canary"]}, "^`hub_token`: use text, not list$"),
        ({"dropout": 0.1}, "`dropout`=0.1 is not an argument of training: it belongs to the model"),
        ({"tokenizer": None}, "pass it to the Trainer as `processing_class`"),
        ({"lr_scheduler_kwargs": "{lr_end"}, "`lr_scheduler_kwargs` is not valid JSON"),
        ({"debug": "overflow"}, "did you mean `underflow_overflow`"),
        ({"debug": ["tpu_metrics_debug"]}, "torch_xla"),
        ({"optim": "adamw_torch_xla"}, "torch_xla"),
        ({"dataloader_in_order": False}, "cannot be resumed bit for bit; write True"),
        ({"include_for_metrics": ["input"]}, "did you mean `inputs`"),
        ({"label_smoothing_factor": 1.0}, "from 0 to below 1"),
        ({"save_total_limit": -1}, "keep at least 1, or None for all"),
        ({"ddp_bucket_cap_mb": 0}, "use a number above 0"),
        ({"push_to_hub": True}, 'with `push_to_hub` write hub_strategy="end"'),
        (
            {"lerning_rate": 1.0},
            "`lerning_rate`=1.0 is not an argument.*did you mean `learning_rate`",
        ),
        ({"learning_rate": -1.0}, "`learning_rate`=-1.0"),
        ({"learning_rate": float("nan")}, "`learning_rate`=nan"),
        ({"adam_beta2": 1.0}, "from 0 to below 1"),
        ({"num_train_epochs": 0}, "`num_train_epochs`=0"),
        ({"save_total_limit": 0}, "at least 1"),
        ({"logging_steps": 1.5}, "ratio between 0 and 1"),
        ({"save_steps": 0}, "`save_steps`=0"),
        ({"warmup_steps": 2.5}, "`warmup_steps`=2.5"),
        ({"save_steps": float("inf")}, "`save_steps`=inf is not accepted: use a finite number"),
        ({"warmup_steps": float("inf")}, "`warmup_steps`=inf"),
        ({"num_train_epochs": float("inf")}, "`num_train_epochs`=inf"),
        ({"learning_rate": float("inf")}, "`learning_rate`=inf"),
        ({"fsdp_min_num_params": 100}, "`fsdp_min_num_params` is given and `parallelism`='ddp'"),
        ({"fsdp_reshard_after_forward": False}, "fsdp_reshard_after_forward` is given and `par"),
        ({"trackio_static_space_id": "me/space"}, "call `trackio.freeze` after training"),
        ({"fp16": True, "bf16": True}, "`fp16` and `bf16`"),
        ({"dataloader_persistent_workers": True}, "`dataloader_num_workers`"),
        ({"save_strategy": "best"}, "`metric_for_best_model`"),
        ({"save_strategy": "best", "metric_for_best_model": "loss"}, "`eval_strategy`"),
        ({"load_best_model_at_end": True}, "must be equal"),
        (
            {
                "load_best_model_at_end": True,
                "eval_strategy": "steps",
                "save_steps": 30,
                "eval_steps": 20,
            },
            "multiple of `eval_steps`=20",
        ),
    ],
)
def test_a_wrong_value_is_named_with_what_is_accepted(options, said):
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        TrainingArguments(**options)


@pytest.mark.parametrize("name", [*NEVER, *NAMES_NOT_YET])
def test_no_name_is_advised_that_would_be_refused(name):
    with pytest.raises(ConfigError, match="use one of") as told:
        TrainingArguments(**{name: "zzzzzzzz"})
    advised = re.findall(r"\w+", told.value.message.partition("use one of")[2])
    assert set(advised) <= {*CHOICES[name]} - {*NEVER.get(name, ()), *NAMES_NOT_YET.get(name, ())}
    assert advised


def test_what_asks_for_nothing_is_accepted():
    plain = TrainingArguments("out")
    assert TrainingArguments("out", report_to="none", deepspeed=None, fsdp="") == plain
    assert TrainingArguments("out", report_to=[], push_to_hub=False) == plain
    assert TrainingArguments(Path("out"), learning_rate=1).to_dict()["output_dir"] == "out"


DICTS = (
    *("accelerator_config", "deepspeed", "lr_scheduler_kwargs", "optim_args"),
    "parallelism_config",
)


@pytest.mark.parametrize("name", NOT_YET)
def test_what_is_not_there_yet_is_refused_and_never_ignored(name):
    default = {one.name: one.default for one in dataclasses.fields(TrainingArguments)}[name]
    asked = {bool: not default, str: "error", float: 0.5, int: 0.5}.get(type(default), True)
    asked = {
        "include_num_input_tokens_seen": "all",
        "include_for_metrics": ["loss"],
        "dataloader_multiprocessing_context": "fork",
        "label_names": ["labels"],
        "optim_target_modules": "q_proj",
        "eval_accumulation_steps": 1,
        "torch_empty_cache_steps": 1,
        "neftune_noise_alpha": 5.0,
    }.get(name, {"a": 1} if name in DICTS else asked)
    with pytest.raises(ConfigError, match=f"`{name}`=.* is not supported: omit it, or write"):
        TrainingArguments(**{name: asked})


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, one) for name, all_of in NAMES_NOT_YET.items() for one in sorted(all_of)],
)
def test_a_name_that_the_field_knows_is_refused_until_it_is_there(name, value):
    with pytest.raises(
        ConfigError, match=f"`{name}`='{value}' is not supported: (use one of|leave)"
    ):
        TrainingArguments(**{name: value})


def test_every_name_of_an_optimizer_and_of_a_schedule_is_known():
    transformers = pytest.importorskip("transformers")
    optimizers = {one.value for one in transformers.training_args.OptimizerNames}
    assert optimizers <= set(CHOICES["optim"])
    assert {one.value for one in transformers.SchedulerType} <= set(CHOICES["lr_scheduler_type"])
    for name in optimizers - NEVER["optim"].keys():
        assert TrainingArguments(optim=name, optim_target_modules="all-linear").optim == name


def test_the_tables_name_only_what_there_is():
    ours = {one.name for one in dataclasses.fields(TrainingArguments)}
    assert {*NOT_YET, *NAMES_NOT_YET, *ONLY, *NEVER, *INSTEAD, *CHOICES} <= ours
    assert not ours & {*OLD_NAMES, *ELSEWHERE}
    assert set(RENAMED.values()) <= ours
    for name, missing in NAMES_NOT_YET.items():
        assert missing <= set(CHOICES[name])


def test_spellings_that_mean_the_same_become_one():
    enum = pytest.importorskip("transformers").trainer_utils.IntervalStrategy
    args = TrainingArguments("~/out", eval_strategy=enum.EPOCH, include_num_input_tokens_seen=False)
    assert args.output_dir == str(Path("~/out").expanduser())
    assert args.eval_strategy == "epoch"
    assert args.eval_strategy.value == "epoch"
    assert type(args.to_dict()["eval_strategy"]) is str
    assert args.do_eval is True
    assert args.include_num_input_tokens_seen == "no"
    assert TrainingArguments(report_to=["none"]).report_to == []


def test_the_names_of_a_subclass_are_known():
    @dataclasses.dataclass
    class Mine(TrainingArguments):
        extra: int = 0

    assert Mine(extra=3, report_to="none").extra == 3
    with pytest.raises(ConfigError, match="did you mean `extra`"):
        Mine(extr=3)


def test_every_field_has_help_and_json():
    args = TrainingArguments("out")
    assert all(one.metadata["help"] for one in dataclasses.fields(args))
    assert TrainingArguments(**json.loads(args.to_json_string())) == args


def test_the_best_metric_follows_the_field():
    args = TrainingArguments(eval_strategy="steps", load_best_model_at_end=True)
    assert (args.metric_for_best_model, args.greater_is_better) == ("loss", False)
    assert TrainingArguments(metric_for_best_model="accuracy").greater_is_better is True


def test_ratios_become_steps():
    args = TrainingArguments(logging_steps=0.1, eval_steps=None, save_steps=0.25)
    state = TrainerState()
    state.compute_steps(args, 101)
    assert (state.logging_steps, state.eval_steps, state.save_steps) == (11, 11, 26)


def test_arguments_and_defaults_are_those_of_the_field():
    transformers = pytest.importorskip("transformers")
    theirs = {one.name: one.default for one in dataclasses.fields(transformers.TrainingArguments)}
    ours = {one.name: one.default for one in dataclasses.fields(TrainingArguments)}
    assert theirs.keys() - ours.keys() <= OLD_NAMES
    differing = {name for name in ours.keys() & theirs.keys() if theirs[name] != ours[name]}
    assert differing <= {
        "output_dir",  # None means the same
        "optim",  # fused, where torch has it
        "restore_callback_states_from_checkpoint",  # a resumed run is the same run
    }


def test_credentials_are_no_part_of_the_configuration_that_is_saved_or_shown():
    secrets = {"storage_options": {"secret": "canary-secret"}, "hub_token": "canary"}
    args = TrainingArguments(**secrets)
    for shown in (repr(args), args.to_json_string(), str(args.to_sanitized_dict())):
        assert "canary" not in shown
        assert "secret" not in shown


def test_a_wrong_argument_is_a_value_error_as_in_transformers(tmp_path):
    with pytest.raises(ValueError, match="did you mean `steps`") as refused:
        TrainingArguments(str(tmp_path), save_strategy="step")
    assert isinstance(refused.value, ConfigError)
    assert refused.value.exit_code == 78
