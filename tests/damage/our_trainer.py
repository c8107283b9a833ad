"""A Trainer of ours that resumes a sample checkpoint, in this process or under ``resilient train``.

As a script: ``our_trainer.py KIND OUT ANSWER [PATH]`` trains one step beyond the checkpoint and
saves the weights it began with and the weights it ended with to ``ANSWER``. Without ``PATH`` the
launcher says what is resumed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

import torch  # noqa: E402 - the folders are on the path only now

from resilient.train.arguments import TrainingArguments  # noqa: E402
from resilient.train.callbacks.base import TrainerCallback  # noqa: E402
from resilient.train.trainer import Trainer  # noqa: E402
from tests.helpers.hf_runs import BASE, Tokens, gpt2, stack  # noqa: E402

GOLDEN = HERE.parent / "golden" / "transformers" / "gpt2_all" / "run"
COMMON = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
ROWS = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 64


class Began(TrainerCallback):
    """Keeps the weights that training begins with."""

    def on_train_begin(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        self.weights = copied(model)


def copied(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in model.state_dict().items()}


def single(out: Path, steps: int, began: Began) -> Trainer:
    """Return what resumes a checkpoint of one process."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(GOLDEN / "checkpoint-8"))
    arguments = TrainingArguments(
        output_dir=str(out), max_steps=steps, per_device_train_batch_size=1, **COMMON
    )
    return Trainer(model, arguments, train_dataset=ROWS, callbacks=[began])


def sharded(out: Path, steps: int, began: Began) -> Trainer:
    """Return what resumes a checkpoint of two ranks, in one process."""
    arguments = TrainingArguments(
        output_dir=str(out), **{**BASE, **COMMON, "max_steps": steps, "logging_strategy": "no"}
    )
    return Trainer(
        gpt2(),
        arguments,
        data_collator=lambda rows: {k: v for k, v in stack(rows).items() if k != "idx"},
        train_dataset=Tokens(32, 1),
        callbacks=[began],
    )


MAKERS = {"8": (single, 9), "12": (single, 13), "sharded": (sharded, 7)}
"""By what is resumed: how the trainer is made, and the step that it ends with."""


def resumed(kind: str, out: Path, path: str | None) -> tuple[Any, Any]:
    """Resume a checkpoint and train one step; return the weights before and after."""
    make, steps = MAKERS[kind]
    began = Began()
    trainer = make(out, steps, began)
    trainer.train(resume_from_checkpoint=path)
    return began.weights, (trainer.state.global_step, copied(trainer.model))


def main(kind: str, out: str, answer: str, path: str | None = None) -> None:
    torch.set_num_threads(1)
    torch.save(resumed(kind, Path(out), path), answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
