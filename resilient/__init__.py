"""Train PyTorch models to the end on machines that will fail, bit for bit.

Public names are loaded when they are first used, so ``import resilient`` never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "About": "resilient.checkpointer",
    "BestOf": "resilient.vault.registry.retention",
    "Checkpointer": "resilient.loop",
    "Fsdp1Model": "resilient.state.fsdp1",
    "Fsdp1Optimizer": "resilient.state.fsdp1",
    "NamedOptimizer": "resilient.state.optimizer",
    "Part": "resilient.state.capture",
    "RandomState": "resilient.state.rng",
    "Reporting": "resilient.train.trackers",
    "ResilientError": "resilient.errors",
    "Retention": "resilient.vault.registry.retention",
    "EarlyStoppingCallback": "resilient.train.callbacks.callback",
    "EvalPrediction": "resilient.train.evaluation.evaluate",
    "MemoryWatchCallback": "resilient.train.callbacks.watching",
    "PrinterCallback": "resilient.train.callbacks.bars",
    "ProfilerCallback": "resilient.train.callbacks.watching",
    "ProgressCallback": "resilient.train.callbacks.bars",
    "Tiering": "resilient.vault.saving.tiering",
    "Tracker": "resilient.train.trackers",
    "Trainer": "resilient.train.trainer",
    "TrainerCallback": "resilient.train.callbacks.callback",
    "TrainerControl": "resilient.train.state",
    "TrainerState": "resilient.train.state",
    "Seq2SeqTrainer": "resilient.train.seq2seq",
    "Seq2SeqTrainingArguments": "resilient.train.seq2seq",
    "TrainingArguments": "resilient.train.arguments",
    "heartbeat": "resilient.world.pulse",
    "metrics_for": "resilient.train.evaluation.metrics",
    "open_checkpointer": "resilient.opening",
    "open_store": "resilient.storage.open",
    "parse_arguments": "resilient.train.arguments",
}

__all__ = ["__version__", *sorted(_HOMES)]  # noqa: PLE0604 - the names are the table's


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module `resilient` has no attribute `{name}`")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
