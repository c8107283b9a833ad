"""What a notice means now: a function of it and the time."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from resilient.agent.notices.notice import Notice

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
class Verdict:
    """A meaning with its numbers.

    Attributes:
        meaning: what follows.
        in_seconds: LATER: until it is time to stop. STALE: how long ago the end was due.
        left_seconds: NOW: what all of a stop may take.
    """

    meaning: Meaning
    in_seconds: float = 0.0
    left_seconds: float = 0.0


def judge(
    notice: Notice | None, now_seconds: float, grace_seconds: float, lead_seconds: float
) -> Verdict:
    """Return what ``notice`` means.

    Args:
        notice: what a source says; None for nothing.
        now_seconds: unix time.
        grace_seconds: what a stop may take if nobody says when the host goes, or if it should be
            gone already.
        lead_seconds: how long before a known end it is time.
    """
    if notice is None or notice.is_advice:
        return Verdict(Meaning.ADVICE if notice else Meaning.NOTHING)
    if notice.at_seconds is None:
        return Verdict(Meaning.NOW, left_seconds=grace_seconds)
    return _judge_moment(notice.at_seconds - now_seconds, grace_seconds, lead_seconds)


def _judge_moment(left_seconds: float, grace_seconds: float, lead_seconds: float) -> Verdict:
    if left_seconds > lead_seconds:
        return Verdict(Meaning.LATER, in_seconds=left_seconds - lead_seconds)
    if left_seconds < -STALE_SECONDS:
        return Verdict(Meaning.STALE, in_seconds=-left_seconds)
    if left_seconds <= 0:
        return Verdict(Meaning.NOW, left_seconds=grace_seconds)
    margin_seconds = min(_HOST_MARGIN_SECONDS, left_seconds / 2)
    return Verdict(Meaning.NOW, left_seconds=left_seconds - margin_seconds)
