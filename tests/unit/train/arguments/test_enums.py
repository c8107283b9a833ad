"""Values that are enums in Transformers are enums here, equal to their texts."""

from __future__ import annotations

import copy
import json
import pickle

import pytest

from resilient.errors import ConfigError
from resilient.train.arguments import TrainingArguments
from resilient.train.arguments.choices import CHOICES, ENUMS, IntervalStrategy, ParallelMode

training_args = pytest.importorskip("transformers.training_args")
trainer_utils = pytest.importorskip("transformers.trainer_utils")

THEIRS = {
    "eval_strategy": trainer_utils.IntervalStrategy,
    "hub_strategy": trainer_utils.HubStrategy,
    "logging_strategy": trainer_utils.IntervalStrategy,
    "lr_scheduler_type": trainer_utils.SchedulerType,
    "optim": training_args.OptimizerNames,
    "save_strategy": trainer_utils.SaveStrategy,
}
# A value for which the other defaults are accepted.
VALUES = {
    "eval_strategy": "epoch",
    "hub_strategy": "end",
    "logging_strategy": "epoch",
    "lr_scheduler_type": "cosine",
    "optim": "sgd",
    "save_strategy": "epoch",
}


def unpickled(value):
    return pickle.loads(pickle.dumps(value))  # noqa: S301 - the bytes are from this line


def test_enums_have_members_of_transformers():
    assert set(ENUMS) == set(THEIRS)
    for name, theirs in THEIRS.items():
        ours = ENUMS[name]
        assert ours.__name__ == theirs.__name__
        members = {key: member.value for key, member in ours.__members__.items()}
        theirs_by_name = {key: one.value for key, one in theirs.__members__.items()}
        assert members.items() >= theirs_by_name.items()
        assert set(CHOICES[name]) == set(members.values())
    assert set(training_args.ParallelMode.__members__) == set(ParallelMode.__members__)


@pytest.mark.parametrize("name", THEIRS)
def test_enum_behaves_as_in_transformers(name):
    text, theirs = VALUES[name], THEIRS[name](VALUES[name])
    values = [
        getattr(TrainingArguments(**{name: text}), name),
        getattr(TrainingArguments(**{name: theirs}), name),
    ]
    for assigned in (text, theirs):
        args = TrainingArguments()
        setattr(args, name, assigned)
        values.append(getattr(args, name))
    for value in values:
        assert isinstance(value, ENUMS[name])
        assert value.value == value == text == theirs == value
        assert {text: 1}[value] == {theirs: 1}[value] == {value: 1}[text] == 1
        assert (str(value), f"{value}") == (str(theirs), f"{theirs}")
        assert json.dumps(value) == json.dumps(theirs) == f'"{text}"'
        assert unpickled(value) is copy.deepcopy(value) is value
        assert repr(value) == repr(text)


def test_arguments_are_saved_as_texts():
    args = TrainingArguments(**VALUES)
    saved = args.to_dict()
    assert {name: saved[name] for name in VALUES} == VALUES
    assert {type(saved[name]) for name in VALUES} == {str}
    assert {type(args.to_sanitized_dict()[name]) for name in VALUES} == {str}
    assert TrainingArguments(**saved) == args == unpickled(args)


def test_parallel_mode_equals_members_of_transformers(monkeypatch):
    theirs = training_args.ParallelMode
    mode = TrainingArguments().parallel_mode
    assert mode == theirs.NOT_PARALLEL == mode == "not_parallel"
    assert mode not in (theirs.DISTRIBUTED, "distributed", trainer_utils.IntervalStrategy.NO)
    assert mode.value == "not_parallel"
    assert hash(mode) == hash("not_parallel")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert TrainingArguments(ddp_backend="gloo").parallel_mode == theirs.DISTRIBUTED


def test_unknown_text_is_refused_with_choices():
    with pytest.raises(ValueError, match="use one of no, steps, epoch; did you mean `steps`"):
        IntervalStrategy("step")
    with pytest.raises(ConfigError, match=r"`optim`='sgdd' .* did you mean `sgd`"):
        TrainingArguments(optim="sgdd")
