"""DataLoader workers of a trainer that was forked after our modules were imported: warm workers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest

from resilient import TrainingArguments
from resilient.train.data.sampler import worker_options

FORKS = multiprocessing.get_context("fork")


def train(folder, told):
    """Start a worker as a trainer does, send it SIGTERM, and tell whether it outlived that."""
    args = TrainingArguments(output_dir=str(folder), dataloader_num_workers=1)
    options = worker_options(args, pin=False)
    ready = FORKS.Event()
    worker = FORKS.Process(target=work, args=(options["worker_init_fn"], ready))
    worker.start()
    ready.wait(60)
    os.kill(worker.pid, signal.SIGTERM)
    time.sleep(0.3)
    told.send(worker.is_alive())
    worker.kill()
    worker.join()


def work(begin, ready):
    begin(0)
    ready.set()
    time.sleep(60)


@pytest.mark.parametrize("is_forked", [False, True])
def test_a_worker_of_a_trainer_outlives_the_first_request_to_stop(tmp_path, is_forked):
    ours, theirs = FORKS.Pipe()
    if is_forked:
        trainer = FORKS.Process(target=train, args=(tmp_path, theirs))
        trainer.start()
        trainer.join()
    else:
        train(tmp_path, theirs)
    assert ours.recv()
