"""Train PyTorch models on machines that fail, with results bitwise equal to a run without failures.

Public names are loaded when they are first used, so ``import resilient`` never imports torch. Type
checkers read the types of these names from ``__init__.pyi``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "About": "resilient.checkpoint.save.metadata:CheckpointInfo",
    "BestOf": "resilient.checkpoint.retention",
    "Checkpointer": "resilient.checkpointer",
    "Fsdp1Model": "resilient.state_dict.fsdp1",
    "Fsdp1Optimizer": "resilient.state_dict.fsdp1",
    "NamedOptimizer": "resilient.state_dict.optimizer",
    "Part": "resilient.state_dict.snapshot",
    "RandomState": "resilient.state_dict.rng_state",
    "Reporting": "resilient.train.trackers",
    "ResilientError": "resilient.errors",
    "Retention": "resilient.checkpoint.retention",
    "DefaultFlowCallback": "resilient.train.callbacks.base",
    "EarlyStoppingCallback": "resilient.train.callbacks.base",
    "EvalPrediction": "resilient.train.evaluation.loop",
    "HfArgumentParser": "resilient.train.arguments.parsing",
    "IntervalStrategy": "resilient.train.arguments.choices",
    "MemoryWatchCallback": "resilient.train.callbacks.builtin",
    "PrinterCallback": "resilient.train.callbacks.builtin",
    "ProfilerCallback": "resilient.train.callbacks.builtin",
    "ProgressCallback": "resilient.train.callbacks.builtin",
    "Tiering": "resilient.checkpoint.promotion_policy:TieringOptions",
    "Tracker": "resilient.train.trackers",
    "Trainer": "resilient.train.trainer",
    "TrainerCallback": "resilient.train.callbacks.base",
    "TrainerControl": "resilient.train.state",
    "TrainerState": "resilient.train.state",
    "SchedulerType": "resilient.train.arguments.choices",
    "Seq2SeqTrainer": "resilient.train.seq2seq",
    "Seq2SeqTrainingArguments": "resilient.train.seq2seq",
    "TrainingArguments": "resilient.train.arguments",
    "enable_full_determinism": "resilient.trainer_utils",
    "heartbeat": "resilient.distributed.heartbeat",
    "metrics_for": "resilient.train.evaluation.metrics",
    "open_checkpointer": "resilient.engine_factory:open_engine",
    "open_store": "resilient.storage.open",
    "parse_arguments": "resilient.train.arguments",
    "set_seed": "resilient.trainer_utils",
    "torch_distributed_zero_first": "resilient.trainer_utils",
}
"""Module of each public name, and its name there if that differs."""

__all__ = ["__version__", *sorted(_HOMES)]  # noqa: PLE0604 - the names are the table's


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module `resilient` has no attribute `{name}`")
    module, _, current = _HOMES[name].partition(":")
    return getattr(import_module(module), current or name)


def __dir__() -> list[str]:
    return list(__all__)
