"""Script of each rank of the `recovery` benchmark: the demo's model, under either Trainer.

    recovering.py ours|hf FOLDER STEPS SAVE_STEPS

Each rank appends marks to ``marks-RANK.jsonl``: began, imported, built, restored, and each finished
step. Their times are on the clock that all processes of a host share.
"""

from __future__ import annotations

import time

_BEGAN_SECONDS = time.monotonic()

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from importlib import import_module  # noqa: E402
from pathlib import Path  # noqa: E402
from random import Random  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.peers.jobs import whole_checkpoints  # noqa: E402
from examples.gpt import Gpt, Windows  # noqa: E402

LENGTH = 64
TEXT_BYTES = 1 << 20


def mark(folder: Path, name: str, at_seconds: float | None = None) -> None:
    """Append a mark."""
    at_seconds = time.monotonic() if at_seconds is None else at_seconds
    line = {"name": name, "at_seconds": at_seconds, "pid": os.getpid()}
    with (folder / f"marks-{os.environ['RANK']}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def main(owner: str, folder: Path, steps: int, save_steps: int) -> None:
    """Train, and continue where an earlier attempt stopped."""
    mark(folder, "began", _BEGAN_SECONDS)
    library: Any = import_module("resilient" if owner == "ours" else "transformers")
    base = library.TrainerCallback

    class Marks(base):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            mark(folder, "restored")

        def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
            mark(folder, f"step {state.global_step}")

    mark(folder, "imported")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = Random(0).randbytes(TEXT_BYTES)  # noqa: S311 - the same for all contenders
    more = {} if owner == "ours" else {"report_to": [], "ddp_backend": "gloo"}
    output = folder / "output"
    arguments = library.TrainingArguments(
        output_dir=str(output), max_steps=steps, per_device_train_batch_size=8,
        learning_rate=1e-3, weight_decay=0.1, logging_steps=10, save_strategy="steps",
        save_steps=save_steps, save_total_limit=3, use_cpu=True, disable_tqdm=True,
        dataloader_pin_memory=False, **more,
    )  # fmt: skip
    trainer = library.Trainer(
        model=Gpt(LENGTH), args=arguments, train_dataset=Windows(text, LENGTH), callbacks=[Marks()]
    )
    mark(folder, "built")
    if owner == "ours":
        trainer.train()
    else:
        # `get_last_checkpoint` of transformers also accepts an incomplete checkpoint.
        checkpoints = whole_checkpoints(output)
        trainer.train(resume_from_checkpoint=str(checkpoints[-1][1]) if checkpoints else None)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
