"""Controller that applies the restart policy over attempts and tracks checkpoint progress.

All queries of the repository run in a thread with a deadline, so a silent store never blocks
the agent.
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
"""Deadline of a store query if nothing is more urgent."""


class ProgressState(Enum):
    """Answers of the progress query that are not a checkpoint."""

    UNKNOWN = "unknown"
    """The repository did not answer."""
    URL_UNKNOWN = "untold"
    """The URL of the repository is unknown."""


class ProgressLog:
    """Newest checkpoint of the run across attempts.

    Args:
        ask: Query that takes its deadline in seconds. It returns the newest committed
            checkpoint, None before the first, or a :class:`ProgressState`; values are compared
            for equality only. Without the query, progress is unknown.
        launches_before: Number of earlier agent runs of this run.

    Attributes:
        newest: Last known answer.
        is_answered: Whether the last query was answered.
    """

    def __init__(self, ask: Callable[[float], object] | None, launches_before: int = 0) -> None:
        self.launches_before = launches_before
        self._ask = ask
        self.newest: object = ask(ASKING_SECONDS_MAX) if ask else ProgressState.URL_UNKNOWN
        self.is_answered = self.newest is not ProgressState.UNKNOWN
        self._at_failure = self.newest

    def look(self, within_seconds: float = ASKING_SECONDS_MAX) -> None:
        """Query the newest checkpoint; an unknown answer does not replace a known one."""
        state = self._ask(within_seconds) if self._ask else ProgressState.URL_UNKNOWN
        self.is_answered = state is not ProgressState.UNKNOWN
        if not isinstance(state, ProgressState) or self.newest is ProgressState.URL_UNKNOWN:
            self.newest = state

    def count_failure(self, *, is_brief: bool = False) -> bool | None:
        """Return whether a checkpoint was committed since the previous failure; None if unknown.

        Without a repository URL, only a brief attempt counts as evidence of a crash loop. All other
        attempts count as progress, and the restart budget alone limits them. If the repository was
        first seen in this attempt, any checkpoint there counts as progress, although it may be
        older. None means that the repository did not answer.

        Args:
            is_brief: Whether the attempt ended soon, without a visible step.
        """
        if not self.is_answered:
            return None
        if self.newest is ProgressState.URL_UNKNOWN:
            return not is_brief
        was_unknown = isinstance(self._at_failure, ProgressState)
        progressed = self.newest is not None if was_unknown else self.newest != self._at_failure
        self._at_failure = self.newest
        return progressed

    @property
    def newest_name(self) -> str | None:
        """Newest checkpoint, None if nothing was committed, empty if unknown."""
        if not self.is_answered or isinstance(self.newest, ProgressState):
            return ""
        return None if self.newest is None else str(self.newest)

    @property
    def last_known_name(self) -> str:
        """Newest checkpoint ever seen; empty if none was."""
        newest = self.newest
        return "" if newest is None or isinstance(newest, ProgressState) else str(newest)

    def describe(self) -> str:
        """Return the safe state of the run as readable text."""
        if self.newest is ProgressState.URL_UNKNOWN:
            return "unknown here (no --repo): checkpoints that the script committed are not touched"
        if self.newest is ProgressState.UNKNOWN:
            return "unknown (the repository does not answer): committed checkpoints are not touched"
        if self.newest is None:
            return "no checkpoint was committed yet"
        return f"{self.newest} is committed"


# The agent polls local sources of notices twice in this time.
_LATE_STOP_SECONDS = 1.0
_STOPPING_SECONDS_MAX = 2.0
_STOPPING_SHARE = 0.1
# Share of the remaining time for a query whose answer decides the exit code.
_DECIDING_SHARE = 0.5
# Hosts that repeatedly leave without any progress may leave because of the run.
_EXCUSED_MAX = 20
# Without a repository URL, an attempt that ends within this time counts as no progress.
_BRIEF_SECONDS = 60.0


class RestartController:
    """State of the restart policy over the attempts of a run; the policy itself is pure.

    Args:
        spec: Group description of torch, with restarts and rendezvous.
        limits: Limits on failures; the number of restarts comes from ``spec``.
        progress: Checkpoint progress of the repository.
        clock: Clock for the times of failures.
        emit: Listener for decisions and their reasons.
        again: Command that continues the run.

    Attributes:
        restarts_left: Restarts left after the last decision.
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
        self._history_before_loss: FailureHistory | None = None
        self._excused_count = 0

    def after(
        self, outcome: Outcome, nodes: int | None, request: StopRequest | None = None
    ) -> Action:
        """Return the action after an attempt on ``nodes`` nodes, and record its cost.

        The store is queried only if the decision or a report needs the answer. The query takes at
        most 2 s. During a ``request`` to stop, the query takes at most a tenth of the time left.
        The limit is half of that time if a rank was killed and the answer decides the exit code.
        """
        now_seconds = self._clock.monotonic_seconds()
        is_brief = not outcome.has_stepped and now_seconds - self._last_seconds < _BRIEF_SECONDS
        self._last_seconds = now_seconds
        if _needs_answer(outcome):
            self._look(
                request, _DECIDING_SHARE if outcome.is_killed_from_outside else _STOPPING_SHARE
            )
        progressed = self._count(outcome, is_brief=is_brief)
        outcome = replace(outcome, newest=self._newest(outcome))
        previous_history = self._history or FailureHistory(
            preemptions=self._progress.launches_before
        )
        self._history = previous_history.after(outcome, now_seconds, progressed=progressed)
        # If an attempt finished steps but committed nothing, a lost host may explain its end.
        is_open = progressed is None or (outcome.has_stepped and not progressed)
        self._history_before_loss = previous_history if outcome.is_peer_loss and is_open else None
        self._excused_count = 0 if progressed else self._excused_count
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

    def excuse_lost_nodes(self, nodes: list[str]) -> None:
        """Do not count the last attempt as a failure if lost nodes explain its end."""
        if nodes and self._history_before_loss and self._excused_count < _EXCUSED_MAX:
            self._history, self._history_before_loss = self._history_before_loss, None
            self._excused_count += 1

    def with_late_stop_request(self, outcome: Outcome, stops: StopSignals) -> Outcome:
        """Wait up to 1 s for a stop request if a rank was killed and no restart is left.

        A scheduler that takes a host away may kill ranks at the moment of its notice, or earlier.
        """
        if (
            outcome.kind is not OutcomeKind.FAILED
            or not outcome.is_killed_from_outside
            or self.restarts_left > 0
        ):
            return outcome
        stops.wait(_LATE_STOP_SECONDS)
        updated_outcome = replace(outcome, stop_signal=stops.asked_by)
        return updated_outcome.as_part_of_stop() if updated_outcome.stop_signal else outcome

    def _count(self, outcome: Outcome, *, is_brief: bool) -> bool | None:
        """Return whether a failed attempt made progress, None if unknown."""
        if outcome.kind is not OutcomeKind.FAILED and not outcome.is_peer_loss:
            return False
        progressed = self._progress.count_failure(is_brief=is_brief)
        if progressed is None:
            self._emit(ProgressUnknown())
        is_url_unknown = self._progress.newest is ProgressState.URL_UNKNOWN
        return None if outcome.is_peer_loss and is_url_unknown else progressed

    def _newest(self, outcome: Outcome) -> str | None:
        newest = self._progress.newest_name
        # An older known commit is enough to decide whether any checkpoint exists.
        return (
            self._progress.last_known_name
            if outcome.is_killed_from_outside and newest == ""
            else newest
        )

    def _look(self, request: StopRequest | None, share: float) -> None:
        if request is None:
            self._progress.look()
            return
        left_seconds = request.left_seconds(self._clock.monotonic_seconds())
        self._progress.look(min(_STOPPING_SECONDS_MAX, share * left_seconds))

    @property
    def _nodes_min(self) -> int:
        """Smallest number of nodes to train with; a rendezvous of fixed size does not know it."""
        settings: Any = getattr(self._rendezvous, "_settings", None)
        return int(getattr(settings, "min_nodes", 1 << 30))


