from __future__ import annotations

import enum
from dataclasses import dataclass, field, fields
from typing import Literal

import pytest

from resilient.errors import ConfigError, UsageError
from resilient.train.arguments import TrainingArguments, parse_arguments
from resilient.train.arguments.deprecated import OLD_NAMES
from resilient.train.arguments.value_types import is_secret


class Size(enum.Enum):
    SMALL = "small"
    LARGE = "large"


@dataclass
class ModelArguments:
    model_name: str
    size: Size = Size.SMALL
    layers: list[int] = field(default_factory=lambda: [1])
    pooling: Literal["mean", "max"] = "mean"
    dropout_rate: float | None = field(default=None, metadata={"help": "100% of 1"})


def told(*words):
    return TrainingArguments.from_command_line(words)


@pytest.mark.parametrize("spelled", ["--learning-rate", "--learning_rate"])
def test_an_option_has_both_spellings(spelled):
    assert told(spelled, "1e-4").learning_rate == 1e-4
    assert told(f"{spelled}=1e-4").learning_rate == 1e-4


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--fp16"], "fp16", True),
        (["--fp16", "false"], "fp16", False),
        (["--no-dataloader-pin-memory"], "dataloader_pin_memory", False),
        (["--no_dataloader_pin_memory"], "dataloader_pin_memory", False),
        (["--disable-tqdm", "none"], "disable_tqdm", None),
        (["--disable-tqdm"], "disable_tqdm", True),
        (["--max-steps", "-1"], "max_steps", -1),
        (["--warmup-steps", "0.1"], "warmup_steps", 0.1),
        (["--eval-steps", "none"], "eval_steps", None),
        (["--run-name", "7"], "run_name", "7"),
        (["--resume-changes", "seed", "data_seed"], "resume_changes", ["seed", "data_seed"]),
        (["--resume-changes", "all"], "resume_changes", "all"),
        (["--save-retention", '{"keep_every": 5}'], "save_retention", {"keep_every": 5}),
        (["--report-to", "none"], "report_to", []),
        (["--fsdp", "false"], "fsdp", None),
    ],
)
def test_words_become_values_of_the_fields_types(words, name, value):
    args = told(*words)
    assert getattr(args, name) == value
    assert type(getattr(args, name)) is type(value)


def test_every_field_that_is_not_secret_has_an_option(capsys):
    with pytest.raises(SystemExit) as ended:
        told("--help")
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for one in fields(TrainingArguments):
        option = f"--{one.name.replace('_', '-')} "
        assert (option in text) is not is_secret(one), one.name
    assert "[default: 5e-05]" in text
    assert not any(f"--{name} " in text for name in OLD_NAMES)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--lerning-rate", "1"],
            "`--lerning-rate` is not an option; did you mean `--learning-rate`",
        ),
        (["--lerning_rate=1"], "did you mean `--learning-rate`"),
        (["--learning-rate"], "expected one argument"),
        (["--learn", "1"], "`--learn` is not an option"),
        (["stray"], "`stray` is not an option"),
        (["--storage-options", "{}"], "is not an option"),
    ],
)
def test_an_option_that_is_not_understood_is_a_usage_error(words, said):
    with pytest.raises(UsageError, match=said):
        told(*words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--learning-rate", "fast"], "`learning_rate`='fast' is not accepted: use a number"),
        (["--fp16", "maybe"], "use True or False"),
        (
            ["--learning-rate=-1"],
            r"`learning_rate`=-1 .* \(`learning_rate` is from --learning-rate",
        ),
        (["--save-retention", "{"], "use a dict"),
        (["--max-steps", "1.5"], "use a whole number"),
    ],
)
def test_a_value_that_is_not_accepted_is_named(words, said):
    with pytest.raises(ConfigError, match=said):
        told(*words)


def test_the_command_line_wins_over_the_file_and_the_file_over_the_default(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("learning_rate = 1e-3\nmax_steps = 7\n")
    args = told("--config", str(file), "--max-steps", "9")
    assert (args.learning_rate, args.max_steps, args.seed) == (1e-3, 9, 42)


def test_an_old_name_on_the_command_line_wins_over_the_new_one_in_the_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('eval_strategy = "epoch"\n')
    with pytest.warns(FutureWarning, match="`evaluation_strategy` is deprecated"):
        args = told("--config", str(file), "--evaluation_strategy", "steps")
    assert args.eval_strategy == "steps"
    with pytest.warns(FutureWarning, match="`no_cuda` is deprecated"):
        assert told("--no_cuda").use_cpu is True


def test_where_a_refused_value_comes_from_is_said_for_file_and_command_line(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("seed = 1\nfp16 = true\n")
    with pytest.raises(ConfigError) as refused:
        told("--config", str(file), "--bf16")
    assert f"`fp16` is from {file}, line 2" in refused.value.message
    assert "`bf16` is from --bf16" in refused.value.message


def test_options_are_split_among_dataclasses(tmp_path):
    file = tmp_path / "run.json"
    file.write_text('{"model_name": "a", "seed": 3, "size": "large"}')
    words = ["--config", str(file), "--layers", "2", "3", "--pooling", "max", "--max-steps", "5"]
    args, mine = parse_arguments(TrainingArguments, ModelArguments, argv=words)
    assert (args.seed, args.max_steps) == (3, 5)
    assert mine == ModelArguments("a", Size.LARGE, [2, 3], "max")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "`model_name` is required"),
        (["--model-name", "a", "--pooling", "min"], "use one of mean, max"),
        (["--model-name", "a", "--size", "huge"], "use one of small, large"),
        (["--model-name", "a", "--layers", "2", "x"], "`layers`='x'"),
    ],
)
def test_a_dataclass_of_yours_is_checked_too(words, said):
    with pytest.raises(ConfigError, match=said):
        parse_arguments(TrainingArguments, ModelArguments, argv=words)


def test_two_fields_of_one_name_are_refused():
    @dataclass
    class Other:
        seed: int = 1

    with pytest.raises(ConfigError, match="both TrainingArguments and Other have a field `seed`"):
        parse_arguments(TrainingArguments, Other, argv=[])


def test_the_words_of_this_process_are_taken_by_default(monkeypatch):
    monkeypatch.setattr("sys.argv", ["script.py", "--seed", "5"])
    assert TrainingArguments.from_command_line().seed == 5
