"""Fields of a subclass of TrainingArguments in a checkpoint: as JSON, or refused at once."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from resilient import TrainingArguments
from resilient.errors import ConfigError
from tests.unit.train.models import make_trainer


class Mode(enum.Enum):
    FAST = "fast"


class Level(enum.IntEnum):
    HIGH = 3


@dataclasses.dataclass
class Inner:
    size: int = 1
    where: Path = Path("a/b")


@dataclasses.dataclass
class Arguments(TrainingArguments):
    value: Any = None


VALUES = [
    (float("inf"), "inf"),
    ({"cap": float("nan"), "low": np.float64("-inf")}, {"cap": "nan", "low": "-inf"}),
    (torch.float16, "float16"),
    ({"dtype": torch.bfloat16}, {"dtype": "bfloat16"}),
    (torch.device("cuda", 1), "cuda:1"),
    (Path("a/b"), "a/b"),
    (Mode.FAST, "fast"),
    ([Mode.FAST], ["fast"]),
    (Level.HIGH, 3),
    (Inner(), {"size": 1, "where": "a/b"}),
    ({"b", "a"}, ["a", "b"]),
    ((1, (2, 3)), [1, [2, 3]]),
    ({1: "x", None: "y", False: "z"}, {"1": "x", "null": "y", "false": "z"}),
    (dt.datetime(2026, 1, 2, 3, 4, tzinfo=dt.UTC), "2026-01-02T03:04:00+00:00"),
    (dt.timedelta(minutes=2), 120.0),
    (Decimal("0.5"), "0.5"),
    (np.float32(0.5), 0.5),
    (np.int64(3), 3),
    (np.array([1.5, 2.5]), [1.5, 2.5]),
    (torch.tensor(2), 2),
    (range(3), [0, 1, 2]),
    (torch.nn.functional.relu, "torch.nn.functional.relu"),
    (len, "builtins.len"),
    (torch.nn.ReLU, "torch.nn.modules.activation.ReLU"),
]


@pytest.mark.parametrize(("value", "shown"), VALUES, ids=lambda one: str(type(one).__name__))
def test_to_dict_subclass_field_is_json(value, shown):
    args = Arguments(value=value)
    assert args.to_dict()["value"] == shown
    assert json.loads(args.to_json_string())["value"] == shown
    assert args.value is value


@pytest.mark.parametrize("value", [object(), b"raw", re.compile("a"), {"deep": [iter(())]}])
def test_arguments_field_not_json_refused(value):
    with pytest.raises(ConfigError, match="`value` cannot be saved") as refused:
        Arguments(value=value)
    assert "init=False" in refused.value.hint


def test_arguments_field_in_circle_refused():
    circle = []
    circle.append(circle)
    with pytest.raises(ConfigError, match="`value` cannot be saved"):
        Arguments(value=circle)


@dataclasses.dataclass
class Hidden(TrainingArguments):
    api_token: str = "hidden"  # noqa: S105 - nobody's
    private: Any = dataclasses.field(default=None, init=False)


@dataclasses.dataclass
class HiddenOfTheirs(transformers.TrainingArguments):
    api_token: str = "hidden"  # noqa: S105 - nobody's
    private: Any = dataclasses.field(default=None, init=False)


def test_to_dict_hides_tokens_as_transformers():
    ours = Hidden()
    ours.private = object()
    theirs = HiddenOfTheirs("out", use_cpu=True).to_dict()
    assert ours.to_dict()["api_token"] == theirs["api_token"] == "<API_TOKEN>"  # noqa: S105 - a placeholder
    assert "private" not in ours.to_dict()
    assert "private" not in theirs


def test_config_error_is_value_error():
    with pytest.raises(ValueError, match="no_such"):
        TrainingArguments(no_such=1)


def test_infinite_argument_is_saved_and_resumed(tmp_path):
    def trainer(steps):
        made = make_trainer(tmp_path, max_steps=steps)
        made.args = Arguments(**{**vars_of(made.args), "value": float("inf")})
        return made

    trainer(4).train()
    again = trainer(8)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 8
    assert again.args.value == float("inf")


def vars_of(args):
    return {
        field.name: getattr(args, field.name) for field in dataclasses.fields(args) if field.init
    }
