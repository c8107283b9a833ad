"""Keeps the books of a run's lives, and has the table say what follows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from resilient.agent.facts import ProgressUnknown, ReactionChosen
from resilient.agent.verdict.decide import decide
from resilient.agent.verdict.history import History
from resilient.agent.verdict.outcome import CODE_PREEMPTED, Kind
from resilient.agent.verdict.progress import Progress

if TYPE_CHECKING:
    from resilient.agent.stops import Stops
    from resilient.agent.verdict.decide import Action
    from resilient.agent.verdict.history import Limits
    from resilient.agent.verdict.outcome import Outcome
    from resilient.agent.verdict.progress import ProgressLog
    from resilient.clock import Clock
    from resilient.events import Emitter
    from resilient.world.stopping import StopRequest

# Sources of notices on this host are asked twice in that time.
_NEWS_SECONDS = 1.0
_STOPPING_SECONDS_MAX = 2.0
_STOPPING_SHARE = 0.1
# Of the time that is left, where the answer says with which code the run ends.
_DECIDING_SHARE = 0.5
# Hosts that go again and again without any progress between may well go because of the run.
_EXCUSED_MAX = 20
# Where nobody says what is committed, a life that ends within that time got nowhere.
_BRIEF_SECONDS = 60.0


class Judge:
    """Remembers what the lives cost; the rest is values.

    Args:
        spec: torch's description of the group: its restarts, its rendezvous.
        limits: how often a run may fail; ``spec`` says how many restarts it has.
        progress: what the repository holds.
        clock: dates failures.
        emit: where each decision is told, with its reason.
        again: Command that continues the run.

    Attributes:
        restarts_left: after the last decision.
        again: Command that continues the run.
    """

    def __init__(
        self,
        spec: Any,
        limits: Limits,
        progress: ProgressLog,
        clock: Clock,
        emit: Emitter,
        again: str = "the same command",
    ) -> None:
        self.again = again
        self.restarts_left: int = spec.max_restarts
        self._limits = replace(limits, restarts_max=spec.max_restarts)
        self._rendezvous = spec.rdzv_handler
        self._progress = progress
        self._clock = clock
        self._emit = emit
        self._history: History | None = None
        self._last_seconds = clock.monotonic_seconds()
        self._before_loss: History | None = None
        self._excused = 0

    def after(
        self, outcome: Outcome, nodes: int | None, request: StopRequest | None = None
    ) -> Action:
        """Return what follows ``outcome`` of a life of ``nodes`` nodes, and note what it costs.

        The store is asked only where its answer decides something or is told to somebody.
        While a ``request`` to stop runs, only for a tenth of the time that is left, or half of it
        where a rank was killed and the answer decides the exit code; 2 s at most.
        """
        now_seconds = self._clock.monotonic_seconds()
        is_brief = not outcome.has_stepped and now_seconds - self._last_seconds < _BRIEF_SECONDS
        self._last_seconds = now_seconds
        if _needs_answer(outcome):
            self._look(request, _DECIDING_SHARE if outcome.is_taken else _STOPPING_SHARE)
        progressed = self._count(outcome, is_brief=is_brief)
        outcome = replace(outcome, newest=self._newest(outcome))
        before = self._history or History(preemptions=self._progress.launches_before)
        self._history = before.after(outcome, now_seconds, progressed=progressed)
        # Of a life that trained and got nowhere new a host that is gone says why.
        is_open = progressed is None or (outcome.has_stepped and not progressed)
        self._before_loss = before if outcome.is_loss and is_open else None
        self._excused = 0 if progressed else self._excused
        budget = self._history.budget(
            self._limits,
            now_seconds,
            seed=self._rendezvous.get_run_id(),
            may_leave=(nodes or 1) > self._nodes_min,
        )
        action = decide(outcome, replace(budget, again=self.again))
        self.restarts_left = budget.after(action).restarts_left
        self._emit(
            ReactionChosen(
                ended=outcome.kind.value,
                cause=outcome.cause.value if outcome.cause else "",
                status=outcome.status,
                action=type(action).__name__,
                reason=getattr(action, "reason", "") or getattr(action, "cause", ""),
                restarts_left=self.restarts_left,
                no_progress_lives=budget.no_progress_lives,
            )
        )
        return action

    def found_lost(self, nodes: list[str]) -> None:
        """Hear which nodes of the life that ended are gone: then its end says nothing else."""
        if nodes and self._before_loss and self._excused < _EXCUSED_MAX:
            self._history, self._before_loss = self._before_loss, None
            self._excused += 1

    def with_late_news(self, outcome: Outcome, stops: Stops) -> Outcome:
        """Wait a moment for a stop where a rank was killed and the run would end of it.

        Who takes a host away kills ranks in the moment in which we are told, or before it.
        """
        if outcome.kind is not Kind.FAILED or not outcome.is_taken or self.restarts_left > 0:
            return outcome
        stops.wait(_NEWS_SECONDS)
        told = replace(outcome, stop_signal=stops.asked_by)
        return told.in_a_stop() if told.stop_signal else outcome

    def _count(self, outcome: Outcome, *, is_brief: bool) -> bool | None:
        """Return whether a life that failed made progress, None where nobody can say."""
        if outcome.kind is not Kind.FAILED and not outcome.is_loss:
            return False
        progressed = self._progress.count_failure(is_brief=is_brief)
        if progressed is None:
            self._emit(ProgressUnknown())
        is_untold = self._progress.newest is Progress.UNTOLD
        return None if outcome.is_loss and is_untold else progressed

    def _newest(self, outcome: Outcome) -> str | None:
        newest = self._progress.name_of_newest
        # What was committed once is as good for the question whether anything is.
        return self._progress.name_of_last if outcome.is_taken and newest == "" else newest

    def _look(self, request: StopRequest | None, share: float) -> None:
        if request is None:
            self._progress.look()
            return
        left_seconds = request.left_seconds(self._clock.monotonic_seconds())
        self._progress.look(min(_STOPPING_SECONDS_MAX, share * left_seconds))

    @property
    def _nodes_min(self) -> int:
        """Fewest nodes to train with; a rendezvous of a fixed size says none."""
        settings: Any = getattr(self._rendezvous, "_settings", None)
        return int(getattr(settings, "min_nodes", 1 << 30))


def _needs_answer(outcome: Outcome) -> bool:
    """Say whether what is committed matters: to the rules, to the next life, or to a person."""
    if outcome.kind is Kind.STOPPED:
        return outcome.status not in (0, CODE_PREEMPTED)
    return outcome.kind in (Kind.FAILED, Kind.REGROUPED) or outcome.hosts_left > 0
