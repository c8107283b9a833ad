"""NaN, infinite and spiking numbers: told once, at no step's cost, whatever follows from it."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from resilient import Trainer, TrainingArguments
from resilient.format.keys import CheckpointId
from resilient.train.data.ordering import epoch_order
from resilient.train.loss_guard import LOSSES_TO_LEARN, BrokenLossEpisodes
from resilient.train.saver import BestCheckpoint

SAMPLES, BATCH, SEED = 128, 4, 7
ORDER = epoch_order(SAMPLES, SEED, 0).tolist()


class Poisoned(Dataset):
    """Samples whose target is the mean of their inputs; one of a step's targets is poison."""

    def __init__(self, step, value):
        self.x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
        self.poison = {ORDER[(step - 1) * BATCH + 1]: value}

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        target = self.poison.get(index, float(self.x[index].mean()))
        return {"x": self.x[index], "y": torch.tensor(target)}


class Fit(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(6, 1)

    def forward(self, x, y):
        return {"loss": (self.layer(x).squeeze(-1) - y).square().mean()}


def train(folder, step=11, value=math.nan, **options):
    options = {"max_steps": 20, "save_steps": 4, "logging_steps": 4, **options}
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH,
        learning_rate=1e-9 if math.isfinite(value) else 0.01,
        lr_scheduler_type="constant",
        seed=SEED,
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    trainer = Trainer(Fit(), arguments, train_dataset=Poisoned(step, value))
    trainer.train()
    return trainer


def told(folder, *names):
    lines = (folder / "events" / "rank-0.jsonl").read_text().splitlines()
    wanted = names or ("LossDivergenceDetected",)
    return [one for one in map(json.loads, lines) if one["event"] in wanted]


def test_a_loss_that_is_no_number_is_told_once_and_not_only_where_training_goes_back(
    tmp_path, capsys
):
    train(tmp_path)
    [event] = told(tmp_path)
    # Step 12 is logged: its loss is left out there, the norm of its gradients is not.
    assert (event["kind"], event["figure"], event["global_step"]) == ("nan", "grad_norm", 12)
    assert (event["rank"], event["step"], event["value"], event["limit"]) == (0, 12, None, None)
    said = [line for line in capsys.readouterr().err.splitlines() if "rollback_on" in line]
    assert len(said) == 1
    assert "the grad_norm is nan in step 12" in said[0]


@pytest.mark.parametrize(("value", "kind"), [(math.nan, "nan"), (math.inf, "inf")])
def test_what_is_not_logged_is_told_of_its_step_before_the_next_save(tmp_path, value, kind):
    train(tmp_path, value=value, logging_strategy="no")
    [event] = told(tmp_path)
    assert (event["kind"], event["figure"], event["global_step"]) == (kind, "loss", 11)
    order = told(tmp_path, "LossDivergenceDetected", "CheckpointCommitted")
    names = [one.get("checkpoint", "broke") for one in order]
    assert names.index("broke") < names.index("checkpoint-12-g1")


def test_a_spike_is_told_with_its_limit(tmp_path):
    train(tmp_path, step=18, value=1e3, logging_steps=1, max_steps=24)
    [event] = told(tmp_path)
    assert (event["kind"], event["figure"], event["global_step"]) == ("spike", "loss", 18)
    assert event["value"] > 1e5
    assert 0 < event["limit"] < 100


def test_a_run_that_breaks_nothing_tells_nothing(tmp_path):
    train(tmp_path, value=0.1, logging_steps=1)
    assert told(tmp_path) == []


def test_what_goes_back_tells_first_what_broke(tmp_path):
    train(tmp_path, rollback_on="nan")
    broke, back = told(tmp_path, "LossDivergenceDetected", "TrainingRolledBack")
    assert (broke["event"], broke["kind"], broke["figure"]) == (
        "LossDivergenceDetected",
        "nan",
        "loss",
    )
    assert broke["global_step"] == back["global_step"] == 11


def checkpoints(folder):
    return sorted(one.parent.name for one in folder.glob("checkpoint-*/manifest.json"))


def test_the_last_checkpoint_before_a_broken_loss_is_kept_also_by_the_next_life(tmp_path):
    train(tmp_path, save_total_limit=1)
    assert checkpoints(tmp_path) == ["checkpoint-20-g1", "checkpoint-8-g1"]
    train(tmp_path, save_total_limit=1, max_steps=28)
    assert checkpoints(tmp_path) == ["checkpoint-28-g2", "checkpoint-8-g1"]


def test_nothing_is_kept_for_a_spike(tmp_path):
    train(tmp_path, 18, 1e3, logging_steps=1, max_steps=24, save_total_limit=1)
    assert checkpoints(tmp_path) == ["checkpoint-24-g1"]


def episodes(**options):
    return BrokenLossEpisodes(TrainingArguments(output_dir="x", use_cpu=True, **options))


def kinds(found):
    return [one.kind for one in found]


def test_an_episode_is_told_once_and_the_next_one_again():
    one = episodes()
    assert kinds(one.log(1, math.nan, 1.0)) == ["nan"]
    assert one.log(2, math.inf, math.inf) == []
    assert one.read(2, [1.0, math.nan]) == []
    assert one.is_broken
    assert one.read(3, [1.0]) == one.log(3, 1.0, 1.0) == []
    assert not one.is_broken
    assert kinds(one.log(4, 1.0, math.inf)) == ["inf"]


def test_the_losses_of_steps_say_which_was_the_first():
    one = episodes()
    [event] = one.read(9, [1.0, math.inf, math.nan, math.nan])
    assert (event.kind, event.global_step, one.is_broken) == ("inf", 7, True)
    assert one.read(9, []) == []
    assert one.is_broken
    assert one.log(9, math.nan, 1.0) == []


def test_a_step_that_broke_and_passed_is_told_once():
    one = episodes()
    assert kinds(one.read(4, [1.0, math.nan, 1.0])) == ["nan"]
    assert not one.is_broken
    # The mean of steps with that one among them.
    assert one.log(5, math.nan, 1.0) == []
    one.log(6, 1.0, 1.0)
    assert kinds(one.log(7, math.nan, 1.0)) == ["nan"]


def test_norms_that_are_infinite_by_design_break_nothing():
    one = episodes(fp16=False)
    one._expects_infinite = True
    assert one.log(1, 1.0, math.inf) == []
    assert kinds(one.log(2, math.nan, math.inf)) == ["nan"]


def test_a_loss_that_stays_high_is_told_once_and_judges_later_ones():
    one = episodes()
    for step in range(LOSSES_TO_LEARN):
        assert one.log(step, 2.0 + 0.01 * (step % 2), 1.0) == []
    assert kinds(one.log(20, 5.0, 1.0)) == ["spike"]
    assert not one.is_broken
    for step in range(21, 21 + 2 * LOSSES_TO_LEARN):
        assert one.log(step, 5.0 + 0.01 * (step % 2), 1.0) == []
    assert kinds(one.log(60, math.nan, 1.0)) == ["nan"]


def test_only_the_checkpoint_before_an_episode_is_held():
    best, first, later = BestCheckpoint(), CheckpointId(1, 4), CheckpointId(1, 8)
    best.note_broken_loss(None, begins=True, is_broken=True)
    best.note_broken_loss(first, begins=False, is_broken=True)
    assert best.kept == []
    best.note_broken_loss(first, begins=False, is_broken=False)
    best.note_broken_loss(first, begins=True, is_broken=True)
    best.note_broken_loss(later, begins=False, is_broken=True)
    assert best.kept == [first]
    other = BestCheckpoint()
    other.load_state_dict(best.state_dict())
    other.note_broken_loss(later, begins=True, is_broken=True)
    assert other.kept == [first]
    other.note_broken_loss(later, begins=False, is_broken=False)
    assert other.kept == []
    other.load_state_dict({"checkpoint": ""})
    assert other.kept == []
