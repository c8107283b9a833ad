"""One rank of a run that draws as Transformers, grouped by length, with dropout.

python stock_worker.py OUT KIND [name=value ...]     # KIND own: our step; stock: one of theirs
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from resilient.errors import ConfigError
from resilient.train.arguments import TrainingArguments
from resilient.train.trainer import Trainer
from tests.helpers.hf_runs import BASE, Texts, gpt2, pad

torch.set_num_threads(1)


class Own(Trainer):
    """Records its samples and losses."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.seen, self.gathered = [], []

    def training_step(self, model, inputs, num_items_in_batch=None):
        indices = inputs.pop("idx").tolist()
        loss = self.step(model, inputs, num_items_in_batch)
        self.seen.append((indices, float(loss).hex()))
        return loss

    def step(self, model, inputs, count):
        return super().training_step(model, inputs, count)

    def prediction_step(self, model, inputs, *more, **named):
        inputs.pop("idx")
        return super().prediction_step(model, inputs, *more, **named)


class Stock(Own):
    """Makes a step in their words."""

    def step(self, model, inputs, count):
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=count)
        self.accelerator.backward(loss)
        mine = torch.arange(self.accelerator.process_index + 1)
        self.accelerator.wait_for_everyone()
        told = self.accelerator.gather({"loss": loss.detach(), "rows": mine})
        assert self.accelerator.unwrap_model(model) is self.model
        self.gathered.append(
            (told["loss"].tolist(), told["rows"].tolist(), self.accelerator.sync_gradients)
        )
        return loss.detach()


def main(out, kind, *options):
    given = dict(one.split("=") for one in options)
    args = TrainingArguments(
        **{
            **BASE,
            "output_dir": out,
            "train_sampling_strategy": "group_by_length",
            "random_numbers": "transformers",
            "gradient_accumulation_steps": 2,
            "save_strategy": "no",
            **given,
        }
    )
    trainer = {"own": Own, "stock": Stock}[kind](
        gpt2(), args, data_collator=pad, train_dataset=Texts(40, 1), eval_dataset=Texts(8, 2)
    )
    trainer.train()
    trainer.model.eval()
    try:
        trainer.accelerator.gather(torch.zeros(1))
        refused = ""
    except ConfigError as error:
        refused = error.message
    result = {
        "seen": trainer.seen,
        "gathered": trainer.gathered,
        "model": trainer.model.state_dict(),
        "refused": refused,
        "type": trainer.accelerator.distributed_type,
    }
    torch.save(result, Path(out) / f"result-{trainer.accelerator.process_index}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
