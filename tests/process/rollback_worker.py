"""Train where a sample of one rank is poison: ``rollback_worker.py FOLDER PARALLELISM [STEP]``.

At ``STEP`` rank 1 is killed, once, if it has gone back.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

from resilient import Trainer, TrainerCallback, TrainingArguments
from resilient.train.data.ordering import epoch_order

SAMPLES, STEP_SAMPLES, BROKEN_STEP = 128, 8, 7


class Data(torch.utils.data.Dataset):
    def __init__(self, poison):
        self.poison = poison

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        x = torch.randn(6, generator=torch.Generator().manual_seed(index))
        y = float("nan") if index == self.poison else x.mean()
        return {"x": x, "y": torch.as_tensor(y), "index": torch.tensor(index)}


class Fit(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(6, 1)

    def forward(self, x, y):
        return {"loss": (self.layer(x).squeeze(-1) - y).square().mean()}


class Recording(Trainer):
    seen: list[int]

    def training_step(self, model, inputs, *counted):
        self.seen += inputs.pop("index").tolist()
        return super().training_step(model, inputs, *counted)


class Fate(TrainerCallback):
    """Ends rank 1 behind the data that was left out."""

    def __init__(self, mark: Path, step: int, cursor_of) -> None:
        self._mark, self._step, self._cursor_of = mark, step, cursor_of

    def on_step_end(self, args, state, control, **kwargs):
        is_there = state.global_step == self._step and os.environ["RANK"] == "1"
        if is_there and self._cursor_of().skipped and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str, parallelism: str, death: str = "0") -> None:
    poison = epoch_order(SAMPLES, 0, 0).tolist()[(BROKEN_STEP - 1) * STEP_SAMPLES + 5]
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=12,
        per_device_train_batch_size=4,
        save_steps=5,
        seed=0,
        parallelism=parallelism,
        fsdp_transformer_layer_cls_to_wrap="Linear" if parallelism == "fsdp" else "",
        rollback_on="nan",
        remove_unused_columns=False,
        disable_tqdm=True,
        use_cpu=True,
    )
    fate = Fate(Path(folder, "death"), int(death), lambda: trainer.train_sampler.cursor)
    trainer = Recording(Fit(), arguments, train_dataset=Data(poison), callbacks=[fate])
    trainer.seen = []
    trainer.train()
    rank = trainer.session.world.rank
    answer = {"seen": trainer.seen, "skipped": trainer.train_sampler.cursor.skipped}
    Path(folder, f"answer-{rank}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
