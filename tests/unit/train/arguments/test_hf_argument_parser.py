"""HfArgumentParser of Transformers, TRL's parser and our own take our arguments alike."""

import copy
import enum
import json
import sys
from dataclasses import dataclass, field, fields
from typing import Literal

import pytest
import yaml

import resilient
from resilient import TrainingArguments, parse_arguments
from resilient.errors import ConfigError, UsageError
from resilient.train.arguments.value_types import is_secret

HfArgumentParser = pytest.importorskip("transformers").HfArgumentParser
PARSERS = {"transformers": HfArgumentParser, "resilient": resilient.HfArgumentParser}


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class ModelArguments:
    """As in the examples of Transformers."""

    model_name: str = field(metadata={"help": "100 %% of the model", "aliases": ["--model", "-m"]})
    dtype: str | None = field(
        default=None, metadata={"help": "its dtype", "choices": ["auto", "fp"]}
    )
    trust: bool = field(default=True)


@dataclass
class DataArguments:
    """As in the examples of Transformers, with lists and choices."""

    files: list[str] = field(default_factory=list)
    size: int | None = None
    ratio: float = 0.5
    split: Literal["train", "test"] = "train"
    color: Color = Color.RED


CLASSES = (ModelArguments, DataArguments, TrainingArguments)
WORDS = [
    *("--model", "tiny", "--no_trust", "--files", "a", "b", "--size", "3", "--split", "test"),
    *("--output_dir", "runs/x", "--eval_strategy", "epoch", "--learning-rate", "1e-3", "--bf16"),
]
VALUES = {"model_name": "tiny", "trust": False, "files": ["a", "b"], "size": 3, "split": "test"}
VALUES |= {"output_dir": "runs/x", "eval_strategy": "epoch", "learning_rate": 1e-3, "bf16": True}


@pytest.fixture(params=PARSERS)
def kind(request):
    return PARSERS[request.param]


def parse(*words):
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(list(words))
    return args


def expected():
    model = ModelArguments("tiny", trust=False)
    data = DataArguments(["a", "b"], 3, split="test")
    return (
        model,
        data,
        TrainingArguments("runs/x", eval_strategy="epoch", learning_rate=1e-3, bf16=True),
    )


def test_several_dataclasses_are_made_from_one_command_line(kind):
    assert kind(CLASSES).parse_args_into_dataclasses(WORDS) == expected()
    parser = kind(list(CLASSES))
    assert parser.parse_args_into_dataclasses(args=WORDS, look_for_args_file=False) == expected()


def test_files_of_several_dataclasses_are_read(kind, tmp_path):
    parser = kind(CLASSES)
    json_file, yaml_file = tmp_path / "args.json", tmp_path / "args.yml"
    json_file.write_text(json.dumps(VALUES))
    yaml_file.write_text(yaml.safe_dump(VALUES))
    assert parser.parse_dict(VALUES) == expected()
    assert parser.parse_json_file(str(json_file)) == expected()
    assert parser.parse_yaml_file(yaml_file) == expected()
    for extra in (VALUES | {"other": 1}, VALUES | {"evaluation": 1}):
        with pytest.raises(ValueError, match="|".join(set(extra) - set(VALUES))):
            parser.parse_dict(extra)
        assert parser.parse_dict(extra, allow_extra_keys=True) == expected()
        json_file.write_text(json.dumps(extra))
        with pytest.raises(ValueError, match="|".join(set(extra) - set(VALUES))):
            parser.parse_json_file(json_file)
        assert parser.parse_json_file(json_file, allow_extra_keys=True) == expected()


def test_files_of_words_come_before_the_command_line(kind, tmp_path, monkeypatch):
    beside, first, second = (tmp_path / name for name in ("script.args", "first", "second"))
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "script.py"), "--max_steps", "9"])
    beside.write_text("--model tiny --max_steps 1 --seed 1\n--size 1")
    first.write_text("--seed 2 --size 2")
    second.write_text("--size 3")
    parser = kind(CLASSES)
    flagged = ["--argfile", str(first), "--max_steps", "8", "--argfile", str(second)]
    for options, found in (
        ({}, (9, 1, 1)),
        ({"args": ["--seed", "5"]}, (1, 5, 1)),
        ({"args": flagged, "args_file_flag": "--argfile"}, (8, 2, 3)),
        ({"args": ["--model", "b"], "args_filename": str(first)}, (-1, 2, 2)),
        ({"args": ["--model", "b"], "look_for_args_file": False}, (-1, 42, None)),
    ):
        model, data, args = parser.parse_args_into_dataclasses(**options)
        assert (args.max_steps, args.seed, data.size) == found
        assert model.model_name in ("tiny", "b")


def test_options_of_the_script_are_returned_too(kind):
    parser = kind(DataArguments)
    parser.add_argument("--mine", type=int)
    data, own = parser.parse_args_into_dataclasses(["--mine", "4", "--size", "2"])
    assert (data.size, own.mine) == (2, 4)
    result = parser.parse_args_into_dataclasses(["--rest", "1"], return_remaining_strings=True)
    assert (result[0], result[1].mine, result[2]) == (DataArguments(), None, ["--rest", "1"])


