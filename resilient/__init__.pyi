from resilient.checkpoint.promotion_policy import TieringOptions as Tiering
from resilient.checkpoint.retention import BestOf, Retention
from resilient.checkpoint.save.metadata import CheckpointInfo as About
from resilient.checkpointer import Checkpointer
from resilient.distributed.heartbeat import heartbeat
from resilient.engine_factory import open_engine as open_checkpointer
from resilient.errors import ResilientError
from resilient.state_dict.fsdp1 import Fsdp1Model, Fsdp1Optimizer
from resilient.state_dict.optimizer import NamedOptimizer
from resilient.state_dict.rng_state import RandomState
from resilient.state_dict.snapshot import Part
from resilient.storage.open import open_store
from resilient.train.arguments import TrainingArguments, parse_arguments
from resilient.train.arguments.choices import IntervalStrategy, SchedulerType
from resilient.train.arguments.parsing import HfArgumentParser
from resilient.train.callbacks.base import (
    DefaultFlowCallback,
    EarlyStoppingCallback,
    TrainerCallback,
)
from resilient.train.callbacks.builtin import (
    MemoryWatchCallback,
    PrinterCallback,
    ProfilerCallback,
    ProgressCallback,
)
from resilient.train.evaluation.loop import EvalPrediction
from resilient.train.evaluation.metrics import metrics_for
from resilient.train.seq2seq import Seq2SeqTrainer, Seq2SeqTrainingArguments
from resilient.train.state import TrainerControl, TrainerState
from resilient.train.trackers import Reporting, Tracker
from resilient.train.trainer import Trainer
from resilient.trainer_utils import (
    enable_full_determinism,
    set_seed,
    torch_distributed_zero_first,
)

__all__ = [
    "About",
    "BestOf",
    "Checkpointer",
    "DefaultFlowCallback",
    "EarlyStoppingCallback",
    "EvalPrediction",
    "Fsdp1Model",
    "Fsdp1Optimizer",
    "HfArgumentParser",
    "IntervalStrategy",
    "MemoryWatchCallback",
    "NamedOptimizer",
    "Part",
    "PrinterCallback",
    "ProfilerCallback",
    "ProgressCallback",
    "RandomState",
    "Reporting",
    "ResilientError",
    "Retention",
    "SchedulerType",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "Tiering",
    "Tracker",
    "Trainer",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "TrainingArguments",
    "__version__",
    "enable_full_determinism",
    "heartbeat",
    "metrics_for",
    "open_checkpointer",
    "open_store",
    "parse_arguments",
    "set_seed",
    "torch_distributed_zero_first",
]

__version__: str
