"""Events of metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from resilient.events import Event, Level


@dataclass(frozen=True, slots=True)
class MetricsServed(Event):
    """Prometheus may ask here."""

    url: str

    def line(self) -> str:
        """Say where."""
        return f"metrics at {self.url}"


@dataclass(frozen=True, slots=True)
class MetricsFailed(Event):
    """Figures could not be had or written; training and the agent go on without them."""

    level: ClassVar[Level] = Level.WARNING
    where: str
    reason: str

    def line(self) -> str:
        """Say what failed, and that nothing else did."""
        return f"metrics: {self.where}: {self.reason}; training is not affected"
