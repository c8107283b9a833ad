"""A training whose callback makes processes, or which is told to stop by a terminal."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time


def _end_at_once() -> None:
    if sys.argv[2] == "early":
        os.kill(os.getpid(), signal.SIGTERM)


# Hooks of a child run in their order: this one comes before those of what is imported below.
os.register_at_fork(after_in_child=_end_at_once)

from resilient import TrainerCallback, TrainingArguments  # noqa: E402
from tests.process.workload import Bytes, Model, Recording  # noqa: E402

FORKS = multiprocessing.get_context("fork")


class Pooled(TrainerCallback):
    """Maps with a pool, which ends its processes with SIGTERM."""

    def on_step_end(self, args, state, control, /, **_):
        with FORKS.Pool(2) as pool:
            pool.map(abs, [state.global_step])


class Terminated(TrainerCallback):
    """Ends a child with SIGTERM; it must die of that, also where that comes with its birth."""

    def on_step_end(self, args, state, control, /, **_):
        child = FORKS.Process(target=time.sleep, args=(60,))
        child.start()
        time.sleep(0.2)
        child.terminate()
        child.join(10)
        sys.stdout.write(f"child {child.exitcode}\n")


class Announce(TrainerCallback):
    """Says that a step ended, so that a test can act then."""

    def on_step_end(self, args, state, control, /, **_):
        sys.stdout.write(f"step {state.global_step}\n")
        sys.stdout.flush()
        time.sleep(0.05)


CALLBACKS = {"pool": Pooled, "terminate": Terminated, "early": Terminated, "announce": Announce}


def main(folder: str, callback: str, steps: str, loaders: str) -> None:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=int(steps),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        save_strategy="no",
        dataloader_num_workers=int(loaders),
        disable_tqdm=True,
        use_cpu=True,
    )
    callbacks = [CALLBACKS[callback]()]
    Recording(Model(), arguments, train_dataset=Bytes(), callbacks=callbacks).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
