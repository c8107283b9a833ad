"""Notice, Source protocol, what a notice means now.

A notice that this host will be taken away, and where notices come from.

What a notice means now: a function of it and the time.
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
    """What a source says now.

    Attributes:
        reason: for a person, the source first: ``aws: spot terminate``.
        at_seconds: when the host goes, in seconds of unix time; None if nobody says.
        is_advice: it is only likelier than before that the host will go.
        is_for_all: all hosts of the run go, and not this one alone.
    """

    reason: str
    at_seconds: float | None = None
    is_advice: bool = False
    is_for_all: bool = False


class SourceLost(Exception):
    """A source cannot be asked; it says neither that the host stays nor that it goes."""


class SourceGarbled(Exception):
    """A source answered with what its protocol does not know."""


class NoticeSource(Protocol):
    """One place to ask, by one thread; a wait of its own ends within its own timeouts."""

    @property
    def name(self) -> str:
        """As in ``--notice``."""

    @property
    def every_seconds(self) -> float:
        """Pause between two questions."""

    def look(self) -> Notice | None:
        """Return what is announced now, None if nothing is.

        Raises:
            SourceLost: it cannot be asked.
            SourceGarbled: the answer makes no sense.
        """

    def acknowledge(self) -> None:
        """Say that the host may go now: all is saved. Does nothing where nobody listens.

        Raises:
            SourceLost: nobody heard it.
        """

    def close(self) -> None:
        """Let go of what it holds."""


def unix_seconds(clock: Clock) -> float:
    """Return the wall clock as seconds of unix time."""
    return datetime.fromisoformat(clock.now_iso()).timestamp()


def moment_of(text: str) -> float:
    """Return the unix time of an ISO 8601 moment; one without a zone is UTC.

    Raises:
        SourceGarbled: it is none.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise SourceGarbled(f"{text[:40]!r} is no moment") from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def notice_of(document: Mapping[str, Any], name: str, since_seconds: float) -> Notice:
    """Return the notice of ``{"reason": ..., "seconds": ...}`` or ``{..., "at": ...}``.

    With ``"all": true`` it is for all hosts of the run.

    Args:
        document: as a person or a script wrote it; all of it may be left out.
        name: of the source.
        since_seconds: the unix time that ``seconds`` count from.

    Raises:
        SourceGarbled: a value is not what it should be.
    """
    reason = str(document.get("reason") or "asked to stop")[:200]
    is_for_all = document.get("all", False)
    if not isinstance(is_for_all, bool):
        raise SourceGarbled(f"`all` is {is_for_all!r} and neither true nor false")
    if "at" in document:
        at_seconds = moment_of(str(document["at"]))
        return Notice(f"{name}: {reason}", at_seconds, is_for_all=is_for_all)
    seconds = document.get("seconds")
    if seconds is None:
        return Notice(f"{name}: {reason}", is_for_all=is_for_all)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
        raise SourceGarbled(f"`seconds` is {seconds!r} and no number of seconds")
    return Notice(f"{name}: {reason}", since_seconds + seconds, is_for_all=is_for_all)


STALE_SECONDS = 300.0
"""A host that lives so long after its end was announced has outlived the announcement."""
LEAD_SECONDS = 120.0
"""So long before a known end training is stopped; what clouds give that give most."""
_HOST_MARGIN_SECONDS = 2.0


class Meaning(Enum):
    """What follows from a notice."""

    NOTHING = "nothing"
    ADVICE = "advice"
    STALE = "stale"
    LATER = "later"
    NOW = "now"


@dataclass(frozen=True, slots=True)
class NoticeDecision:
    """A meaning with its numbers.

    Attributes:
        meaning: what follows.
        in_seconds: LATER: until it is time to stop. STALE: how long ago the end was due.
        left_seconds: NOW: what all of a stop may take.
    """

    meaning: Meaning
    in_seconds: float = 0.0
    left_seconds: float = 0.0


def evaluate_notice(
    notice: Notice | None, now_seconds: float, grace_seconds: float, lead_seconds: float
) -> NoticeDecision:
    """Return what ``notice`` means.

    Args:
        notice: what a source says; None for nothing.
        now_seconds: unix time.
        grace_seconds: what a stop may take if nobody says when the host goes, or if it should be
            gone already.
        lead_seconds: how long before a known end it is time.
    """
    if notice is None or notice.is_advice:
        return NoticeDecision(Meaning.ADVICE if notice else Meaning.NOTHING)
    if notice.at_seconds is None:
        return NoticeDecision(Meaning.NOW, left_seconds=grace_seconds)
    return _judge_moment(notice.at_seconds - now_seconds, grace_seconds, lead_seconds)


def _judge_moment(left_seconds: float, grace_seconds: float, lead_seconds: float) -> NoticeDecision:
    if left_seconds > lead_seconds:
        return NoticeDecision(Meaning.LATER, in_seconds=left_seconds - lead_seconds)
    if left_seconds < -STALE_SECONDS:
        return NoticeDecision(Meaning.STALE, in_seconds=-left_seconds)
    if left_seconds <= 0:
        return NoticeDecision(Meaning.NOW, left_seconds=grace_seconds)
    margin_seconds = min(_HOST_MARGIN_SECONDS, left_seconds / 2)
    return NoticeDecision(Meaning.NOW, left_seconds=left_seconds - margin_seconds)
