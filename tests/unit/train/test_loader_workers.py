"""End of the processes of loaders, with the run and before the garbage collector."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from resilient import TrainerCallback
from resilient.distributed.launch_env import World
from resilient.train.data.loader_workers import end_workers, read_batches
from resilient.train.evaluation.loop import EvalShard, EvalShardLoader
from tests.unit.train.models import DieAfter, Dies, Noisy, make_trainer

END_SECONDS = 3
WORKERS = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}


@pytest.fixture(autouse=True)
def _none_of_other_tests():
    gc.collect()
    for child in multiprocessing.active_children():
        child.kill()
        child.join()


class DieInEvaluation(TrainerCallback):
    def on_prediction_step(self, args, state, control, /, **_):
        self.died_seconds = time.monotonic()
        raise Dies("dead in an evaluation")


class DieAt(DieAfter):
    def on_step_end(self, args, state, control, /, **others):
        self.died_seconds = time.monotonic()
        super().on_step_end(args, state, control, **others)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        made = Noisy(400)
        yield from (made[index] for index in range(400))


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("kind", ["map", "stream", "own loader"])
def test_workers_of_interrupted_run_end_with_it(tmp_path, repository, persistent, kind):
    death = DieAt(5)
    options = {**WORKERS, "dataloader_persistent_workers": persistent, "max_steps": 20}
    trainer = make_trainer(tmp_path, callbacks=[death], **options)
    if kind == "stream":
        trainer.train_dataset = Stream()
    if kind == "own loader":
        ours = trainer.get_train_dataloader

        class Own(DataLoader):
            def __iter__(self):
                yield from super().__iter__()

        def load():
            made = ours()
            return Own(
                made.dataset,
                batch_sampler=made.batch_sampler,
                collate_fn=made.collate_fn,
                num_workers=2,
                persistent_workers=persistent,
            )

        trainer.get_train_dataloader = load
    with pytest.raises(Dies) as caught:
        trainer.train()
    took_seconds = time.monotonic() - death.died_seconds
    assert not multiprocessing.active_children()
    assert took_seconds < END_SECONDS
    assert caught.value.__traceback__


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_workers_of_interrupted_evaluation_end(tmp_path, repository, persistent, kind):
    death = DieInEvaluation()
    options = {**WORKERS, "dataloader_persistent_workers": persistent, "max_steps": 4}
    trainer = make_trainer(
        tmp_path, callbacks=[death], eval_size=40, eval_strategy="steps", eval_steps=2, **options
    )
    if kind == "stream":
        trainer.eval_dataset = Stream()
    with pytest.raises(Dies) as caught:
        trainer.train()
    assert not multiprocessing.active_children()
    assert time.monotonic() - death.died_seconds < END_SECONDS
    assert caught.value.__traceback__


def test_workers_end_with_finished_run_and_evaluation_restarts(tmp_path, repository):
    trainer = make_trainer(
        tmp_path, eval_size=11, eval_strategy="steps", eval_steps=2, max_steps=4, **WORKERS
    )
    trainer.train()
    assert not multiprocessing.active_children()
    assert trainer.evaluate()["eval_loss"] == trainer.evaluate()["eval_loss"]
    assert len(multiprocessing.active_children()) == 2
    trainer._end_eval_workers()
    assert not multiprocessing.active_children()


class Slow(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index > 1:
            time.sleep(60)
        return torch.zeros(1)


class Broken(Slow):
    def __getitem__(self, index):
        raise ValueError(f"sample {index} is broken")


@pytest.mark.slow
def test_workers_inside_slow_samples_are_killed():
    batches = iter(DataLoader(Slow(), num_workers=2))
    next(batches)
    began_seconds = time.monotonic()
    end_workers(batches)
    assert time.monotonic() - began_seconds < END_SECONDS + 1
    assert not multiprocessing.active_children()


def test_workers_end_after_error_of_dataset():
    with pytest.raises(ValueError, match="sample 0 is broken") as caught:
        list(read_batches(DataLoader(Broken(), num_workers=2)))
    assert not multiprocessing.active_children()
    assert caught.value.__traceback__


@pytest.mark.slow
def test_persistent_eval_workers_end_at_collection(tmp_path):
    loader = EvalShardLoader(
        Noisy(8, augment=False),
        EvalShard(8, 4, World()),
        num_workers=2,
        persistent_workers=True,
    )
    loader.itself = loader  # a cycle: only the garbage collector frees the loader
    assert len(list(loader)) == 2
    assert len(multiprocessing.active_children()) == 2
    gc.collect()  # the garbage of earlier tests is not in the time below
    del loader
    began_seconds = time.monotonic()
    gc.collect()
    # torch waits 5 s for each worker that does not end.
    assert time.monotonic() - began_seconds < 2 * END_SECONDS + 2
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_fork_of_trainer_leaves_workers_alone():
    batches = iter(DataLoader(Noisy(8), num_workers=1))
    next(batches)
    child = os.fork()
    if not child:
        code = 1
        try:
            end_workers(batches)
            code = 0
        finally:
            os._exit(code)
    os.waitpid(child, 0)
    assert multiprocessing.active_children()
    end_workers(batches)
    assert not multiprocessing.active_children()
