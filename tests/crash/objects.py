"""Every request of a run against an object store, with everything that may happen to it."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from resilient.checkpoint.promotion_policy import TieringOptions
from resilient.checkpoint.retention import BestOf, Retention
from resilient.errors import ResilientError
from resilient.storage.retry import RetryingStore
from resilient.testing.fault_store import Crash
from resilient.testing.object_server import (
    ObjectClient,
    ObjectServer,
    PlannedRequestFault,
    RequestFault,
)
from tests.crash.figures import Figures
from tests.crash.invariants import Checker, Facts
from tests.crash.ledger import Ledger, NotedStore
from tests.crash.little import Life, Setup, TickingClock

if TYPE_CHECKING:
    from resilient.format.keys import CheckpointId

FOREIGN = {"readme.txt": b"not ours", "checkpoint-2-g1/notes.txt": b"a person's"}
POLICY = Retention(keep_last=1, keep_best=(BestOf("loss"),))
SETUPS = {
    "plain": Setup(POLICY),
    "parity": Setup(POLICY, None, 1),
    "tiers": Setup(POLICY, TieringOptions(2, 1)),
}
DELAYS = (1, 15, 60)
PATIENT, IMPATIENT = 60.0, 0.0
"""Seconds after which the client gives a request up; the server's clock is a test's."""


@dataclass(frozen=True, slots=True)
class Case:
    """One run and what happens to it; its ``repr`` makes it again.

    Attributes:
        mishaps: what happens.
        patience_seconds: how long a request is asked again.
        kind: how the job saves.
    """

    mishaps: tuple[PlannedRequestFault, ...] = ()
    patience_seconds: float = PATIENT
    kind: str = "plain"

    @property
    def setup(self) -> Setup:
        return SETUPS[self.kind]


def run(case: Case, figures: Figures | None = None) -> tuple[ObjectServer, list[str]]:
    """Run two lives to which ``case`` happens; return the server and what does not hold."""
    server, found = ObjectServer(FOREIGN, case.mishaps), []
    ledger, clock = _Ledger(FOREIGN), TickingClock()
    for number in range(2):
        client = RetryingStore(ObjectClient(server), clock, case.patience_seconds, Random(1))
        life = Life(NotedStore(client, ledger), case.setup, clock, ledger)
        try:
            (_first_life, _next_life)[number](life)
        except Crash:
            ledger.died()
        except ResilientError as error:
            # The store failed for good while the life began, which the next one must survive.
            if not any(one.trouble in UNANSWERED for one in case.mishaps):
                found.append(f"5: life {number} ended with {error!r}")
        found += [f"{one} (after life {number})" for one in _check(server, ledger, case)]
    server.calm()
    found += [f"{one} (at last)" for one in _check(server, ledger, case, figures)]
    Life(RetryingStore(ObjectClient(server), clock), case.setup, clock).begin()
    found += [f"4: an upload of `{key}` was left" for key, _ in server.uploads.values()]
    return server, found


class _Ledger(Ledger):
    """Of a request that is delivered twice the second answer may deny what the first one did."""

    def refused(self, key, content, before) -> None: ...


UNANSWERED = frozenset(RequestFault) - {
    RequestFault.DIES_BEFORE,
    RequestFault.DIES_AFTER,
    RequestFault.TWICE,
}


def _first_life(life: Life) -> None:
    life.begin()
    life.save(0.5)
    life.save(0.1)
    for one in life.best:
        life.tag("mine", one)
    life.save(0.9)
    life.untag("mine")
    for one in life.best if life.setup.parity else ():
        life.damage(one)
        life.repair(one)
    life.save(0.05)
    life.end()


def _next_life(life: Life) -> None:
    life.begin()
    life.save(0.6)
    life.prune()
    life.save(0.8)
    life.end()


def _check(
    server: ObjectServer, ledger: Ledger, case: Case, figures: Figures | None = None
) -> list[str]:
    checker = Checker(case.setup)
    objects = server.objects
    facts = checker.facts(0, dict(objects), live_on=figures is not None)
    if figures is not None:
        figures.checked += 1
        figures.second_lives += 1
    found = checker.violations(objects, facts, ledger.now)
    if not any(one.trouble is RequestFault.LATE for one in case.mishaps):
        return found
    # What arrives late may change what an answer said since. Of a checkpoint that was given up,
    # or rotated away, the manifest may arrive when its files are gone: listed, but never taken.
    swept = [f"1: {where}{one} " for where, one in facts.broken if not_first(one, facts)]
    known = [one for one in found if one.startswith(("0", *swept))]
    if figures is not None:
        figures.late += sum(one.startswith("1") for one in known)
    return [one for one in found if one not in known]


def not_first(checkpoint: CheckpointId, facts: Facts) -> bool:
    return checkpoint not in (*facts.candidates[:1], *facts.durable[:1])


def requests(kind: str = "plain") -> list[str]:
    """Return the verbs of what an undisturbed run asks for."""
    server, found = run(Case(kind=kind))
    assert not found, found
    return [verb for verb, _ in server.trace]


def singles(patience_seconds: float, verb: str = "", kind: str = "plain") -> list[Case]:
    """Return every trouble at every request, or at every one of one verb."""
    mishaps = [
        PlannedRequestFault(at, trouble, after)
        for at, asked in enumerate(requests(kind))
        if verb in ("", asked)
        for trouble in RequestFault
        for after in (DELAYS if trouble is RequestFault.LATE else (0,))
    ]
    return [Case((one,), patience_seconds, kind) for one in mishaps]


def several(seed: int, count: int) -> list[Case]:
    """Draw cases in which two or three things go wrong."""
    draw, lengths = Random(seed), {kind: len(requests(kind)) for kind in SETUPS}
    cases = []
    for _ in range(count):
        kind = draw.choice(list(SETUPS))
        mishaps = [
            PlannedRequestFault(
                draw.randrange(lengths[kind]),
                draw.choice(list(RequestFault)),
                draw.choice(DELAYS),
                draw.choice((1, 1, 1, 3)),
            )
            for _ in range(draw.choice((2, 2, 3)))
        ]
        cases.append(Case(tuple(mishaps), draw.choice((PATIENT, IMPATIENT)), kind))
    return cases


def sweep_cases(cases: list[Case]) -> Figures:
    """Return what a list of cases showed."""
    figures = Figures()
    for case in cases:
        _, found = run(case, figures)
        figures.objects += 1
        figures.blame(found, repr(case))
    return figures