def _needs_answer(outcome: Outcome) -> bool:
    """Return whether the newest commit matters to the policy, the next attempt or the user."""
    if outcome.kind is OutcomeKind.STOPPED:
        return outcome.status not in (0, CODE_PREEMPTED)
    return outcome.kind in (OutcomeKind.FAILED, OutcomeKind.REGROUPED) or outcome.hosts_left > 0


def newest_committed(
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    within_seconds: float = ASKING_SECONDS_MAX,
) -> object:
    """Return the newest committed checkpoint under ``url``, None before the first.

    The function never raises and takes at most ``within_seconds``, so that a silent store never
    blocks the agent. Without an answer or without time it returns ``ProgressState.UNKNOWN``.
    """
    return _ask_store(find_newest, url, storage_options, within_seconds)


def count_runs(url: str, storage_options: Mapping[str, Any] | None = None) -> int | None:
    """Return the number of agent runs of the run under ``url``; None without an answer."""

    def count(store: Store) -> int:
        return sum(generation.cause == "start" for generation in read_generations(store))

    count_or_none = _ask_store(count, url, storage_options, ASKING_SECONDS_MAX)
    return None if count_or_none is ProgressState.UNKNOWN else int(count_or_none)


def _ask_store(
    question: Callable[[Store], Any],
    url: str,
    storage_options: Mapping[str, Any] | None,
    within_seconds: float,
) -> Any:
    answers: list[Any] = [ProgressState.UNKNOWN]
    if within_seconds <= 0:
        return answers[0]

    def ask() -> None:
        try:
            answers[0] = question(open_store(url, storage_options=storage_options))
        except (ResilientError, OSError, ImportError):
            answers[0] = ProgressState.UNKNOWN

    thread = threading.Thread(target=ask, name="list-checkpoints", daemon=True)
    thread.start()
    thread.join(within_seconds)
    return answers[0]


def find_newest(store: Store) -> CheckpointId | None:
    """Return the newest checkpoint whose manifest is in the store."""
    keys = (split_checkpoint_key(entry.key) for entry in store.list(CHECKPOINTS))
    return max((key[0] for key in keys if key and key[1] == MANIFEST), default=None)
