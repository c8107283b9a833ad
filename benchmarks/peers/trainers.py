"""Saves and loads of the training state by accelerate and by the Trainer of transformers."""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.peers.training import Training


class Accelerated:
    """Training under accelerate."""

    def __init__(self, training: Training) -> None:
        from accelerate import Accelerator  # type: ignore[import-untyped]

        with silence():
            self._accelerator = Accelerator(cpu=True)
            self._accelerator.prepare(training.model, training.optimizer)

    def save(self, place: Path) -> None:
        """Save with ``save_state``."""
        with silence():
            self._accelerator.save_state(str(place))

    def load(self, place: Path) -> None:
        """Load with ``load_state``."""
        with silence():
            self._accelerator.load_state(str(place))


class Transformed:
    """Training under a transformers Trainer.

    The methods call what the Trainer's own loop calls for a save and for a resume.
    """

    def __init__(self, training: Training, folder: Path) -> None:
        import transformers

        with silence():
            arguments = transformers.TrainingArguments(
                output_dir=str(folder), report_to=[], use_cpu=True, disable_tqdm=True,
                accelerator_config={"split_batches": False}, max_steps=1000,
            )  # fmt: skip
            self._trainer: Any = transformers.Trainer(
                model=training.model, args=arguments, optimizers=(training.optimizer, None)
            )
            self._trainer.create_scheduler(1000, training.optimizer)

    def save(self, place: Path) -> None:
        """Save everything that a resume needs."""
        with silence():
            self._trainer.args.output_dir = str(place)
            self._trainer._save_checkpoint(self._trainer.model, None)  # noqa: SLF001

    def load(self, place: Path) -> None:
        """Load the checkpoint that ``save`` wrote."""
        (checkpoint,) = place.glob("checkpoint-*")
        with silence():
            self._trainer._load_from_checkpoint(str(checkpoint))  # noqa: SLF001
            self._trainer._load_optimizer_and_scheduler(str(checkpoint))  # noqa: SLF001
            self._trainer._load_rng_state(str(checkpoint))  # noqa: SLF001


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Discard what is printed meanwhile, but not the cost of printing it."""
    with (
        Path(os.devnull).open("w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield
