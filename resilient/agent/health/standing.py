"""Which host of several is to blame for a hang (pure).

An agent sees its own ranks alone. When one rank hangs all others wait for it in a collective, and
become overdue in the same moment on every host. So hosts tell each other how the rank stands that
holds them up most, if any does, and compare:

1. a stopped rank holds all others up, however far it had come;
2. else whoever has done the fewest steps;
3. of those, one that still has time: nobody is judged before it;
4. then who is stuck in the kernel, or busy: who sleeps waits for somebody, most often;
5. then who is in a phase that needs nobody else, and who waits longest.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from resilient.agent.health.heartbeat import find_overdue, state_place
from resilient.world.pulse import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable

    from resilient.agent.health.heartbeat import HangRule, Learned, Vital

_ALONE = frozenset({Phase.BETWEEN, Phase.LOADING, Phase.COMPILING})


@dataclass(frozen=True, slots=True)
class Standing:
    """How the rank of a host stands that holds the others up most.

    Attributes:
        rank: among all.
        step: the last that it finished.
        phase: what it is doing.
        state: of its process.
        waited_seconds: since its last sign.
        is_overdue: whether that is too long.
    """

    rank: int
    step: int
    phase: Phase
    state: str
    waited_seconds: float
    is_overdue: bool

    @property
    def place(self) -> tuple[int, int, Phase]:
        """Where it is, which changes as soon as it gets on."""
        return self.rank, self.step, self.phase

    def order(self) -> tuple[bool, int, bool, int, bool, float, int]:
        """Return by what standings are compared; the least is to blame."""
        return (
            self.state != "T",
            self.step,
            self.is_overdue,
            state_place(self.state),
            self.phase not in _ALONE,
            -self.waited_seconds,
            self.rank,
        )

    def dump(self, number: int) -> str:
        """Return it as text, with a number that grows."""
        return json.dumps({"number": number, **asdict(self)})


def parse_standing(text: str) -> tuple[int, Standing]:
    """Return what :meth:`Standing.dump` made.

    Raises:
        ValueError: it is something else.
    """
    try:
        found = json.loads(text)
        number, phase = int(found.pop("number")), Phase(found.pop("phase"))
        return number, Standing(phase=phase, **found)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no standing: {text[:80]}") from error


def standing_of(
    vitals: Iterable[Vital], learned: Learned, rule: HangRule, now_seconds: float
) -> Standing | None:
    """Return that of the rank which holds up the others most; None when none of them trains."""
    found = [
        Standing(
            rank=one.rank,
            step=one.signs.step,
            phase=one.signs.phase,
            state=one.state,
            waited_seconds=now_seconds - one.signs.since_seconds,
            is_overdue=find_overdue(one, learned, rule, now_seconds) is not None,
        )
        for one in vitals
        if one.signs.phase is not Phase.OUTSIDE or one.state == "T"
    ]
    return min(found, key=Standing.order, default=None)


def find_culprit(ours: Standing, theirs: Iterable[Standing]) -> Standing | None:
    """Return who of the other hosts is to blame rather than we; None when we are."""
    worst = min(theirs, key=Standing.order, default=ours)
    return worst if worst.order() < ours.order() else None
