"""The figures as they stand: written by the agent's threads, read by a scrape."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from resilient.agent.metrics.exposition import Kind, Sample, render

if TYPE_CHECKING:
    from resilient.agent.metrics.exposition import Metric

LABELS_MAX = 512
"""Values of a label; what comes beyond is left out, whoever made it up."""


class Board:
    """Holds one number per metric and label. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples: dict[tuple[Metric, str, str], Sample] = {}

    def put(self, metric: Metric, value: float, label: str = "") -> None:
        """Set a gauge."""
        with self._lock:
            self._set(metric, value, label, "")

    def add(self, metric: Metric, value: float = 1, label: str = "") -> None:
        """Add to a counter, or one observation to a summary."""
        with self._lock:
            if metric.kind is not Kind.SUMMARY:
                self._grow(metric, value, label, "")
                return
            self._grow(metric, value, label, "_sum")
            self._grow(metric, 1, label, "_count")

    def drop(self, metric: Metric) -> None:
        """Forget a metric: nobody knows it any more."""
        with self._lock:
            for key in [one for one in self._samples if one[0] == metric]:
                del self._samples[key]

    def value(self, metric: Metric, label: str = "") -> float | None:
        """Return what stands there, None for nothing."""
        with self._lock:
            found = self._samples.get((metric, label, ""))
        return None if found is None else found.value

    def page(self) -> str:
        """Return everything as Prometheus reads it."""
        with self._lock:
            samples = list(self._samples.values())
        return render(samples)

    def _grow(self, metric: Metric, value: float, label: str, suffix: str) -> None:
        before = self._samples.get((metric, label, suffix))
        self._set(metric, value + (before.value if before else 0), label, suffix)

    def _set(self, metric: Metric, value: float, label: str, suffix: str) -> None:
        key = (metric, label, suffix)
        known = sum(1 for one in self._samples if one[0] == metric) if label else 0
        if key in self._samples or known < LABELS_MAX:
            self._samples[key] = Sample(metric, value, label, suffix)
