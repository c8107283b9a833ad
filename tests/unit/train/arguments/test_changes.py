"""What a resume does with arguments that differ from the checkpoint's."""

from __future__ import annotations

import dataclasses

import pytest

from resilient.errors import ConfigError
from resilient.train.arguments import TrainingArguments
from resilient.train.arguments.resume_rules import (
    _OF_IMPORT,
    FIXED,
    FREE,
    REFUSED,
    REPORTED,
    RULES,
    changes_at_import,
    changes_between,
    require_resumable,
)
from tests.unit.train.models import DieAfter, Dies, make_trainer

FIELDS = {one.name for one in dataclasses.fields(TrainingArguments)}


def of_kind(kind):
    return sorted(name for name, rule in RULES.items() if rule.kind == kind)


def changed(name, allowed=None):
    changes = changes_between({"same": 1, name: "before"}, {"same": 1, name: "now", "lost": 2})
    require_resumable(changes, allowed)
    return changes


def test_every_argument_has_a_rule_and_a_reason():
    assert set(RULES) == FIELDS
    assert {rule.kind for rule in RULES.values()} == {FREE, REPORTED, REFUSED, FIXED}
    assert all(rule.reason for rule in RULES.values())


@pytest.mark.parametrize("name", [*of_kind(FREE), *of_kind(REPORTED)])
def test_what_is_free_or_told_goes_on(name):
    assert list(changed(name)) == [name]


@pytest.mark.parametrize("name", of_kind(REFUSED))
def test_what_is_refused_is_refused_unless_it_is_allowed_by_name(name):
    with pytest.raises(ConfigError, match=f"`?{name}`? 'before' -> 'now': ") as refused:
        changed(name)
    assert refused.value.hint.endswith(f"TrainingArguments(resume_changes={[name]})")
    with pytest.raises(ConfigError):
        changed(name, ["learning_rate"])
    for allowed in ("all", name, [name], ["all"]):
        assert list(changed(name, allowed)) == [name]


@pytest.mark.parametrize("name", of_kind(FIXED))
def test_what_is_fixed_cannot_be_allowed(name):
    with pytest.raises(ConfigError, match="another optimizer") as refused:
        changed(name, "all")
    assert "resume_changes" not in refused.value.hint


def test_an_optimizer_with_the_same_state_goes_on():
    require_resumable(changes_between({"optim": "adamw_torch"}, {"optim": "adamw_torch_fused"}), [])
    with pytest.raises(ConfigError):
        require_resumable(changes_between({"optim": "adamw_torch"}, {"optim": "sgd"}), [])


@pytest.mark.parametrize(
    ("old", "new", "kind"), [(0, 2, REPORTED), (1, 0, REPORTED), (1, 2, FREE), (4, 1, FREE)]
)
def test_loading_in_other_processes_is_told_because_a_dataset_draws_other_numbers_there(
    old, new, kind
):
    name = "dataloader_num_workers"
    change = changes_between({name: old}, {name: new})[name]
    assert change.rule.kind == kind
    assert ("draws others" in change.shown(name)) == (kind == REPORTED)


def test_other_labels_are_told_because_they_decide_which_columns_are_kept():
    assert RULES["label_names"].kind == REPORTED


def test_an_argument_of_a_subclass_is_told():
    (change,) = changes_between({"extra": 1}, {"extra": 2}).values()
    assert change.rule.kind == REPORTED


def test_equal_arguments_and_those_that_one_side_lacks_are_no_difference():
    assert changes_between({"seed": 1, "old": 2}, {"seed": 1, "new": 3}) == {}


def test_a_name_to_allow_that_is_no_argument_is_refused():
    with pytest.raises(ConfigError, match="did you mean `data_seed`"):
        TrainingArguments(resume_changes=["data_sed"])


