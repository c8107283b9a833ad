"""The Trainer's ledger: what real runs write, in one life and in several, is proven by an audit."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from resilient import Trainer, TrainerCallback, TrainingArguments
from resilient.checkpoint.catalog import lineage, read_manifest
from resilient.checkpoint.ledger_audit import audit
from resilient.checkpoint.ledger_segments import (
    expected_digest,
    order_digest,
    random_order,
    read_segment,
)
from resilient.errors import SaveFailed
from resilient.format.keys import CheckpointId
from resilient.format.ledger import LedgerPosition
from resilient.storage.open import open_store
from resilient.train import sample_ledger as ledger_module
from resilient.train.data.ordering import epoch_order
from resilient.train.sample_ledger import Ledger

SIZE = 53


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index):
        return {"x": torch.tensor([float(index)]), "labels": torch.tensor(index % 2)}


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(Numbers()[index] for index in range(SIZE))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 2)

    def forward(self, x, labels):
        return {"loss": nn.functional.cross_entropy(self.head(x / SIZE), labels)}


class Losses(TrainerCallback):
    """The logged loss of each step."""

    def __init__(self) -> None:
        self.seen = {}

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.seen[state.global_step] = logs["loss"]


class CutsShort(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop |= state.global_step == 3


def train(folder, *, dataset=None, callbacks=(), resume=None, **arguments):
    torch.manual_seed(0)
    arguments = {
        "per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 2,
        "save_total_limit": 2, "logging_steps": 1, "report_to": "none", **arguments,
    }  # fmt: skip
    args = TrainingArguments(output_dir=str(folder), use_cpu=True, disable_tqdm=True, **arguments)
    trainer = Trainer(Model(), args, train_dataset=dataset or Numbers(), callbacks=[*callbacks])
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def audited(folder):
    store = open_store(str(folder))
    return audit(store, lineage(store).candidates)


def proven(folder):
    found = audited(folder)
    assert found.is_proven, found.flaws
    return found


def rows_of(folder, key=None):
    keys = sorted(f"ledger/{one.name}" for one in folder.glob("ledger/*.json"))
    store = open_store(str(folder))
    return [json.loads(row) for one in keys for row in read_segment(store, one).rows]


def test_several_lives_with_other_batches_tile_the_epochs(tmp_path):
    losses = Losses()
    train(tmp_path, max_steps=5, callbacks=[losses])
    train(tmp_path, max_steps=9, per_device_train_batch_size=3, callbacks=[losses])
    train(tmp_path, max_steps=20, gradient_accumulation_steps=2, callbacks=[losses])
    found = proven(tmp_path)
    assert (found.place.step, found.lives, found.claimed) == (20, (1, 2, 3), 3)
    first = found.epochs[0]
    assert (first.trained, first.is_complete, first.order) == (SIZE, True, "computed anew")
    steps = {row[1]: row for row in rows_of(tmp_path) if row[0] == "step"}
    assert steps[5][3:11] == [0, 16, 20, 1, 4, 1, 1, 1]
    assert steps[6][3:11] == [0, 20, 23, 1, 3, 1, 1, 1]
    assert steps[10][3:11] == [0, 32, 40, 2, 4, 1, 1, 1]
    assert {step: row[-1] for step, row in steps.items()} == pytest.approx(losses.seen)


def test_rotation_leaves_the_whole_chain(tmp_path):
    train(tmp_path, max_steps=12)
    assert len(list(tmp_path.glob("checkpoint-*"))) == 2
    assert proven(tmp_path).segments == 6


def test_what_a_rollback_gives_up_is_counted(tmp_path):
    train(tmp_path, max_steps=6, save_total_limit=None)
    train(tmp_path, max_steps=8, resume="checkpoint-2", save_total_limit=None)
    found = proven(tmp_path)
    assert [(one.first, one.last) for one in found.abandoned] == [(3, 4), (5, 6)]
    assert found.place.step == 8


def test_an_epoch_that_was_cut_short_says_so(tmp_path):
    train(tmp_path, max_steps=6, callbacks=[CutsShort()])
    found = proven(tmp_path)
    assert found.left_out == {"cut short": SIZE - 12}
    assert found.epochs[0].is_complete


def test_an_epoch_that_ends_early_without_saying_so_is_no_proof(tmp_path, monkeypatch):
    monkeypatch.setattr(Ledger, "leave_out", lambda *_: None)
    train(tmp_path, max_steps=6, callbacks=[CutsShort()])
    (flaw,) = audited(tmp_path).flaws
    assert "no record says that the others were skipped" in flaw.problem


def test_a_segment_may_end_with_what_was_left_out(tmp_path):
    train(
        tmp_path,
        num_train_epochs=2,
        dataloader_drop_last=True,
        per_device_train_batch_size=10,
        save_strategy="epoch",
    )
    assert proven(tmp_path).left_out == {"incomplete round": 6}


def test_a_last_round_that_is_dropped_says_so(tmp_path):
    train(tmp_path, num_train_epochs=2, dataloader_drop_last=True, per_device_train_batch_size=10)
    assert proven(tmp_path).left_out == {"incomplete round": 3}


@pytest.mark.parametrize("strategy", ["sequential", "group_by_length", "batch_rebalance"])
def test_other_orders(strategy, tmp_path):
    lengths = {"length_column_name": "length"}

    class Long(Numbers):
        def __getitem__(self, index):
            return {**super().__getitem__(index), "length": index % 7 + 1}

    for steps in (4, 9):
        train(
            tmp_path, dataset=Long(), max_steps=steps, train_sampling_strategy=strategy, **lengths
        )
    known = "one in all lives" if strategy == "group_by_length" else "computed anew"
    assert [one.order for one in proven(tmp_path).epochs] == [known]


def test_a_stream(tmp_path):
    for steps in (5, 30):
        train(tmp_path, dataset=Stream(), max_steps=steps)
    found = proven(tmp_path)
    assert [one.trained for one in found.epochs] == [SIZE, SIZE, (30 - 28) * 4]
    assert {one.order for one in found.epochs} == {"not known"}


def test_canonical_reduction_deals_the_data_to_micro_batches(tmp_path):
    sizes = {"reduction": "canonical", "global_train_batch_size": 12}
    for steps in (3, 9):
        train(tmp_path, max_steps=steps, **sizes)
    found = proven(tmp_path)
    assert found.epochs[0].order == "computed anew"
    assert (found.epochs[0].repeated, found.ranks) == (5 * 12 - SIZE, (1,))
    assert rows_of(tmp_path)[1][1:11] == [1, 1, 0, 0, 12, 1, 4, 3, 1, 1]


def test_a_ledger_begins_where_an_older_run_goes_on(tmp_path):
    from tests.helpers.ledgers import Forger

    train(tmp_path, max_steps=4)
    forger = Forger(tmp_path)
    for one in tmp_path.glob("checkpoint-*/manifest.json"):
        key = f"{one.parent.name}/manifest.json"
        fields = forger.read(key)
        del fields["data"]["ledger"]
        forger.write(key, fields)
    assert not audited(tmp_path).is_proven
    train(tmp_path, max_steps=20)
    found = proven(tmp_path)
    assert (found.began, found.place.step) == (LedgerPosition(4, 0, 16), 20)
    assert found.epochs[0].is_complete


def test_the_chain_that_a_checkpoint_names_ends_where_its_data_is(tmp_path):
    train(tmp_path, max_steps=5)
    data = read_manifest(open_store(str(tmp_path)), CheckpointId(1, 5)).data
    assert data["ledger"]["place"] == [5, data["epoch"], data["samples"]]


def test_a_save_that_failed_gives_its_rows_to_the_next(tmp_path, monkeypatch):
    from resilient.checkpoint.save import persist

    commit, failures = persist.commit, []

    def failing(store, manifest, *rest, **how):
        if manifest.checkpoint.step == 4:
            failures.append(manifest.checkpoint)
            raise SaveFailed("no")
        commit(store, manifest, *rest, **how)

    monkeypatch.setattr(persist, "commit", failing)
    train(tmp_path, max_steps=8, on_save_failure="continue", save_total_limit=None)
    assert failures
    found = proven(tmp_path)
    assert (found.segments, found.abandoned) == (3, ()), "what the failed one held is not lost"


def test_a_failed_save_that_was_committed_after_all_fits_the_chain(tmp_path, monkeypatch):
    from resilient.checkpoint.save import persist

    commit = persist.commit

    def doubtful(store, manifest, *rest, **how):
        commit(store, manifest, *rest, **how)
        if manifest.checkpoint.step == 4:
            raise SaveFailed("the answer was lost")

    monkeypatch.setattr(persist, "commit", doubtful)
    monkeypatch.setattr(persist, "discard_uncommitted", lambda *_: None)
    train(tmp_path, max_steps=8, on_save_failure="continue", save_total_limit=None)
    found = proven(tmp_path)
    assert len(lineage(open_store(str(tmp_path))).candidates) == 4
    assert (found.segments, found.abandoned) == (3, ())


def test_many_steps_without_a_save_share_records(monkeypatch):
    monkeypatch.setattr(ledger_module, "ENTRIES_MAX", 300)
    ledger = Ledger(is_kept=True, ranks=2)
    cursor = SimpleNamespace(size=5000, seed=1, epoch=0, samples=0)
    layout = SimpleNamespace(batch=2, ranks=2)
    ledger.begin(None, 0, cursor)
    for step in range(1, 1001):
        start, cursor.samples = cursor.samples, cursor.samples + 4
        ledger.end_step(step, start, cursor, layout, 1, [float(step)], updated=step % 2 == 0)
        if step % 100 == 0:
            ledger.settle(lambda losses: [sum(one) for one in losses])
    segment = ledger.close(CheckpointId(1, 1000), "run")
    rows = [json.loads(row) for row in segment.rows]
    assert len(rows) < 400
    assert (rows[1][1], rows[-1][2]) == (1, 1000)
    assert sum(row[10] for row in rows[1:]) == 500
    weighed = sum(row[-1] * (row[2] - row[1] + 1) for row in rows[1:])
    assert weighed == pytest.approx(sum(range(1, 1001)))


@pytest.mark.parametrize("samples", [1, 2, 3, 601, 10_000])
@pytest.mark.parametrize("seed", [0, 42, 2**31 + 5, 2**40 + 1])
def test_an_order_is_computed_anew_without_torch(samples, seed):
    assert random_order(samples, seed).tolist() == epoch_order(samples, seed, 0).tolist()
    expected = expected_digest("random", samples, seed, 3)
    assert order_digest(epoch_order(samples, seed, 3).numpy()) == expected
