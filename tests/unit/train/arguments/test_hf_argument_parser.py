"""HfArgumentParser of Transformers takes our arguments, as scripts for its Trainer use it."""

from __future__ import annotations

import copy
import json
from dataclasses import fields

import pytest

from resilient.train.arguments import TrainingArguments, parse_arguments
from resilient.train.arguments.value_types import is_secret

HfArgumentParser = pytest.importorskip("transformers").HfArgumentParser


def parse(*words):
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(list(words))
    return args


def test_without_an_option_every_field_has_its_default():
    assert parse() == TrainingArguments()


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--bf16"], "bf16", True),
        (["--bf16", "false"], "bf16", False),
        (["--no_dataloader_pin_memory"], "dataloader_pin_memory", False),
        (["--tf32", "false"], "tf32", False),
        (["--save_total_limit", "2"], "save_total_limit", 2),
        (["--learning-rate", "1e-3"], "learning_rate", 1e-3),
        (["--neftune_noise_alpha", "5"], "neftune_noise_alpha", 5.0),
        (["--optim", "sgd"], "optim", "sgd"),
        (["--label_names", "a", "b"], "label_names", ["a", "b"]),
        (["--include_for_metrics", "inputs", "loss"], "include_for_metrics", ["inputs", "loss"]),
        (["--report_to", "none"], "report_to", []),
        (["--debug", "underflow_overflow"], "debug", ["underflow_overflow"]),
        (["--optim_args", "momentum=0.9"], "optim_args", "momentum=0.9"),
        (["--optim", "sgd", "--optim_args", '{"momentum": 0.9}'], "optim_args", {"momentum": 0.9}),
        (
            ["--lr_scheduler_type", "polynomial", "--lr_scheduler_kwargs", '{"power": 2}'],
            "lr_scheduler_kwargs",
            {"power": 2},
        ),
        (["--save_retention", '{"keep_every": 100}'], "save_retention", {"keep_every": 100}),
        (
            ["--parallelism_config", '{"dp_shard_size": 1}'],
            "parallelism_config",
            {"dp_shard_size": 1},
        ),
        (["--fsdp", "full_shard auto_wrap"], "fsdp", "full_shard auto_wrap"),
        (["--fsdp", "true"], "fsdp", True),
        (["--trackio_static_space_id", "false"], "trackio_static_space_id", False),
    ],
)
def test_an_option_has_the_value_that_our_own_parser_reads(words, name, value):
    args = parse(*words)
    assert getattr(args, name) == value
    assert getattr(parse_arguments(TrainingArguments, argv=words)[0], name) == value


def test_a_value_of_another_type_is_refused_with_the_options_name(capsys):
    with pytest.raises(SystemExit):
        parse("--save_retention", "weekly")
    assert "--save_retention" in capsys.readouterr().err


def test_the_help_names_every_field(capsys):
    with pytest.raises(SystemExit) as ended:
        parse("--help")
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(f"--{one.name}" in text for one in fields(TrainingArguments) if one.init)


def test_files_and_dicts_are_read(tmp_path):
    values = {"output_dir": "runs/x", "max_steps": 3, "eval_strategy": "epoch", "fsdp": True}
    parser = HfArgumentParser(TrainingArguments)
    file = tmp_path / "args.json"
    file.write_text(json.dumps(values))  # JSON is YAML too
    for (args,) in (
        parser.parse_dict(values),
        parser.parse_json_file(file),
        parser.parse_yaml_file(file),
    ):
        assert args == TrainingArguments(**values)


def test_what_transformers_has_as_an_enum_has_its_value():
    args = TrainingArguments(eval_strategy="no", optim="sgd")
    assert (args.eval_strategy.value, args.optim.value) == ("no", "sgd")
    assert args.lr_scheduler_type.value == args.lr_scheduler_type == "linear"
    assert {type(value) for value in args.to_dict().values()} >= {str}
    assert type(args.to_dict()["optim"]) is str
    assert copy.deepcopy(args) == args


def test_secrets_stay_secrets():
    assert {one.name for one in fields(TrainingArguments) if is_secret(one)} == {
        "hub_token",
        "storage_options",
    }
