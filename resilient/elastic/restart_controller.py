"""Apply the policy over attempts; track checkpoint progress.

Progress of a run: checkpoints that an attempt added to the repository.

Keeps the books of a run's lives, and has the table say what follows.

What the agent asks of the repository; nothing here holds it for long.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from resilient.checkpoint.generations import read_generations
from resilient.elastic.events import ProgressUnknown, RestartDecisionMade
from resilient.elastic.outcome import CODE_PREEMPTED, OutcomeKind
from resilient.elastic.restart_policy import FailureHistory, decide
from resilient.errors import ResilientError
from resilient.format.keys import CHECKPOINTS, MANIFEST, CheckpointId, split_checkpoint_key
from resilient.storage.open import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from resilient.clock import Clock
    from resilient.distributed.stop_request import StopRequest
    from resilient.elastic.outcome import Outcome
    from resilient.elastic.restart_policy import Action, FailureLimits
    from resilient.elastic.signals import StopSignals
    from resilient.events import Emitter
    from resilient.storage.store import Store

ASKING_SECONDS_MAX = 15.0
"""How long a store may take to answer, where nothing is more urgent."""


class ProgressState(Enum):
    """Answers that are no checkpoint."""

    UNKNOWN = "unknown"
    """The repository could not be asked."""
    UNTOLD = "untold"
    """Nobody said which repository it is."""


class ProgressLog:
    """Remembers the newest checkpoint across lives.

    Args:
        ask: takes how many seconds the answer may take, and returns the newest committed
            checkpoint, None before the first, or a ``Progress``; compared for equality only.
            Without it nothing is known.
        launches_before: how often the run was launched before this time.

    Attributes:
        newest: the last answer that was one.
        is_answered: whether the last question was.
    """

    def __init__(self, ask: Callable[[float], object] | None, launches_before: int = 0) -> None:
        self.launches_before = launches_before
        self._ask = ask
        self.newest: object = ask(ASKING_SECONDS_MAX) if ask else ProgressState.UNTOLD
        self.is_answered = self.newest is not ProgressState.UNKNOWN
        self._at_failure = self.newest

    def look(self, within_seconds: float = ASKING_SECONDS_MAX) -> None:
        """Ask for the newest checkpoint; an unknown one does not replace a known one."""
        found = self._ask(within_seconds) if self._ask else ProgressState.UNTOLD
        self.is_answered = found is not ProgressState.UNKNOWN
        if not isinstance(found, ProgressState) or self.newest is ProgressState.UNTOLD:
            self.newest = found

    def count_failure(self, *, is_brief: bool = False) -> bool | None:
        """Say whether a checkpoint was committed since the failure before this one.

        Without anything to ask there is no evidence of a crash loop but lives that hardly begin,
        so the answer is yes for others, and the restart budget alone limits those. The same holds
        for a checkpoint in a repository that was first heard from in this life: it may have been
        there before. None when the repository does not answer, which is evidence of neither.

        Args:
            is_brief: whether the life ended soon and nobody had seen a step of it.
        """
        if not self.is_answered:
            return None
        if self.newest is ProgressState.UNTOLD:
            return not is_brief
        was_unknown = isinstance(self._at_failure, ProgressState)
        progressed = self.newest is not None if was_unknown else self.newest != self._at_failure
        self._at_failure = self.newest
        return progressed

    @property
    def name_of_newest(self) -> str | None:
        """The newest checkpoint, None where nothing was committed; empty when not known."""
        if not self.is_answered or isinstance(self.newest, ProgressState):
            return ""
        return None if self.newest is None else str(self.newest)

    @property
    def name_of_last(self) -> str:
        """The newest checkpoint that was ever heard of; empty if none was."""
        newest = self.newest
        return "" if newest is None or isinstance(newest, ProgressState) else str(newest)

    def describe(self) -> str:
        """Return what is safe, for a person."""
        if self.newest is ProgressState.UNTOLD:
            return "not known here (no --repo): what the script committed is not touched"
        if self.newest is ProgressState.UNKNOWN:
            return "not known (the repository does not answer): nothing committed is touched"
        if self.newest is None:
            return "no checkpoint was committed yet"
        return f"{self.newest} is committed"


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


class RestartController:
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
        limits: FailureLimits,
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
        self._history: FailureHistory | None = None
        self._last_seconds = clock.monotonic_seconds()
        self._before_loss: FailureHistory | None = None
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
        before = self._history or FailureHistory(preemptions=self._progress.launches_before)
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
            RestartDecisionMade(
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

    def with_late_news(self, outcome: Outcome, stops: StopSignals) -> Outcome:
        """Wait a moment for a stop where a rank was killed and the run would end of it.

        Who takes a host away kills ranks in the moment in which we are told, or before it.
        """
        if outcome.kind is not OutcomeKind.FAILED or not outcome.is_taken or self.restarts_left > 0:
            return outcome
        stops.wait(_NEWS_SECONDS)
        told = replace(outcome, stop_signal=stops.asked_by)
        return told.in_a_stop() if told.stop_signal else outcome

    def _count(self, outcome: Outcome, *, is_brief: bool) -> bool | None:
        """Return whether a life that failed made progress, None where nobody can say."""
        if outcome.kind is not OutcomeKind.FAILED and not outcome.is_loss:
            return False
        progressed = self._progress.count_failure(is_brief=is_brief)
        if progressed is None:
            self._emit(ProgressUnknown())
        is_untold = self._progress.newest is ProgressState.UNTOLD
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
    if outcome.kind is OutcomeKind.STOPPED:
        return outcome.status not in (0, CODE_PREEMPTED)
    return outcome.kind in (OutcomeKind.FAILED, OutcomeKind.REGROUPED) or outcome.hosts_left > 0


def newest_committed(
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    within_seconds: float = ASKING_SECONDS_MAX,
) -> object:
    """Return the newest committed checkpoint under ``url``, None before the first.

    Never raises and takes ``within_seconds`` at most: a store that does not answer must not
    hold the agent. Then, as without any time to ask, it is ``Progress.UNKNOWN``.
    """
    return _ask_store(find_newest, url, storage_options, within_seconds)


def launches_of(url: str, storage_options: Mapping[str, Any] | None = None) -> int | None:
    """Return how often the run under ``url`` was launched; None when nobody answers."""

    def count(store: Store) -> int:
        return sum(one.cause == "start" for one in read_generations(store))

    found = _ask_store(count, url, storage_options, ASKING_SECONDS_MAX)
    return None if found is ProgressState.UNKNOWN else int(found)


def _ask_store(
    question: Callable[[Store], Any],
    url: str,
    storage_options: Mapping[str, Any] | None,
    within_seconds: float,
) -> Any:
    found: list[Any] = [ProgressState.UNKNOWN]
    if within_seconds <= 0:
        return found[0]

    def ask() -> None:
        try:
            found[0] = question(open_store(url, storage_options=storage_options))
        except (ResilientError, OSError, ImportError):
            found[0] = ProgressState.UNKNOWN

    thread = threading.Thread(target=ask, name="list-checkpoints", daemon=True)
    thread.start()
    thread.join(within_seconds)
    return found[0]


def find_newest(store: Store) -> CheckpointId | None:
    """Return the newest checkpoint whose manifest is in the store."""
    keys = (split_checkpoint_key(entry.key) for entry in store.list(CHECKPOINTS))
    return max((key[0] for key in keys if key and key[1] == MANIFEST), default=None)
