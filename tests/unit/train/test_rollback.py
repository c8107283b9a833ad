"""A broken loss: back to the checkpoint before it, the data since left out, exactly."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from resilient import Trainer, TrainingArguments
from resilient.checkpoint.catalog import lineage
from resilient.checkpoint.ledger_audit import audit
from resilient.errors import ConfigError, NumbersBroken, Preempted, SaveFailed
from resilient.storage.open import open_store
from resilient.train.data.ordering import epoch_order
from resilient.train.loss_guard import LOSSES_TO_LEARN, LossDiverged, LossGuard
from resilient.train.preemption import StopCoordinator

SAMPLES, BATCH, SEED = 96, 4, 7
ORDER = epoch_order(SAMPLES, SEED, 0).tolist()


class Poisoned(Dataset):
    """Samples 0..n whose target is the mean of their inputs; some targets are poison."""

    def __init__(self, poison):
        self.x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
        self.poison = poison

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        target = self.poison.get(index, float(self.x[index].mean()))
        return {"x": self.x[index], "y": torch.tensor(target), "index": torch.tensor(index)}


class Fit(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(6, 1)

    def forward(self, x, y, index=None):
        return {"loss": (self.layer(x).squeeze(-1) - y).square().mean()}


class Recording(Trainer):
    """Remembers, with its checkpoints, which samples were trained on."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = Seen()
        self.register("seen", self.seen)

    def training_step(self, model, inputs, *counted):
        self.seen.indexes += inputs.pop("index").tolist()
        return super().training_step(model, inputs, *counted)


class Seen:
    def __init__(self):
        self.indexes = []

    def state_dict(self):
        return {"indexes": list(self.indexes)}

    def load_state_dict(self, state):
        self.indexes = list(state["indexes"])


def poison(step, value=math.nan):
    """Return poison for one sample of a step of the first epoch."""
    return {ORDER[(step - 1) * BATCH + 1]: value}


def trainer_for(folder, poisoned, kind=Recording, **options):
    options = {
        "max_steps": 20,
        "save_steps": 4,
        "rollback_on": "nan",
        "gradient_accumulation_steps": 1,
        **options,
    }
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH // options["gradient_accumulation_steps"],
        logging_steps=4,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        seed=SEED,
        remove_unused_columns=False,
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    return kind(Fit(), arguments, train_dataset=Poisoned(poisoned))


def told(folder, name="TrainingRolledBack"):
    lines = (folder / "events" / "rank-0.jsonl").read_text().splitlines()
    return [one for one in map(json.loads, lines) if one["event"] == name]


def proven(folder):
    store = open_store(str(folder))
    found = audit(store, lineage(store).candidates)
    assert found.is_proven, found.flaws
    return found


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("workers", [0, 2])
def test_what_led_to_a_loss_that_is_no_number_is_left_out_exactly(tmp_path, accumulation, workers):
    trainer = trainer_for(
        tmp_path,
        poison(11),
        gradient_accumulation_steps=accumulation,
        dataloader_num_workers=workers,
    )
    assert trainer.train().global_step == 20
    # Steps 9 to 11 are left out; twelve more follow the checkpoint of step 8.
    kept = ORDER[: 8 * BATCH] + ORDER[11 * BATCH : 23 * BATCH]
    assert trainer.seen.indexes == kept
    [event] = told(tmp_path)
    assert event["global_step"] == 11
    assert event["checkpoint"] == "checkpoint-8-g1"
    assert event["skipped"] == [0, 32, 0, 44]
    assert (event["times"], event["limit"]) == (1, 3)
    assert all(torch.isfinite(one).all() for one in trainer.model.parameters())
    # The new life is a generation of its own, with the old step's checkpoint as its parent.
    assert [one["cause"] for one in told(tmp_path, "GenerationClaimed")] == ["start", "rollback"]
    assert (tmp_path / "checkpoint-8-g2" / "manifest.json").exists()
    proof = proven(tmp_path)
    assert (proof.left_out, proof.lives) == ({"broken loss": 12}, (1, 2))


