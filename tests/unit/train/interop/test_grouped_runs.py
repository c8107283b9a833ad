"""Runs of stock Transformers that group by length, begun here or taken over: the same samples.

Their sampler draws each epoch's order from torch's global stream, behind the number that a loader
draws; so it depends on all that was drawn before.
"""

from __future__ import annotations

import pytest
import torch

from resilient.errors import IncompatibleCheckpoint
from resilient.train.arguments import TrainingArguments
from resilient.train.hf_interop.exporter import export_checkpoint
from tests.helpers.hf_runs import BASE, EVAL, Recorder, Texts, gpt2, pad
from tests.unit.train.models import DieAfter, Dies

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs
EACH = 7  # steps of an epoch
OPTIONS = {
    **BASE,
    **EVAL,
    "eval_steps": 3,
    "save_steps": 1,
    "train_sampling_strategy": "group_by_length",
    "num_train_epochs": 3,
    "metric_for_best_model": None,
    "gradient_accumulation_steps": 2,
}


@pytest.fixture(autouse=True)
def one_thread():
    """Compare sums that were made in the same order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def given(**more):
    return {
        "data_collator": pad,
        "train_dataset": Texts(EACH * 8 - 1, 1),
        "eval_dataset": Texts(9, 2),
        **more,
    }


def ours(folder, dropout=0.1, callbacks=(), **options):
    more = {"save_steps": 4, "output_dir": str(folder), **options}
    args = TrainingArguments(**{**OPTIONS, **more})
    return Recorder(gpt2(dropout), args, **given(callbacks=callbacks))


def stock(folder, dropout):
    """Return what a run of stock Transformers trained on, micro-batch by micro-batch."""
    from transformers import Trainer, TrainingArguments

    class Stock(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            indices = inputs.pop("idx").tolist()
            loss = super().training_step(model, inputs, num_items_in_batch)
            seen.append((indices, float(loss).hex()))
            return loss

        def prediction_step(self, model, inputs, *more, **named):
            inputs.pop("idx", None)
            return super().prediction_step(model, inputs, *more, **named)

    seen = []
    args = TrainingArguments(**{**OPTIONS, "output_dir": str(folder), "report_to": "none"})
    Stock(gpt2(dropout), args, **given()).train()
    return seen


@pytest.fixture(scope="module", params=[0.1, 0.0], ids=["dropout", "no dropout"])
def theirs(request, tmp_path_factory):
    """Return a folder of their checkpoints of each step, what they trained on, and the dropout."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("theirs")
    seen = stock(folder, request.param)
    torch.set_num_threads(threads)
    return folder, seen, request.param


@pytest.mark.slow
def test_a_run_that_draws_as_theirs_has_their_orders(tmp_path, theirs):
    _, seen, dropout = theirs
    run = ours(tmp_path, dropout, random_numbers="transformers")
    run.train()
    assert run.seen == seen


@pytest.mark.parametrize("step", [3, EACH, 2 * EACH])
def test_a_run_that_is_taken_over_has_their_orders(tmp_path, theirs, step):
    folder, seen, dropout = theirs
    run = ours(tmp_path, dropout)
    run.train(str(folder / f"checkpoint-{step}"))
    assert run.seen == seen[2 * step :]


def test_an_order_that_nothing_recorded_is_refused_unless_it_is_proven(tmp_path, theirs):
    folder, seen, dropout = theirs
    run = ours(tmp_path, dropout)
    if not dropout:
        # Nothing but loaders drew, so the state that was saved proves what they drew.
        run.train(str(folder / "checkpoint-17"))
        assert run.seen == seen[34:]
        return
    with pytest.raises(IncompatibleCheckpoint, match="in the middle of epoch 2") as refused:
        run.train(str(folder / "checkpoint-17"))
    assert "end of an epoch" in refused.value.hint


def test_another_seed_cannot_be_proven(tmp_path, theirs):
    folder, _, dropout = theirs
    with pytest.raises(IncompatibleCheckpoint, match="in the middle of epoch 1"):
        ours(tmp_path, dropout, seed=7).train(str(folder / "checkpoint-10"))


def test_what_model_init_drew_is_not_known(tmp_path, theirs):
    folder, _, dropout = theirs
    if dropout:
        run = ours(tmp_path, dropout)
        run.model_init = lambda: gpt2(dropout)
        with pytest.raises(IncompatibleCheckpoint, match="`model_init`"):
            run.train(str(folder / "checkpoint-3"))


@pytest.mark.parametrize("dies_after", [3, EACH, EACH + 2])
def test_the_order_of_an_epoch_outlives_a_death(tmp_path, theirs, dies_after):
    _, seen, dropout = theirs
    options = {"random_numbers": "transformers"}
    broken = ours(tmp_path, dropout, [DieAfter(dies_after)], **options)
    with pytest.raises(Dies):
        broken.train()
    again = ours(tmp_path, dropout, **options)
    again.train()
    assert again.seen == seen[len(seen) - len(again.seen) :]
    assert broken.seen == seen[: len(broken.seen)]


def test_stock_transformers_would_begin_another_order_of_an_epoch_that_is_under_way(tmp_path):
    run = ours(tmp_path / "run", max_steps=EACH, save_steps=3)
    run.train()
    with pytest.raises(IncompatibleCheckpoint, match="draws the order of an epoch again") as told:
        export_checkpoint(str(tmp_path / "run"), tmp_path / "checkpoint-3", "step:3")
    assert "end of an epoch" in told.value.hint
    export_checkpoint(str(tmp_path / "run"), tmp_path / f"checkpoint-{EACH}", f"step:{EACH}")
