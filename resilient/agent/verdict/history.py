"""What the lives of a run have cost so far, and what that leaves to spend (pure)."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from resilient.agent.verdict.causes import Cause
from resilient.agent.verdict.decide import Budget
from resilient.agent.verdict.outcome import Kind, Outcome

_JITTER_MIN = 0.5
# Where a failure of this host may not be tried again at all, one of another host still may.
_LOSSES_MIN = 3


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a run may fail.

    Attributes:
        restarts_max: restarts after failures, in a window of time.
        window_seconds: the window; 0 is the whole job.
        preemptions_max: how often the run may be interrupted; None is any number.
        no_progress_lives_max: lives in a row that failed without a new checkpoint; 0 is any.
        host_failures_max: failures of this host in a window, until it is left out; 0 is any.
    """

    restarts_max: int = 3
    window_seconds: float = 3600.0
    preemptions_max: int | None = None
    no_progress_lives_max: int = 3
    host_failures_max: int = 3


@dataclass(frozen=True, slots=True)
class History:
    """What happened.

    Attributes:
        failures: when lives failed, monotonic seconds.
        host_failures: the same of those whose first failure was on this host.
        preemptions: how often the run was interrupted, before this agent included.
        no_progress_lives: lives in a row, the last included, that failed, or lost ranks of other
            hosts, and committed nothing; one that was robbed counts neither for nor against.
        losses: when lives ended with the loss of ranks of other hosts, since the last of them
            that is known to have made progress.
    """

    failures: tuple[float, ...] = ()
    host_failures: tuple[float, ...] = ()
    preemptions: int = 0
    no_progress_lives: int = 0
    losses: tuple[float, ...] = ()

    def after(self, outcome: Outcome, at_seconds: float, *, progressed: bool | None) -> History:
        """Return the history with one more life; whether it ``progressed`` may not be known."""
        if outcome.is_loss:
            return self._after_loss(at_seconds, progressed=progressed)
        if outcome.kind is not Kind.FAILED:
            interrupted = outcome.is_interruption
            return replace(self, preemptions=self.preemptions + 1) if interrupted else self
        mine = () if outcome.is_echo or outcome.cause is Cause.PEER else (at_seconds,)
        lives = self.no_progress_lives
        is_silent = progressed is None or (outcome.is_robbed and not progressed)
        return replace(
            self,
            failures=(*self.failures, at_seconds),
            host_failures=(*self.host_failures, *mine),
            no_progress_lives=lives if is_silent else 0 if progressed else lives + 1,
        )

    def _after_loss(self, at_seconds: float, *, progressed: bool | None) -> History:
        if progressed:
            return replace(self, losses=(), no_progress_lives=0)
        lives = self.no_progress_lives + (progressed is False)
        return replace(self, losses=(*self.losses, at_seconds), no_progress_lives=lives)

    def budget(
        self, limits: Limits, at_seconds: float, *, seed: str = "", may_leave: bool = False
    ) -> Budget:
        """Return what is left to spend at ``at_seconds``, the life that just ended not yet paid.

        Args:
            limits: of the run.
            at_seconds: now, on the monotonic clock.
            seed: of the jitter of a wait; the same seed and history wait equally long.
            may_leave: whether the other hosts can go on without this one.
        """
        recent = _within(self.failures, limits, at_seconds)
        losses = _within(self.losses, limits, at_seconds)
        most = limits.preemptions_max
        drawn = random.Random(f"{seed}/{len(self.failures)}").random()  # noqa: S311 - no secret
        return Budget(
            restarts_left=limits.restarts_max - max(0, len(recent) - 1),
            no_progress_lives=self.no_progress_lives,
            no_progress_lives_max=limits.no_progress_lives_max,
            preemptions_left=None if most is None else most - self.preemptions,
            host_failures=len(_within(self.host_failures, limits, at_seconds)),
            host_failures_max=limits.host_failures_max,
            may_leave=may_leave,
            jitter=_JITTER_MIN + (1 - _JITTER_MIN) * drawn,
            losses_left=max(limits.restarts_max, _LOSSES_MIN) + 1 - max(0, len(losses) - 1),
        )


def _within(times: tuple[float, ...], limits: Limits, at_seconds: float) -> list[float]:
    window_seconds = limits.window_seconds
    return [one for one in times if not window_seconds or at_seconds - one < window_seconds]
