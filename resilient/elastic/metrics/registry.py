"""Registry of all Prometheus metrics, their text format and the text file.

Users build dashboards and alerts on the names and labels of the metrics, so these never change.
The format is version 0.0.4: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import math
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricKind(StrEnum):
    """Type of a metric."""

    COUNTER = "counter"
    """Counter that only grows while the agent runs; its name ends in ``_total``."""
    GAUGE = "gauge"
    SUMMARY = "summary"
    """Sum and count, under ``NAME_sum`` and ``NAME_count``."""


@dataclass(frozen=True, slots=True)
class Metric:
    """Metric with a stable name.

    Attributes:
        name: Name with the unit at its end.
        kind: Type of the metric.
        meaning: Help text in one line.
        label: Only label of the samples; empty for none.
    """

    name: str
    kind: MetricKind
    meaning: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a metric.

    Attributes:
        metric: Metric of the value.
        value: The value.
        label: Value of the metric's label; empty without a label.
        suffix: ``_sum`` or ``_count`` for a summary.
    """

    metric: Metric
    value: float
    label: str = ""
    suffix: str = ""


def render(samples: Iterable[Sample]) -> str:
    """Return samples in the text format, grouped by metric."""
    by_name = sorted(samples, key=lambda sample: (sample.metric.name, sample.label, sample.suffix))
    lines = []
    for metric, metric_samples in groupby(by_name, key=lambda sample: sample.metric):
        lines.append(f"# HELP {metric.name} {_escape(metric.meaning)}")
        lines.append(f"# TYPE {metric.name} {metric.kind}")
        lines += map(_line, metric_samples)
    return "".join(f"{line}\n" for line in lines)


def _line(sample: Sample) -> str:
    label = f'{{{sample.metric.label}="{_quote(sample.label)}"}}' if sample.metric.label else ""
    return f"{sample.metric.name}{sample.suffix}{label} {_number(sample.value)}"


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(float(value))


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _quote(text: str) -> str:
    return _escape(text).replace('"', '\\"')


_COUNTER, _GAUGE, _SUMMARY = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.SUMMARY

AGENT_INFO = Metric(
    "resilient_agent_info", _GAUGE, "Always 1; the label is the version of the agent.", "version"
)
AGENT_START = Metric(
    "resilient_agent_start_time_seconds", _GAUGE, "Start time of the agent, in unix time."
)
EXIT_CODE = Metric(
    "resilient_agent_exit_code", _GAUGE, "Exit code of the agent, once it has decided to end."
)
LIVES = Metric("resilient_lives_total", _COUNTER, "Attempts that this agent started.")
RESTARTS = Metric(
    "resilient_restarts_total",
    _COUNTER,
    "Restarts of the ranks, by the cause that ended the previous attempt.",
    "cause",
)
FAILURES = Metric(
    "resilient_failures_total", _COUNTER, "Attempts that ended by a failure, by cause.", "cause"
)
PREEMPTIONS = Metric(
    "resilient_preemptions_total", _COUNTER, "Attempts that ended because of a stop request."
)
NOTICES = Metric("resilient_notices_total", _COUNTER, "Preemption notices received for this host.")
HANGS = Metric("resilient_hangs_total", _COUNTER, "Hangs found.")
STRAGGLERS = Metric(
    "resilient_stragglers_total", _COUNTER, "Times a rank was found slower than the other ranks."
)
LOSSES_BROKEN = Metric(
    "resilient_losses_broken_total",
    _COUNTER,
    "Times the loss was NaN, infinite or a spike.",
    "kind",
)
RESTARTS_LEFT = Metric(
    "resilient_restarts_left",
    _GAUGE,
    "Number of restarts after failures that the agent may still do.",
)
WORLD_SIZE = Metric("resilient_world_size", _GAUGE, "Ranks of all hosts in this attempt.")
LOCAL_WORLD_SIZE = Metric("resilient_local_world_size", _GAUGE, "Ranks of this host.")
NODES = Metric("resilient_nodes", _GAUGE, "Hosts in this attempt.")
GENERATION = Metric(
    "resilient_generation", _GAUGE, "Generation of this attempt in the checkpoint repository."
)
STEP = Metric("resilient_step", _GAUGE, "Last step that all ranks of this host have finished.")
STEP_RATE = Metric(
    "resilient_steps_per_second", _GAUGE, "Steps per second over the last minute of this attempt."
)
RANK_STEP = Metric(
    "resilient_rank_step", _GAUGE, "Last step that a rank has finished.", "local_rank"
)
RANK_STEP_TIME = Metric(
    "resilient_rank_last_step_timestamp_seconds",
    _GAUGE,
    "End time of the last step of a rank, in unix time.",
    "local_rank",
)
CHECKPOINT_STEP = Metric(
    "resilient_checkpoint_step", _GAUGE, "Step of the last durable checkpoint."
)
CHECKPOINT_TIME = Metric(
    "resilient_checkpoint_last_timestamp_seconds",
    _GAUGE,
    "Commit time of the last durable checkpoint, in unix time.",
)
CHECKPOINT_BYTES = Metric(
    "resilient_checkpoint_size_bytes", _GAUGE, "Size of the last durable checkpoint."
)
CHECKPOINTS = Metric("resilient_checkpoints_total", _COUNTER, "Checkpoints committed.")
CHECKPOINT_WRITTEN = Metric(
    "resilient_checkpoint_written_bytes_total",
    _COUNTER,
    "Bytes written for checkpoints; less than their size if files are shared.",
)
COMMIT = Metric(
    "resilient_checkpoint_commit_seconds",
    _SUMMARY,
    "Time from the capture of a state to its commit.",
)
STALL = Metric(
    "resilient_checkpoint_stall_seconds", _SUMMARY, "Time that training waited for a save."
)
SAVES_ABORTED = Metric("resilient_saves_aborted_total", _COUNTER, "Saves that were not committed.")
STEPS_AT_RISK = Metric(
    "resilient_steps_at_risk", _GAUGE, "Steps that would be lost if all ranks failed now."
)
GOODPUT = Metric(
    "resilient_goodput_ratio",
    _GAUGE,
    "Share of the wall clock spent on steps that are part of the result.",
)
SPENT = Metric(
    "resilient_spent_seconds",
    _GAUGE,
    "Wall clock of the run by class; a failure moves time from class `training` to class `lost`.",
    "class",
)
LOST_STEPS = Metric("resilient_lost_steps", _GAUGE, "Steps of the run that were trained and lost.")
SHARED_MEMORY = Metric(
    "resilient_shared_memory_bytes",
    _GAUGE,
    "Memory of this host used by staged checkpoints of all jobs.",
)
METRICS_ERRORS = Metric(
    "resilient_metrics_errors_total", _COUNTER, "Times that metrics could not be computed."
)