RUN = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 8}


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ({}, {}, []),
        ({"seed": 1}, {"seed": 2}, ["seed"]),
        ({"lr_scheduler_kwargs": None}, {"lr_scheduler_kwargs": {}}, []),
        ({"warmup_ratio": 0.25, "warmup_steps": 0}, {"warmup_steps": 0.25}, []),
        ({"warmup_ratio": 0.25, "warmup_steps": 0}, {"warmup_steps": 0}, ["warmup_steps"]),
        ({"num_train_epochs": 1.0}, {"num_train_epochs": 2.0}, []),  # max_steps rules
        (
            {"num_train_epochs": 1.0, "max_steps": -1},
            {"num_train_epochs": 2.0, "max_steps": -1},
            ["num_train_epochs"],
        ),
        (
            {"max_steps": -1, "num_train_epochs": 1.0},
            {"num_train_epochs": 2.0},
            ["max_steps", "num_train_epochs"],
        ),
        ({"logging_steps": 1, "output_dir": "a"}, {"logging_steps": 2, "output_dir": "b"}, []),
        ({}, {"global_train_batch_size": 64, "gradient_accumulation_steps": 4}, []),
        ({"some_option": 1}, {"some_option": 2}, []),
    ],
)
def test_changes_at_import_are_those_that_change_the_result(old, new, names):
    changes = changes_at_import({**RUN, **old}, {**RUN, **new})
    assert sorted(changes) == names
    assert all(change.rule.kind == REPORTED for change in changes.values())


def test_changes_at_import_with_equal_steps_say_so():
    new = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    reasons = {change.rule.reason for change in changes_at_import(RUN, {**RUN, **new}).values()}
    assert len(reasons) == 1
    assert "each step has the same samples" in reasons.pop()
    (change,) = changes_at_import(RUN, {**RUN, "gradient_accumulation_steps": 1}).values()
    assert "Transformers counts batches" in change.rule.reason
    # Every argument that an import compares has a rule.
    assert set(_OF_IMPORT) <= set(RULES)


def interrupted(folder, **options):
    with pytest.raises(Dies):
        make_trainer(folder, callbacks=[DieAfter(4)], **options).train()


def test_a_resume_tells_all_differences_in_one_block_before_it_refuses(
    tmp_path, repository, capsys
):
    interrupted(tmp_path, data_seed=1)
    capsys.readouterr()
    trainer = make_trainer(tmp_path, data_seed=2, max_grad_norm=0.5, logging_steps=3)
    weights = {name: one.clone() for name, one in trainer.model.state_dict().items()}
    with pytest.raises(ConfigError, match="data_seed 1 -> 2"):
        trainer.train()
    said = capsys.readouterr().err
    assert "arguments differ from the checkpoint's:\n  " in said
    assert "\n  data_seed 1 -> 2: the run continues with the checkpoint's random numbers" in said
    assert "\n  max_grad_norm 1.0 -> 0.5: the loss and its gradients differ" in said
    assert trainer.state.global_step == 0
    assert all(one.equal(weights[name]) for name, one in trainer.model.state_dict().items())


def test_another_optimizer_is_refused_by_name(tmp_path, repository):
    interrupted(tmp_path)
    with pytest.raises(ConfigError, match="optim 'adamw_torch_fused' -> 'sgd'"):
        make_trainer(tmp_path, optim="sgd").train()


@pytest.mark.parametrize(
    ("name", "value"), [("learning_rate", 0.5), ("weight_decay", 0.5), ("adam_beta2", 0.5)]
)
def test_what_the_optimizers_state_holds_goes_on_as_told(tmp_path, repository, name, value):
    interrupted(tmp_path, num_train_epochs=1)
    unbroken = make_trainer(tmp_path, num_train_epochs=1)
    group = {"learning_rate": "initial_lr", "adam_beta2": "betas"}.get(name, name)
    kept = unbroken.create_optimizer().param_groups[0].get(group, unbroken.args.learning_rate)
    trainer = make_trainer(tmp_path, num_train_epochs=1, **{name: value})
    trainer.train()
    assert trainer.optimizer.param_groups[0][group] == kept


def test_a_schedule_that_changed_is_followed_from_there(tmp_path, repository):
    interrupted(tmp_path, num_train_epochs=1)
    trainer = make_trainer(
        tmp_path, num_train_epochs=1, lr_scheduler_type="constant", logging_steps=1
    )
    trainer.train()
    rates = [one["learning_rate"] for one in trainer.state.log_history if "loss" in one]
    # The step after the resume still has the rate that the saved optimizer held.
    assert len(set(rates[-5:])) == 1
    assert rates[-1] == trainer.args.learning_rate


def test_the_variant_of_the_same_optimizer_is_the_checkpoints(tmp_path, repository):
    interrupted(tmp_path)
    trainer = make_trainer(tmp_path, optim="adamw_torch")
    trainer.train()
    assert trainer.optimizer.param_groups[0]["fused"]