def test_choices_of_a_field_are_checked(kind):
    parser = kind(CLASSES)
    model, _, _ = parser.parse_args_into_dataclasses([*WORDS, "--dtype", "fp"])
    assert model.dtype == "fp"
    with pytest.raises((SystemExit, UsageError)):
        parser.parse_args_into_dataclasses([*WORDS, "--dtype", "int"])


def test_an_unknown_option_is_refused(kind):
    with pytest.raises((ValueError, UsageError), match="--max_stepps"):
        kind(CLASSES).parse_args_into_dataclasses([*WORDS, "--max_stepps", "3"])


@pytest.mark.parametrize("name", ["storage_options", "save_retention"])
def test_a_dict_is_given_as_json(kind, name, capsys):
    value = {"keep_every": 100}
    parser = kind(TrainingArguments)
    words = [f"--{name}", json.dumps(value)]
    assert getattr(parser.parse_args_into_dataclasses(words)[0], name) == value
    with pytest.raises((SystemExit, ConfigError)) as ended:
        parser.parse_args_into_dataclasses([f"--{name}", '{"keep_every": s3cr3t}'])
    if ended.type is SystemExit:
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.endswith('the value is not a dict as JSON, such as \'{"key": "value"}\'')
        assert f"argument --{name}" in line
        return
    assert f"`{name}`" in str(ended.value)
    assert name != "storage_options" or "s3cr3t" not in str(ended.value)


def test_the_help_of_several_dataclasses_is_printed(kind, capsys):
    with pytest.raises(SystemExit) as ended:
        kind(CLASSES).parse_args_into_dataclasses(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(f"--{one.name}" in text for cls in CLASSES for one in fields(cls))
    assert "100 % of the model" in text


class ConfigParser(HfArgumentParser):
    """Sets the values of a file as the defaults of options, as TRL's parser does."""

    def parse_with(self, words, config):
        remaining = dict(config)
        for action in self._actions:
            if action.dest in remaining:
                action.default, action.required = remaining.pop(action.dest), False
        assert not remaining
        return self.parse_args_into_dataclasses(words, look_for_args_file=False)


def test_values_of_a_file_are_the_defaults_of_options():
    config = {"model_name": "tiny", "learning_rate": "1e-4", "save_retention": {"keep_every": 9}}
    config |= {"storage_options": {"key": "a"}, "eval_strategy": "epoch", "report_to": "none"}
    _, _, args = ConfigParser(CLASSES).parse_with(
        ["--max_steps", "3", "--eval_strategy", "no"], config
    )
    assert (args.learning_rate, args.save_retention) == (1e-4, {"keep_every": 9})
    assert (args.storage_options, args.eval_strategy.value) == ({"key": "a"}, "no")
    assert (args.max_steps, args.report_to) == (3, [])


def test_the_parser_of_trl_takes_our_arguments(tmp_path):
    trl = pytest.importorskip("trl")
    config = tmp_path / "config.yaml"
    values = {"dataset_name": "me/data", "learning_rate": "1e-4", "report_to": "none"}
    values |= {"storage_options": {"key": "a"}, "save_retention": {"keep_every": 9}}
    config.write_text(yaml.safe_dump(values))
    parser = trl.TrlParser((trl.ScriptArguments, TrainingArguments, trl.ModelConfig))
    words = ["--config", str(config), "--max_steps", "3", "--model_name_or_path", "tiny"]
    script, args, model = parser.parse_args_and_config(words)
    assert (script.dataset_name, model.model_name_or_path) == ("me/data", "tiny")
    assert args == TrainingArguments(
        learning_rate=1e-4,
        max_steps=3,
        storage_options={"key": "a"},
        save_retention={"keep_every": 9},
    )


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


def test_our_parser_refuses_a_value_like_parse_arguments():
    parser = resilient.HfArgumentParser(CLASSES)
    for words, message in (
        (["--model", "m", "--max_steps", "three"], "`max_steps`='three'.*whole number"),
        (["--model", "m", "--optim", "sgdd"], "did you mean `sgd`.*`optim` is from --optim"),
        (["--model", "m", "--split", "dev"], "`split`='dev' is not accepted: use one of train"),
        ([], "`model_name` is required"),
    ):
        with pytest.raises(ConfigError, match=message):
            parser.parse_args_into_dataclasses(words, look_for_args_file=False)
    with pytest.raises(UsageError, match="is not an option; did you mean `--max_steps`"):
        parser.parse_args_into_dataclasses(["--max_stepss", "3"])
    with pytest.raises(ConfigError, match="both DataArguments and DataArguments have a field"):
        resilient.HfArgumentParser((DataArguments, DataArguments))


def test_our_parser_takes_old_names_and_enums(recwarn):
    parser = resilient.HfArgumentParser((DataArguments, TrainingArguments))
    words = ["--evaluation_strategy", "epoch", "--color", "blue"]
    data, args = parser.parse_args_into_dataclasses(words, look_for_args_file=False)
    assert (args.eval_strategy, data.color) == ("epoch", Color.BLUE)
    assert parser.parse_dict({"no_cuda": True, "color": "blue"})[1].use_cpu
    assert {str(one.message).partition(" is ")[0] for one in recwarn} == {
        "`evaluation_strategy`",
        "`no_cuda`",
    }


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
