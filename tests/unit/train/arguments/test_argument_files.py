from __future__ import annotations

import sys

import pytest

from resilient.errors import ConfigError
from resilient.train.arguments import TrainingArguments

TOML = """\
output_dir = "out"
learning_rate = 1e-4
max_steps = 10
fp16 = true

[lr_scheduler_kwargs]
"""
YAML = """\
output_dir: out
# PyYAML takes this number for text
learning_rate: 1e-4
max_steps: 10
fp16: true
lr_scheduler_kwargs: {}
"""
JSON = """{
  "output_dir": "out",
  "learning_rate": 1e-4,
  "max_steps": 10,
  "fp16": true,
  "lr_scheduler_kwargs": {}
}
"""
WRITTEN = {"toml": TOML, "yaml": YAML, "yml": YAML, "json": JSON}
MEANT = TrainingArguments(
    "out", learning_rate=1e-4, max_steps=10, fp16=True, lr_scheduler_kwargs={}
)


def written(folder, suffix, text):
    path = folder / f"run.{suffix}"
    path.write_text(text)
    return path


@pytest.mark.parametrize("suffix", WRITTEN)
def test_a_file_says_the_same_in_each_format(tmp_path, suffix):
    path = written(tmp_path, suffix, WRITTEN[suffix])
    assert TrainingArguments.from_file(path) == MEANT
    assert TrainingArguments.from_file(path, max_steps=11).max_steps == 11


@pytest.mark.parametrize("suffix", WRITTEN)
def test_an_unknown_key_is_refused_with_file_and_line(tmp_path, suffix):
    path = written(tmp_path, suffix, WRITTEN[suffix].replace("max_steps", "max_step"))
    line = 4 if suffix in ("yaml", "yml") else 3 if suffix == "toml" else 4
    with pytest.raises(ConfigError) as refused:
        TrainingArguments.from_file(path)
    assert refused.value.message == (
        f"{path}, line {line}: `max_step` is not an argument; did you mean `max_steps`?"
    )


@pytest.mark.parametrize("suffix", WRITTEN)
def test_a_value_that_is_not_accepted_is_refused_with_file_and_line(tmp_path, suffix):
    path = written(tmp_path, suffix, WRITTEN[suffix].replace("1e-4", "-1.0"))
    line = 3 if suffix in ("yaml", "yml", "json") else 2
    with pytest.raises(ConfigError) as refused:
        TrainingArguments.from_file(path)
    assert "`learning_rate`=-1.0 is not accepted" in refused.value.message
    assert f"`learning_rate` is from {path}, line {line}" in refused.value.message


def test_text_that_spells_no_number_is_refused_with_its_line(tmp_path):
    path = written(tmp_path, "yaml", "seed: 1\nlearning_rate: fast\n")
    with pytest.raises(ConfigError, match="line 2: `learning_rate`='fast' is not accepted"):
        TrainingArguments.from_file(path)


def test_text_for_a_field_of_text_stays_text(tmp_path):
    path = written(tmp_path, "yaml", "run_name: '3'\noutput_dir: none\n")
    args = TrainingArguments.from_file(path)
    assert (args.run_name, args.output_dir) == ("3", "none")


@pytest.mark.parametrize(
    ("suffix", "text", "said"),
    [
        ("toml", "seed = =", "is not TOML: .*line 1"),
        ("toml", "seed = 1\nseed = 2\n", "is not TOML"),
        ("json", '{"seed": 1, "seed": 2}', "has `seed` twice"),
        ("yaml", "seed: 1\nseed: 2\n", "has `seed` twice"),
        ("yaml", "seed: [", "is not YAML: .*line 1"),
        ("yaml", "- seed\n", "holds no arguments"),
        ("yaml", "1: 2\n", "holds no arguments"),
        ("yaml", "!!python/object/apply:os.getcwd []", "is not YAML"),
        ("json", "[1]", "holds no arguments"),
        ("json", '{"seed": ' + "[" * 100_000, "is not JSON"),
        ("ini", "seed = 1", "name it .toml, .yaml or .json"),
        ("json", '{"seed": "' + "x" * (1 << 20) + '"}', "longer than 1048576 bytes"),
    ],
)
def test_what_is_no_file_of_arguments_is_refused_by_name(tmp_path, suffix, text, said):
    path = written(tmp_path, suffix, text)
    with pytest.raises(ConfigError, match=said) as refused:
        TrainingArguments.from_file(path)
    assert str(path) in refused.value.message


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read arguments from .*run\.toml"):
        TrainingArguments.from_file(tmp_path / "run.toml")


def test_an_empty_file_says_nothing(tmp_path):
    assert TrainingArguments.from_file(written(tmp_path, "yaml", "")) == TrainingArguments()


def test_an_old_name_in_a_file_is_taken_and_warned_of(tmp_path):
    path = written(tmp_path, "yaml", "warmup_ratio: 1e-1\nevaluation_strategy: epoch\n")
    with pytest.warns(FutureWarning, match="is deprecated"):
        args = TrainingArguments.from_file(path)
    assert (args.warmup_steps, args.eval_strategy) == (0.1, "epoch")
    path = written(tmp_path, "yaml", "seed: 1\nper_gpu_train_batch_size: 0\n")
    with (
        pytest.warns(FutureWarning, match="is deprecated"),
        pytest.raises(ConfigError, match=r"run\.yaml, line 2"),
    ):
        TrainingArguments.from_file(path)


def test_without_pyyaml_the_command_that_installs_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError) as refused:
        TrainingArguments.from_file(written(tmp_path, "yaml", "seed: 1"))
    assert refused.value.hint == "pip install pyyaml"
