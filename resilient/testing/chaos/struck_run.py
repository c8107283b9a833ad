"""One job led through all strikes, with what was seen of each."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from resilient.format.names import parse_checkpoint
from resilient.testing.chaos.evidence import Ended, Evidence, HostEnd
from resilient.testing.chaos.faults import Kind
from resilient.testing.chaos.honesty import right_codes
from resilient.testing.chaos.job import WentWrong
from resilient.testing.chaos.leftovers import newest_whole, saved_steps
from resilient.testing.chaos.strikes import Striker, is_ready

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from resilient.clock import Clock
    from resilient.format.names import CheckpointId
    from resilient.testing.chaos.evidence import Struck
    from resilient.testing.chaos.faults import Strike
    from resilient.testing.chaos.job import Job

# Within that time after a link is up again the hosts have found out whom they took for lost.
_SETTLED_SECONDS = 10.0


class StruckRun:
    """Leads one job through all strikes.

    Args:
        job: not started yet.
        clock: time.
        within_seconds: how long the job may take to go on after a fault.
        patience_seconds: until a step comes at which something is struck, and until the end.
    """

    def __init__(
        self, job: Job, clock: Clock, within_seconds: float, patience_seconds: float
    ) -> None:
        self._job = job
        self._clock = clock
        self._within_seconds = within_seconds
        self._patience_seconds = patience_seconds
        self._striker = Striker(job, clock, within_seconds)
        self._struck: list[Struck] = []

    def through(
        self, strikes: Sequence[Strike], calm: Ended, tell: Callable[[str], None]
    ) -> Evidence:
        """Start the job, strike it, wait for its end; whatever goes wrong is part of what is seen.

        A fault that ends a life waits until the run has saved since the one before: life after
        life without a new checkpoint would rightly be taken for a crash loop.

        Args:
            strikes: in the order of the run.
            calm: the undisturbed run.
            tell: hears of each strike.
        """
        self._job.start()
        missed: tuple[Strike, ...] = ()
        problem, code = "", None
        try:
            for number, strike in enumerate(strikes):
                code = self._reach(strike, calm.step)
                if code is not None:
                    missed = tuple(strikes[number:])
                    break
                self._struck.append(self._strike(strike))
                tell(f"{number + 1}/{len(strikes)}  {self._struck[-1].what}")
                if self._struck[-1].problem:
                    problem = self._struck[-1].problem
                    missed = tuple(strikes[number + 1 :])
                    break
            if not problem and code is None:
                code = self._job.wait(self._patience_seconds)
        except WentWrong as error:
            problem, code = str(error), error.code
            missed = tuple(strikes[len(self._struck) :])
        self._job.kill()
        ended = Ended(code if code is not None else 1, problem, steps=saved_steps(self._job))
        return Evidence(calm, ended, tuple(self._struck), missed)

    def _reach(self, strike: Strike, steps: int) -> int | None:
        """Wait for the step of a strike; return the exit code if the job ended before."""
        job, step = self._job, strike.step(steps)
        last = next((one for one in reversed(self._struck) if one.is_new_life), None)

        def is_due() -> bool:
            return (
                job.highest >= step
                and bool(job.look())
                and (last is None or job.newest() != last.after)
                and is_ready(strike, job)
            )

        return job.until(is_due, self._patience_seconds)

    def _strike(self, strike: Strike) -> Struck:
        job = self._job
        old, told = {one.pid for one in job.look()}, len(job.facts())
        ended, known = [len(one.codes) for one in job.hosts], set(job.reached)
        struck = self._striker.strike(strike)
        struck = replace(struck, after=newest_whole(job.store))
        if struck.code == 0:
            return self._with_ends(struck, ended)
        began_seconds = self._clock.monotonic_seconds()
        if struck.code is not None:
            job.start()
        tend, problem = job.revive if len(job.hosts) > 1 else None, ""
        try:
            job.until(lambda: self._goes_on(old, struck, began_seconds), self._within_seconds, tend)
        except WentWrong as error:
            problem = str(error)
        seconds = self._clock.monotonic_seconds() - began_seconds
        is_new_life = struck.is_new_life or bool(set(job.reached) - known)
        struck = replace(struck, seconds=seconds, is_new_life=is_new_life)
        struck = with_lives(struck, job.facts()[told:], has_hosts=len(job.hosts) > 1)
        struck = self._with_ends(struck, ended)
        # Asked again: of hosts that ended, some may be excused now.
        code = job.code()
        return replace(struck, problem=problem or (f"it ended with {code}" if code else ""))

    def _goes_on(self, old: set[int], struck: Struck, began_seconds: float) -> bool:
        """Whether all ranks have finished a step since: of a new life, or beyond those before."""
        ranks, step = self._job.look(), struck.step
        if not ranks or len(ranks) < self._job.ranks:
            return False
        if all(one.pid not in old and one.step >= 0 for one in ranks):
            return True
        since_seconds = self._clock.monotonic_seconds() - began_seconds
        is_settled = struck.strike.fault.kind is not Kind.CUT or since_seconds > _SETTLED_SECONDS
        return is_settled and all(one.pid in old and one.step > step for one in ranks)

    def _with_ends(self, struck: Struck, before: Sequence[int]) -> Struck:
        """Add whose agents have ended since; hosts that need not come back are not missed."""
        job, fault = self._job, struck.strike.fault
        if len(job.hosts) == 1:
            return struck
        codes = {one.number: one.code() for one in job.hosts}
        ends = tuple(
            HostEnd(one.number, code, right_codes(fault, struck.host, one.number))
            for one, known in zip(job.hosts, before, strict=True)
            for code in one.codes[known:]
        )
        if 0 in codes.values():
            job.excused |= {
                one.host for one in ends if codes[one.host] == one.code and one.is_right
            }
        return replace(struck, ends=ends)


def with_lives(struck: Struck, facts: Sequence[Mapping[str, str]], *, has_hosts: bool) -> Struck:
    """Return a strike with where the new life began, and from what it had to (pure).

    Args:
        struck: what is known of it.
        facts: of rank 0, since it struck.
        has_hosts: whether some hosts may have gone on without another one meanwhile.
    """
    is_mended = any(one["event"] == "CheckpointMended" for one in facts)
    # What was damaged meanwhile is not what a life can begin from.
    lives = began_from(facts, struck.after if struck.damaged else struck.before)
    if not lives:
        return replace(struck, is_mended=is_mended)
    # Others may follow, as hosts come back; the one that began from too little is told.
    wrong = (one for one in lives if one[1] is not None and one[0] < one[1])
    restored, due = next(wrong, lives[0])
    return replace(struck, restored=restored, due=due if has_hosts else None, is_mended=is_mended)


def began_from(
    facts: Sequence[Mapping[str, str]], before: CheckpointId | None
) -> list[tuple[CheckpointId, CheckpointId | None]]:
    """Return where lives began that resumed, each with the newest that was committed then (pure).

    Args:
        facts: of rank 0.
        before: the newest that was committed before them.
    """
    newest, found = before, []
    for one in facts:
        checkpoint = parse_checkpoint(one.get("checkpoint", ""))
        if checkpoint is None:
            continue
        if one["event"] == "CheckpointRestored":
            found.append((checkpoint, newest))
        elif one["event"] == "CheckpointCommitted":
            newest = checkpoint if newest is None else max(newest, checkpoint)
    return found
