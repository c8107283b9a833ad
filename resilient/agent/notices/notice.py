"""A notice that this host will be taken away, and where notices come from."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
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


class Source(Protocol):
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
