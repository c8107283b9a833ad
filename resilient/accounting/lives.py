"""Records to lives: one from each start of the workers to the end of the last of them.

An agent tells when a life begins and ends; its ranks tell what they did in it. Ranks that no agent
of ours started (torchrun, plain python) make lives of their own, one per generation.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from resilient.accounting.records import Record

_OF_AGENTS = frozenset(
    {
        *("WorkerFailed", "HangFound", "StopRequested", "ProgressSeen", "NoticeHeard"),
        *("LifeEnded", "NodesLost"),
    }
)


@dataclass(slots=True)
class Launch:
    """One agent, from its first word to its last.

    Attributes:
        agent: its name, ``host:pid``.
        began_ms: its first word.
        ended_ms: its last.
        exit_code: of its end; None if it did not say that it leaves.
    """

    agent: str
    began_ms: int
    ended_ms: int
    exit_code: int | None = None


@dataclass(slots=True)
class Life:
    """One life of the workers, on all hosts.

    Attributes:
        number: 1 for the first of all launches.
        attempt: its name; empty for one that no agent started.
        agents: that told of it.
        began_ms: when its hosts began to meet.
        started_ms: when its processes did.
        ended_ms: when the last of them was gone, as far as anybody said.
        cause: why it began.
        world_size: ranks of all hosts.
        records: what was told in it, by time.
        is_ended: whether an agent said that it is over.
    """

    number: int
    attempt: str
    agents: set[str]
    began_ms: int
    started_ms: int
    ended_ms: int
    cause: str = ""
    world_size: int = 0
    records: list[Record] = field(default_factory=list)
    is_ended: bool = False

    def told(self, *events: str) -> list[Record]:
        """Return the records of these events, by time."""
        return [one for one in self.records if one.event in events]

    def first(self, *events: str) -> Record | None:
        """Return the first record of these events."""
        return next(iter(self.told(*events)), None)


def launches_of(records: Iterable[Record]) -> list[Launch]:
    """Return the agents in the order of their first words."""
    found: dict[str, Launch] = {}
    for one in records:
        if not one.agent:
            continue
        launch = found.setdefault(one.agent, Launch(one.agent, one.at_ms, one.at_ms))
        launch.ended_ms = max(launch.ended_ms, one.at_ms)
        if one.event in ("RunEnded", "RunGivenUp"):
            launch.exit_code = round(one.number("exit_code"))
    return list(found.values())


def lives_of(records: Sequence[Record]) -> list[Life]:
    """Return the lives by their beginnings, each with what was told in it."""
    by_attempt: dict[str, Life] = {}
    now: dict[str, Life] = {}  # of each agent
    for one in records:
        if one.event == "WorkerGroupStarted" and one.agent:
            now[one.agent] = _begin(by_attempt, one)
        elif one.event in _OF_AGENTS and one.agent in now:
            _note(now[one.agent], one)
    lives = sorted(by_attempt.values(), key=lambda life: life.began_ms)
    _take_ranks(lives, [one for one in records if not one.agent])
    lives.sort(key=lambda life: life.began_ms)
    over_ms = 0
    for number, life in enumerate(lives, 1):
        life.number = number
        life.records.sort(key=lambda one: one.at_ms)
        # A host may come back to the rendezvous while another still ends its workers.
        life.began_ms = min(max(life.began_ms, over_ms), life.started_ms)
        over_ms = life.ended_ms if life.is_ended else over_ms
    return lives


def _begin(by_attempt: dict[str, Life], one: Record) -> Life:
    started_ms = one.at_ms - one.milliseconds("start_seconds")
    began_ms = started_ms - one.milliseconds("met_seconds")
    attempt = one.text("attempt") or f"{one.agent} {one.at_ms}"
    life = by_attempt.setdefault(attempt, Life(0, attempt, set(), began_ms, started_ms, one.at_ms))
    # The first host that was there has waited longest for its peers.
    life.began_ms = min(life.began_ms, began_ms)
    life.started_ms = max(life.started_ms, started_ms, life.began_ms)
    life.ended_ms = max(life.ended_ms, one.at_ms)
    life.cause, life.world_size = one.text("cause"), round(one.number("world_size"))
    life.agents.add(one.agent)
    return life


def _note(life: Life, one: Record) -> None:
    life.records.append(one)
    if one.event == "LifeEnded" or not life.is_ended:
        life.ended_ms = max(life.ended_ms, one.at_ms)
    life.is_ended |= one.event == "LifeEnded"


def _take_ranks(lives: list[Life], told: Sequence[Record]) -> None:
    """Give what ranks told to the lives, by the generation if one is named, else by time."""
    by_agents = list(lives)
    begun_ms = [life.began_ms for life in by_agents]
    generations: dict[int, Life] = {}
    for one in told:
        generation = round(one.number("generation", -1))
        life = generations.get(generation)
        if life is None:
            nth = bisect_right(begun_ms, one.at_ms) - 1
            life = by_agents[nth] if nth >= 0 else None
            if life is None or (life.is_ended and one.at_ms > life.ended_ms):
                life = Life(0, "", set(), one.at_ms, one.at_ms, one.at_ms)
                lives.append(life)
            if generation >= 0:
                generations[generation] = life
        life.records.append(one)
        if not life.attempt:
            began_ms = one.at_ms - (
                one.milliseconds("took_seconds") if one.event == "CheckpointRestored" else 0
            )
            life.began_ms = life.started_ms = min(life.began_ms, began_ms)
        # A keeper may commit what a life left when that is over.
        if not life.is_ended and one.event != "CheckpointCommitted":
            life.ended_ms = max(life.ended_ms, one.at_ms)
