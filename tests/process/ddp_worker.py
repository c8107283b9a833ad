"""One rank of a training, started by the tests with what a launcher says in its environment.

python ddp_worker.py MODE OUT [name=value ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, IterableDataset

from resilient.errors import ResilientError
from resilient.train import session
from resilient.train.arguments import TrainingArguments
from resilient.train.callbacks.base import TrainerCallback
from resilient.train.trainer import Trainer
from tests.unit.train.fakes import MemoryCheckpointer, MemoryRepository

torch.set_num_threads(1)


class OnDisk(MemoryRepository):
    """A repository of which every rank keeps its own copy in a file."""

    def open(self, url, world, board, **options):
        self.path = Path(url) / f"repository-{world.rank}.pt"
        if self.path.exists():
            loaded = torch.load(self.path, weights_only=False)
            self.checkpoints, self.abouts, self.lives = loaded
        return DiskCheckpointer(self, world)


class DiskCheckpointer(MemoryCheckpointer):
    def save(self, step, parts, about, *, keep=(), overlap=False):
        saved = super().save(step, parts, about, keep=keep, overlap=overlap)
        held = self.repository
        torch.save((held.checkpoints, held.abouts, held.lives), held.path)
        return saved


class Crossed(nn.Module):
    """Uses its layers in another order than it registers them; no batch statistics."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.third = nn.Linear(300, 3)
        self.first = nn.Linear(6, 300)
        self.second = nn.Linear(300, 300)
        self.dropout = nn.Dropout(0.0)
        with torch.no_grad():
            for one in self.parameters():
                one.copy_(torch.randn(one.shape, generator=generator) * 0.1)

    def forward(self, x, labels):
        hidden = torch.tanh(self.second(torch.tanh(self.first(x))))
        return nn.functional.cross_entropy(self.third(self.dropout(hidden)), labels)


class Rows(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(size, 6, generator=generator)
        self.y = torch.randint(0, 3, (size,), generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.y[index]}


class Stream(IterableDataset):
    """Rows without a length, from their beginning on."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return (self.rows[index] for index in range(len(self.rows)))


class Announce(TrainerCallback):
    """Says on standard output that a step ended, so that a test can act then."""

    def on_step_end(self, args, state, control, /, **_):
        sys.stdout.write(f"step {state.global_step}\n")
        sys.stdout.flush()


class Sent(TrainerCallback):
    """Counts the numbers that DDP adds up over ranks, which it does as it would by itself."""

    def __init__(self):
        self.numbers = 0
        self.trainer = None

    def on_train_begin(self, args, state, control, /, **_):
        replica = self.trainer.model_wrapped
        if isinstance(replica, DistributedDataParallel):
            replica.register_comm_hook(None, self._send)

    def _send(self, group, bucket):
        self.numbers += bucket.buffer().numel()
        return allreduce_hook(group, bucket)


class DieAfter(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, /, **_):
        if state.global_step == self.step:
            raise ResilientError("dead")


def main(mode, out, *options):
    session.open_engine = OnDisk().open
    given = {
        name: float(value) if "." in value else int(value)
        for name, value in (option.split("=") for option in options)
    }
    dies = int(given.pop("die_after", -1))
    data = Rows(96)
    if size := int(given.pop("stream", 0)):
        data = Stream(Rows(size))
    has_own_group = given.pop("own_group", 0)
    counts_sent = given.pop("count_sent", 0)
    if has_own_group:
        torch.distributed.init_process_group("gloo")
    arguments = {
        "output_dir": out,
        "use_cpu": True,
        "optim": "sgd",
        "learning_rate": 0.5,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        **given,
    }
    if mode == "save":
        arguments["save_strategy"] = "steps"
    if arguments.get("eval_steps"):
        arguments["eval_strategy"] = "steps"
    sent = Sent()
    trainer = Trainer(
        Crossed(),
        TrainingArguments(**arguments),
        train_dataset=data,
        eval_dataset=Rows(21),
        callbacks=[Announce(), DieAfter(dies)],
    )
    sent.trainer = trainer
    if counts_sent:
        trainer.add_callback(sent)
    trainer.train()
    result = {"model": trainer.model.state_dict(), "history": trainer.state.log_history}
    result["sent"] = sent.numbers
    result["predictions"] = trainer.predict(trainer.eval_dataset).label_ids
    torch.save(result, Path(out) / f"result-{trainer.session.world.rank}.pt")
    if has_own_group:
        # Whoever makes a group ends it: torch aborts a process whose threads still run at its end.
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ResilientError as error:
        sys.stderr.write(f"{error.message}\n")
        sys.exit(error.exit_code)