def test_the_weights_are_those_of_a_run_that_never_saw_the_data(tmp_path):
    broken = trainer_for(tmp_path / "a", poison(11))
    broken.train()
    clean = trainer_for(tmp_path / "b", {}, rollback_on="off", max_steps=8)
    clean.train()
    clean = trainer_for(tmp_path / "b", {}, rollback_on="off", resume_changes="all")

    class Jump:
        """Moves the cursor as a rollback does."""

        def on_train_begin(self, *_args, **_more):
            clean.train_sampler.cursor.skip_to(0, 11 * BATCH)

    clean.add_callback(Jump())
    clean.train()
    assert clean.seen.indexes == broken.seen.indexes
    for mine, theirs in zip(broken.model.parameters(), clean.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_process_that_dies_after_going_back_does_not_meet_the_data_again(tmp_path):
    trainer = trainer_for(tmp_path, poison(11))

    class Dies:
        def on_step_end(self, _args, state, *_more, **_kwargs):
            if told(tmp_path) and state.global_step == 9:
                raise KeyboardInterrupt

    trainer.add_callback(Dies())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    again = trainer_for(tmp_path, poison(11))
    assert again.train().global_step == 20
    assert len(told(tmp_path)) == 1
    assert again.seen.indexes == ORDER[: 8 * BATCH] + ORDER[11 * BATCH : 23 * BATCH]
    assert again.train_sampler.cursor.skipped == [[0, 32, 0, 44]]


def test_a_run_over_epochs_ends_with_its_data(tmp_path):
    trainer = trainer_for(tmp_path, poison(11), max_steps=-1, num_train_epochs=1)
    assert trainer.train().global_step == SAMPLES // BATCH - 3
    assert trainer.seen.indexes == ORDER[: 8 * BATCH] + ORDER[11 * BATCH :]


class BreaksLater(Recording):
    """Its data is poison in the second step of the second epoch, once."""

    def training_step(self, model, inputs, *counted):
        if self.state.global_step == 25 and not self.train_sampler.cursor.skipped:
            inputs["y"] *= math.nan
        return super().training_step(model, inputs, *counted)


def test_the_rest_of_an_epoch_is_left_out_too(tmp_path):
    trainer = trainer_for(tmp_path, {}, kind=BreaksLater, save_steps=20, max_steps=30)
    trainer.train()
    # Twenty steps, the other four of the epoch and two of the next left out, then ten.
    second = epoch_order(SAMPLES, SEED, 1).tolist()
    assert trainer.seen.indexes == ORDER[: 20 * BATCH] + second[2 * BATCH : 12 * BATCH]
    assert told(tmp_path)[0]["skipped"] == [0, 80, 1, 8]
    proof = proven(tmp_path)
    assert proof.left_out == {"broken loss": 16 + 8}
    assert [one.is_complete for one in proof.epochs] == [True, False]


def test_a_save_that_failed_is_nothing_to_go_back_to(tmp_path, monkeypatch):
    from resilient.checkpoint.save import persist

    commit = persist.commit

    def failing(store, manifest, *rest, **how):
        if (manifest.checkpoint.generation, manifest.checkpoint.step) == (1, 8):
            raise SaveFailed("no")
        commit(store, manifest, *rest, **how)

    monkeypatch.setattr(persist, "commit", failing)
    trainer = trainer_for(tmp_path, poison(11), on_save_failure="continue")
    trainer.train()
    assert told(tmp_path)[0]["checkpoint"] == "checkpoint-4-g1"
    assert (
        trainer.seen.indexes
        == ORDER[: 4 * BATCH]
        + ORDER[11 * BATCH :]
        + (epoch_order(SAMPLES, SEED, 1).tolist()[: 3 * BATCH])
    )
    assert proven(tmp_path).left_out == {"broken loss": 7 * BATCH}


def test_a_stop_that_was_agreed_on_is_not_put_off_by_going_back(tmp_path, monkeypatch):
    gates, start = [], StopCoordinator.start
    monkeypatch.setattr(
        StopCoordinator, "start", lambda gate, *more: gates.append(gate) or start(gate, *more)
    )

    class Asked(Recording):
        def training_step(self, model, inputs, *counted):
            if inputs["y"].isnan().any():
                gates[0].request_stop("a test")
            return super().training_step(model, inputs, *counted)

    with pytest.raises(Preempted, match="after step 8"):
        trainer_for(tmp_path, poison(11), kind=Asked).train()
    assert proven(tmp_path).left_out == {"broken loss": 12}


def test_with_canonical_reduction_too(tmp_path):
    options = {"reduction": "canonical", "global_train_batch_size": 2 * BATCH}
    trainer = trainer_for(tmp_path, poison(21), max_steps=11, **options)
    trainer.train()
    assert told(tmp_path)[0]["skipped"] == [0, 8 * 2 * BATCH, 0, 11 * 2 * BATCH]
    second = epoch_order(SAMPLES, SEED, 1).tolist()
    assert trainer.seen.indexes == ORDER[: 16 * BATCH] + ORDER[22 * BATCH :] + second[: 4 * BATCH]
    assert proven(tmp_path).left_out == {"broken loss": 3 * 2 * BATCH}


def test_too_often_is_too_often(tmp_path):
    poisoned = poison(6) | poison(10) | poison(14)
    trainer = trainer_for(tmp_path, poisoned, rollback_limit=2)
    with pytest.raises(NumbersBroken, match="already went back 2 times") as raised:
        trainer.train()
    assert raised.value.exit_code == 70
    assert len(told(tmp_path)) == 2


def test_without_a_checkpoint_there_is_no_way_back(tmp_path):
    with pytest.raises(NumbersBroken, match="no checkpoint to go back to"):
        trainer_for(tmp_path, poison(3)).train()


def test_by_default_nothing_goes_back(tmp_path):
    trainer = trainer_for(tmp_path, poison(11), rollback_on="off")
    assert trainer.train().global_step == 20
    assert told(tmp_path) == []


def test_a_spike_is_left_out_too(tmp_path):
    trainer = trainer_for(tmp_path, poison(19, 300.0), rollback_on="spike", max_steps=22)
    trainer.train()
    assert "above the limit" in told(tmp_path)[0]["reason"]
    assert trainer.seen.indexes[16 * BATCH :] == (
        ORDER[19 * BATCH :] + epoch_order(SAMPLES, SEED, 1).tolist()[:BATCH]
    )
    plain = trainer_for(tmp_path / "b", poison(19, 300.0), max_steps=22)
    plain.train()
    assert told(tmp_path / "b") == []


@pytest.mark.parametrize(
    "options", [{"save_strategy": "no"}, {"rollback_on": "inf"}, {"rollback_limit": 0}]
)
def test_what_cannot_go_back_is_refused(tmp_path, options):
    with pytest.raises(ConfigError, match="rollback"):
        trainer_for(tmp_path, {}, **options).train()


def watch(kind="spike", deviations=8.0):
    arguments = TrainingArguments(
        output_dir="x", rollback_on=kind, loss_spike_deviations=deviations, use_cpu=True
    )
    return LossGuard(arguments, torch.device("cpu"), 1)


def judge(one, loss, norm=1.0):
    one.add(torch.tensor(loss))
    one.judge(None if norm is None else torch.tensor(norm))


def test_a_spike_is_judged_by_the_losses_before():
    one = watch()
    judge(one, 1e9)  # nothing is known yet
    for number in range(LOSSES_TO_LEARN):
        judge(one, 2.0 + 0.01 * (number % 2))
    assert 2.0 < one.limit() < 2.3
    with pytest.raises(LossDiverged, match="limit"):
        judge(one, 2.5)
    judge(one, 2.1)
    judge(one, 0.1)  # less is never too much


def test_gradients_that_are_no_numbers_break_a_step_unless_they_are_expected_to():
    judge(watch("nan"), 1.0, norm=None)
    with pytest.raises(LossDiverged, match="gradients"):
        judge(watch("nan"), 1.0, norm=math.inf)


def test_what_was_learned_is_saved():
    one, other = watch(), watch()
    for number in range(LOSSES_TO_LEARN):
        judge(one, 2.0 + number % 3)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert other.limit() == one.limit() < math.inf
