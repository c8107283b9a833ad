"""Events of notices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from resilient.events import Event, Level


@dataclass(frozen=True, slots=True)
class NoticesWatched(Event):
    """Somebody is asked whether this host will be taken away."""

    sources: tuple[str, ...]

    def line(self) -> str:
        """Say who is asked."""
        return f"watching for notices of preemption: {', '.join(self.sources)}"


@dataclass(frozen=True, slots=True)
class NoticeSourceLost(Event):
    """A source of notices cannot be asked; it is tried again, more and more rarely."""

    level: ClassVar[Level] = Level.WARNING
    source: str
    reason: str

    def line(self) -> str:
        """Say who, why, and what still works."""
        return (
            f"notices of {self.source} cannot be had: {self.reason}; signals still stop the run, "
            "and it is asked again"
        )


@dataclass(frozen=True, slots=True)
class NoticeSourceFound(Event):
    """A source of notices that was lost answers."""

    source: str

    def line(self) -> str:
        """Say who."""
        return f"notices of {self.source} are heard again"


@dataclass(frozen=True, slots=True)
class NoticeGarbled(Event):
    """A source said something that is no notice; it is ignored."""

    level: ClassVar[Level] = Level.WARNING
    source: str
    reason: str

    def line(self) -> str:
        """Say who and what."""
        return f"{self.source} said what makes no sense, which is ignored: {self.reason}"


@dataclass(frozen=True, slots=True)
class NoticeHeard(Event):
    """This host will be taken away.

    Attributes:
        reason: the source first.
        left_seconds: until then; None if nobody says.
        stops_in_seconds: when training is asked to stop, 0 for now.
    """

    reason: str
    left_seconds: float | None
    stops_in_seconds: float

    def line(self) -> str:
        """Say why, when, and what follows."""
        left = "soon" if self.left_seconds is None else f"in {self.left_seconds:.0f} s"
        follows = (
            "stopping now"
            if not self.stops_in_seconds
            else f"training goes on for {self.stops_in_seconds:.0f} s"
        )
        return f"notice: {self.reason}, this host goes {left}: {follows}"


@dataclass(frozen=True, slots=True)
class NoticeWithdrawn(Event):
    """What was announced for later is not announced any more."""

    reason: str

    def line(self) -> str:
        """Say what it was."""
        return f"notice withdrawn: {self.reason}; training goes on"


@dataclass(frozen=True, slots=True)
class NoticeStale(Event):
    """A notice of the past, which this host has outlived; it is ignored."""

    level: ClassVar[Level] = Level.WARNING
    reason: str
    ago_seconds: float

    def line(self) -> str:
        """Say what and how old."""
        return f"notice: {self.reason} was due {self.ago_seconds:.0f} s ago, which is ignored"


@dataclass(frozen=True, slots=True)
class PreemptionAdvised(Event):
    """This host is likelier than before to be taken away; nothing is stopped for that."""

    level: ClassVar[Level] = Level.WARNING
    reason: str

    def line(self) -> str:
        """Say what was advised."""
        return f"notice: {self.reason}; training goes on until the host is really to go"


@dataclass(frozen=True, slots=True)
class NoticeUnacknowledged(Event):
    """The cloud was not told that it may take the host; it takes it later."""

    level: ClassVar[Level] = Level.WARNING
    source: str
    reason: str

    def line(self) -> str:
        """Say who was not told, and why."""
        return f"{self.source} was not told that all is saved: {self.reason}"
