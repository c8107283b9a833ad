"""Preemption notices, the protocol of their sources, and the decision on a notice.

The decision is a pure function of the notice and the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.clock import Clock


@dataclass(frozen=True, slots=True)
class Notice:
    """Current announcement of a source.

    Attributes:
        reason: Readable reason, with the source first: ``aws: spot terminate``.
        at_seconds: Time at which the host is taken away, Unix seconds; None if unknown.
        is_advice: Whether the preemption only became more likely.
        is_for_all: Whether all hosts of the run are taken away, and not only this one.
    """

    reason: str
    at_seconds: float | None = None
    is_advice: bool = False
    is_for_all: bool = False


class SourceLost(Exception):
    """A source does not answer, so the future of the host is unknown."""


class SourceGarbled(Exception):
    """A source answered with something that its protocol does not allow."""


class NoticeSource(Protocol):
    """Source of notices, polled by one thread; its own waits end within its own timeouts."""

    @property
    def name(self) -> str:
        """Name as in ``--notice``."""

    @property
    def every_seconds(self) -> float:
        """Pause between two polls."""

    def look(self) -> Notice | None:
        """Return the current announcement, None without one.

        Raises:
            SourceLost: The source does not answer.
            SourceGarbled: The answer is invalid.
        """

    def acknowledge(self) -> None:
        """Report to the source that the host may be taken; a no-op for most sources.

        Raises:
            SourceLost: The source does not answer.
        """

    def close(self) -> None:
        """Release the resources of the source."""


def unix_seconds(clock: Clock) -> float:
    """Return the wall clock in Unix seconds."""
    return datetime.fromisoformat(clock.now_iso()).timestamp()


def moment_of(text: str) -> float:
    """Return the Unix time of an ISO 8601 time; without a zone the time is UTC.

    Raises:
        SourceGarbled: The text is not a time.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise SourceGarbled(f"{text[:40]!r} is not a time") from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def notice_of(document: Mapping[str, Any], name: str, since_seconds: float) -> Notice:
    """Return the notice of ``{"reason": ..., "seconds": ...}`` or ``{..., "at": ...}``.

    With ``"all": true`` the notice is for all hosts of the run.

    Args:
        document: Document of a user or script; all fields are optional.
        name: Name of the source.
        since_seconds: Start of ``seconds``, Unix seconds.

    Raises:
        SourceGarbled: A value has the wrong type or range.
    """
    reason = str(document.get("reason") or "asked to stop")[:200]
    is_for_all = document.get("all", False)
    if not isinstance(is_for_all, bool):
        raise SourceGarbled(f"`all` is {is_for_all!r}, not true or false")
    if "at" in document:
        at_seconds = moment_of(str(document["at"]))
        return Notice(f"{name}: {reason}", at_seconds, is_for_all=is_for_all)
    seconds = document.get("seconds")
    if seconds is None:
        return Notice(f"{name}: {reason}", is_for_all=is_for_all)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
        raise SourceGarbled(f"`seconds` is {seconds!r}, not a number of seconds")
    return Notice(f"{name}: {reason}", since_seconds + seconds, is_for_all=is_for_all)


STALE_SECONDS = 300.0
"""Age after which a notice is expired: the host still runs."""
LEAD_SECONDS = 120.0
"""Time before a known end at which training stops; most clouds announce no earlier."""
_HOST_MARGIN_SECONDS = 2.0


class Meaning(Enum):
    """Consequence of a notice."""

    NOTHING = "nothing"
    ADVICE = "advice"
    STALE = "stale"
    LATER = "later"
    NOW = "now"


@dataclass(frozen=True, slots=True)
class NoticeDecision:
    """Consequence of a notice with its times.

    Attributes:
        meaning: Consequence of the notice.
        in_seconds: For LATER: time until the stop. For STALE: age of the announced end.
        left_seconds: For NOW: time for the whole stop.
    """

    meaning: Meaning
    in_seconds: float = 0.0
    left_seconds: float = 0.0


def evaluate_notice(
    notice: Notice | None, now_seconds: float, grace_seconds: float, lead_seconds: float
) -> NoticeDecision:
    """Return the consequence of ``notice``.

    Args:
        notice: Announcement of a source; None for none.
        now_seconds: Current time, Unix seconds.
        grace_seconds: Time for a stop if the end of the host is unknown or already past.
        lead_seconds: Time before a known end at which the stop begins.
    """
    if notice is None or notice.is_advice:
        return NoticeDecision(Meaning.ADVICE if notice else Meaning.NOTHING)
    if notice.at_seconds is None:
        return NoticeDecision(Meaning.NOW, left_seconds=grace_seconds)
    return _evaluate_end_time(notice.at_seconds - now_seconds, grace_seconds, lead_seconds)


def _evaluate_end_time(
    left_seconds: float, grace_seconds: float, lead_seconds: float
) -> NoticeDecision:
    if left_seconds > lead_seconds:
        return NoticeDecision(Meaning.LATER, in_seconds=left_seconds - lead_seconds)
    if left_seconds < -STALE_SECONDS:
        return NoticeDecision(Meaning.STALE, in_seconds=-left_seconds)
    if left_seconds <= 0:
        return NoticeDecision(Meaning.NOW, left_seconds=grace_seconds)
    margin_seconds = min(_HOST_MARGIN_SECONDS, left_seconds / 2)
    return NoticeDecision(Meaning.NOW, left_seconds=left_seconds - margin_seconds)
