"""What was seen -> promises kept and broken (pure).

Each promise is judged by itself, from all strikes that put it to the test.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING

from resilient.testing.chaos.evidence import is_comparable
from resilient.testing.chaos.faults import Kind, Target

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from resilient.testing.chaos.evidence import Evidence, Struck

_SHOWN_MAX = 3
_STOPPED = 75


class State(StrEnum):
    """What is known of a promise."""

    KEPT = "kept"
    BROKEN = "BROKEN"
    UNTESTED = "untested"


@dataclass(frozen=True, slots=True)
class Promise:
    """One promise, judged.

    Attributes:
        name: in a word.
        text: what is promised.
        state: whether it was kept.
        why: what broke it, or why nothing tested it.
    """

    name: str
    text: str
    state: State
    why: str = ""


def judge(evidence: Evidence) -> tuple[Promise, ...]:
    """Return all promises with what became of them."""
    return (
        _survival(evidence),
        _exit_codes(evidence),
        _atomic(evidence),
        _durable(evidence),
        _detection(evidence),
        _available(evidence),
        _bounded(evidence),
        _one_writer(evidence),
        _once(evidence),
        _exact(evidence),
    )


def is_proven(evidence: Evidence, promises: Iterable[Promise]) -> bool:
    """Whether every fault struck and no promise was broken."""
    return not evidence.missed and all(one.state is not State.BROKEN for one in promises)


def interval_steps(evidence: Evidence) -> int:
    """Return the most steps between two saves of the undisturbed run, its beginning included."""
    steps = [0, *sorted(evidence.calm.steps)]
    return max((after - before for before, after in pairwise(steps)), default=0)


def bound_steps(struck: Struck, interval: int) -> int:
    """Return how many steps a strike may cost.

    What stops in good order loses nothing. What dies loses what came after its last save, and
    one interval more if the next save was on its way; a damaged checkpoint costs one more.
    """
    if struck.code == _STOPPED:
        return 0
    return interval * (3 if struck.damaged and not struck.is_mended else 2)


def _survival(evidence: Evidence) -> Promise:
    problems = [f"{one.what}: {one.problem}" for one in evidence.struck if one.problem]
    ended = evidence.ended
    if not problems and (ended.problem or ended.code):
        problems.append(ended.problem or f"the run ended with {ended.code}")
    text = "after every fault the run goes on, and gets to its end"
    return _judged("survival", text, problems, 1, "")


def _exit_codes(evidence: Evidence) -> Promise:
    tested = [one for one in evidence.struck if one.code is not None or one.ends]
    wrong = [f"{one.what}: {said}" for one in tested for said in _wrong_codes(one)]
    text = "exit codes say why the job ended"
    return _judged("exit_codes", text, wrong, len(tested), "no fault ended the job")


def _wrong_codes(one: Struck) -> list[str]:
    if one.ends:
        # Each host's for itself; the job's is one of them.
        return [
            f"host-{end.host} ended with {end.code} and not {_words(end.codes)}"
            for end in one.ends
            if not end.is_right
        ]
    is_wrong = one.code is not None and one.code not in one.codes
    return [f"{one.code} and not {_words(one.codes)}"] * is_wrong


def _atomic(evidence: Evidence) -> Promise:
    wrong = [f"{name}: {problem}" for name, problem in evidence.ended.damages.items()]
    text = "every checkpoint is whole or not there"
    return _judged("atomic", text, wrong, 1, "")


def _durable(evidence: Evidence) -> Promise:
    tested = [one for one in evidence.struck if one.before and not one.damaged and not one.problem]
    wrong = [
        f"{one.what}: {one.before} was committed, and then the newest was {one.after or 'none'}"
        for one in tested
        if one.after is None or one.before is None or one.after < one.before
    ]
    text = "what was committed stays, and the newest never becomes an older one"
    return _judged(
        "durable", text, wrong, len(tested), "no fault came after a save and left it undamaged"
    )


def _detection(evidence: Evidence) -> Promise:
    tested = [one for one in evidence.struck if one.damaged]
    wrong = [f"{one.what}: nobody found it" for one in tested if not one.is_found]
    text = "a changed bit is found before it is used"
    return _judged("detection", text, wrong, len(tested), "no fault changed a bit")


def _available(evidence: Evidence) -> Promise:
    tested = [one for one in evidence.struck if one.is_new_life and not one.problem]
    wrong = [
        f"{one.what}: began from {one.restored or 'scratch'}, and {due} was whole"
        for one in tested
        for due in (one.due or one.after,)
        if due and not one.is_mended and (one.restored is None or one.restored < due)
    ]
    text = "a new life begins from the newest checkpoint that is whole"
    return _judged("available", text, wrong, len(tested), "no fault ended a life")


def _bounded(evidence: Evidence) -> Promise:
    interval = interval_steps(evidence)
    tested = [one for one in evidence.struck if one.is_new_life and not one.problem]
    wrong = [
        f"{one.what}: {one.lost_steps} steps were lost, {bound_steps(one, interval)} at most may be"
        for one in tested
        if one.lost_steps > bound_steps(one, interval)
    ]
    text = f"little work is lost: saves are {interval} steps apart, and a stop loses none"
    return _judged("bounded", text, wrong, len(tested), "no fault ended a life")


def _one_writer(evidence: Evidence) -> Promise:
    tested = [one for one in evidence.struck if _ends_agent(one)]
    wrong = [f"{one.what}: {len(one.orphans)} ranks trained on" for one in tested if one.orphans]
    text = "no rank trains on when its agent is gone"
    return _judged("one_writer", text, wrong, len(tested), "no fault killed the agent")


def _ends_agent(one: Struck) -> bool:
    fault = one.strike.fault
    return fault.kind is Kind.KILL and fault.target is Target.AGENT


def _once(evidence: Evidence) -> Promise:
    flaws = evidence.ended.flaws
    text = "no sample was lost and none trained on twice"
    why = "the script keeps no ledger: use resilient.Trainer"
    return _judged("exactly_once", text, flaws or (), 0 if flaws is None else 1, why)


def _exact(evidence: Evidence) -> Promise:
    calm, ended = evidence.calm, evidence.ended
    text = "the end is that of the undisturbed run, bit for bit"
    why = "the run did not get to its end"
    is_tested = not ended.code and not ended.problem
    if is_tested and not is_comparable(calm, ended):
        struck_by, calm_by = (", ".join(map(str, one.worlds)) for one in (ended, calm))
        is_tested = False
        why = (
            f"ranks were {struck_by}, and {calm_by} in the undisturbed run: only "
            'reduction="canonical" has the same bits then'
        )
    return _judged("exact", text, ended.differences, is_tested, why)


def _judged(name: str, text: str, wrong: Sequence[str], tested: int, why: str) -> Promise:
    if not tested:
        return Promise(name, text, State.UNTESTED, why)
    if not wrong:
        return Promise(name, text, State.KEPT)
    more = len(wrong) - _SHOWN_MAX
    shown = "; ".join(wrong[:_SHOWN_MAX]) + (f"; and {more} more" if more > 0 else "")
    return Promise(name, text, State.BROKEN, shown)


def _words(codes: Sequence[int | None]) -> str:
    return " or ".join(str(one) for one in codes if one is not None) or "to go on"