ALL = tuple(candidate for candidate in list(globals().values()) if isinstance(candidate, Metric))
"""All metrics, in the order of the table in docs/metrics.md."""

LABELS_MAX = 512
"""Largest number of label values per metric; further values are dropped."""


class MetricsRegistry:
    """Thread-safe registry with one value per metric and label."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples: dict[tuple[Metric, str, str], Sample] = {}

    def put(self, metric: Metric, value: float, label: str = "") -> None:
        """Set a gauge."""
        with self._lock:
            self._set(metric, value, label, "")

    def add(self, metric: Metric, value: float = 1, label: str = "") -> None:
        """Add to a counter, or add one observation to a summary."""
        with self._lock:
            if metric.kind is not MetricKind.SUMMARY:
                self._grow(metric, value, label, "")
                return
            self._grow(metric, value, label, "_sum")
            self._grow(metric, 1, label, "_count")

    def drop(self, metric: Metric) -> None:
        """Remove all values of a metric whose value is no longer known."""
        with self._lock:
            for key in [sample for sample in self._samples if sample[0] == metric]:
                del self._samples[key]

    def value(self, metric: Metric, label: str = "") -> float | None:
        """Return the current value, None without one."""
        with self._lock:
            sample = self._samples.get((metric, label, ""))
        return None if sample is None else sample.value

    def page(self) -> str:
        """Return all values in the text format."""
        with self._lock:
            samples = list(self._samples.values())
        return render(samples)

    def _grow(self, metric: Metric, value: float, label: str, suffix: str) -> None:
        previous_sample = self._samples.get((metric, label, suffix))
        self._set(metric, value + (previous_sample.value if previous_sample else 0), label, suffix)

    def _set(self, metric: Metric, value: float, label: str, suffix: str) -> None:
        key = (metric, label, suffix)
        sample_count = sum(1 for sample in self._samples if sample[0] == metric) if label else 0
        if key in self._samples or sample_count < LABELS_MAX:
            self._samples[key] = Sample(metric, value, label, suffix)


def write_textfile(path: Path, text: str) -> None:
    """Replace ``path`` atomically: a reader sees the old or the new text, never a part.

    The file is not synced, since old values are useless after a machine crash. If this process dies
    inside, a hidden temporary file remains. The collector ignores that file, and the next process
    with this id replaces it.

    Raises:
        OSError: The file cannot be written; the old text remains.
    """
    # The collector reads only files that end in .prom.
    temporary_path = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary_path.write_text(text, encoding="utf-8")
        # The collector usually runs as another user.
        temporary_path.chmod(0o644)
        temporary_path.replace(path)
    except OSError:
        with suppress(OSError):
            temporary_path.unlink()
        raise
