from __future__ import annotations

import pytest
import torch

from resilient.train import session
from tests.unit.train.fakes import MemoryRepository, equal
from tests.unit.train.models import DieAfter, Dies, make_trainer

RECIPES = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3, "save_steps": 2},
    "momentum of sgd": {"optim": "sgd"},
    "cosine with warm-up": {"lr_scheduler_type": "cosine", "warmup_steps": 0.2},
    "fp16": {"fp16": True},
    "bf16": {"bf16": True},
    "workers": {"dataloader_num_workers": 2},
    "persistent workers": {
        "dataloader_num_workers": 2,
        "dataloader_persistent_workers": True,
        "dataloader_prefetch_factor": 3,
    },
    "drop last": {"dataloader_drop_last": True},
    "evaluation by epoch": {"eval_strategy": "epoch", "eval_size": 11},
    "best model": {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_size": 11,
        "load_best_model_at_end": True,
    },
    "by epoch": {"save_strategy": "epoch", "eval_strategy": "epoch", "eval_size": 11},
}


def train_through(folder, deaths, **options):
    """Train to the end through the deaths; return the last trainer and its repository."""
    repository = MemoryRepository()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "open_engine", repository.open)
        for step in deaths:
            with pytest.raises(Dies):
                make_trainer(folder, callbacks=[DieAfter(step)], **options).train()
        trainer = make_trainer(folder, **options)
        output = trainer.train()
    return trainer, repository, output


def comparable(repository):
    newest = max(repository.checkpoints)
    parts = dict(repository.checkpoints[newest])
    parts.pop("best")
    return newest.step, parts


@pytest.mark.parametrize("name", RECIPES)
def test_an_interrupted_run_equals_an_unbroken_one_bit_for_bit(tmp_path, name):
    options = RECIPES[name]
    unbroken, kept, straight = train_through(tmp_path, [], **options)
    deaths = [5, 9] if "accumulation" in name else [5, 14, 21]
    broken, repaired, resumed = train_through(tmp_path, deaths, **options)
    assert equal(unbroken.model.state_dict(), broken.model.state_dict())
    assert equal(comparable(kept)[1], comparable(repaired)[1])
    assert unbroken.state == broken.state
    assert straight.training_loss == resumed.training_loss
    assert straight.global_step == resumed.global_step


def test_dropout_makes_the_comparison_worth_something(tmp_path):
    one, _, _ = train_through(tmp_path, [], seed=1, data_seed=3)
    other, _, _ = train_through(tmp_path, [], seed=2, data_seed=3)
    assert not equal(one.model.state_dict(), other.model.state_dict())


def test_a_finished_run_trains_nothing_and_reports_success(tmp_path, repository):
    first = make_trainer(tmp_path).train()
    again = make_trainer(tmp_path)
    before = len(repository.checkpoints)
    output = again.train()
    assert output.global_step == first.global_step
    assert output.training_loss == first.training_loss
    assert output.metrics["train_steps_per_second"] == 0
    assert len(repository.checkpoints) == before


def test_a_finished_run_goes_on_when_given_more_epochs(tmp_path, repository):
    make_trainer(tmp_path, num_train_epochs=1).train()
    output = make_trainer(tmp_path, num_train_epochs=2).train()
    assert output.global_step == 26


def test_a_stretched_run_follows_the_new_schedule(tmp_path, repository):
    make_trainer(tmp_path, max_steps=4).train()
    trainer = make_trainer(tmp_path, max_steps=8, logging_steps=1)
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert rates[-4:] == pytest.approx([0.05 * (8 - step) / 8 for step in range(4, 8)])


def test_another_batch_size_loses_and_repeats_no_sample(tmp_path, repository, capsys):
    with pytest.raises(Dies):
        make_trainer(tmp_path, callbacks=[DieAfter(4)], num_train_epochs=1).train()
    trainer = make_trainer(tmp_path, per_device_train_batch_size=8, num_train_epochs=1)
    output = trainer.train()
    # 16 of 50 samples were trained on; the other 34 make five steps of at most 8.
    assert output.global_step == 4 + 5
    assert trainer.state.epoch == 1.0
    assert "per_device_train_batch_size 4 -> 8" in capsys.readouterr().err


def test_a_seed_that_may_change_does_not_change_the_order_of_the_run(tmp_path, repository):
    with pytest.raises(Dies):
        make_trainer(tmp_path, callbacks=[DieAfter(4)], data_seed=1).train()
    trainer = make_trainer(tmp_path, data_seed=2, resume_changes=["data_seed"])
    trainer.train()
    assert trainer.train_sampler.cursor.seed == 1


def test_false_starts_afresh_and_a_name_picks_a_checkpoint(tmp_path, repository):
    make_trainer(tmp_path, num_train_epochs=1).train()
    assert make_trainer(tmp_path, num_train_epochs=1).train(False).metrics["epoch"] == 1.0
    names = [str(one) for one in repository.checkpoints]
    assert "checkpoint-4-g2" in names
    picked = make_trainer(tmp_path, num_train_epochs=1, save_strategy="no")
    picked.train(str(tmp_path / "checkpoint-4-g1"))
    assert picked.state.global_step == 13


def test_registered_parts_are_saved_and_restored(tmp_path, repository):
    class Counter:
        def __init__(self):
            self.seen = torch.zeros(1)

        def state_dict(self):
            return {"seen": self.seen}

        def load_state_dict(self, state):
            self.seen.copy_(state["seen"])

    one, other = Counter(), Counter()
    trainer = make_trainer(tmp_path)
    trainer.register("counter", one, scope="rank")
    one.seen += 7
    trainer.train()
    trainer = make_trainer(tmp_path)
    trainer.register("counter", other, scope="rank")
    trainer.train()
    assert other.seen.item() == 7


def test_a_training_that_begins_afresh_in_the_same_process_counts_from_nothing(
    tmp_path, repository
):
    trainer = make_trainer(tmp_path, max_steps=4, logging_steps=1)
    for _ in range(2):
        repository.checkpoints.clear()
        output = trainer.train(resume_from_checkpoint=False)
        assert output.global_step == 4
        assert [one["step"] for one in trainer.state.log_history] == [1, 2, 3, 4, 4]
