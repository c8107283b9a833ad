"""Figures of this agent for Prometheus: heard from its events, looked up beside it, never asked.

One thread looks at the ranks and the event files once a second and writes the file; another one
answers scrapes with what lies ready. Neither can hold the agent up, and what fails in them is an
event.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient import __version__
from resilient.accounting.records import AGENT_FILE, WANTED, Record, parse_line
from resilient.agent.metrics import names
from resilient.agent.metrics.board import Board
from resilient.agent.metrics.facts import MetricsFailed, MetricsServed
from resilient.agent.metrics.following import Following
from resilient.agent.metrics.hearing import begin, hear_agent, hear_rank
from resilient.agent.metrics.ranks import RankFigures, weigh
from resilient.agent.metrics.serving import Server
from resilient.agent.metrics.spending import Spending
from resilient.agent.metrics.textfile import write_textfile
from resilient.agent.notices.notice import unix_seconds
from resilient.errors import ConfigError
from resilient.storage.shared import used_bytes
from resilient.world.launch import told_events

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from resilient.agent.metrics.wishes import MetricsWishes
    from resilient.clock import Clock
    from resilient.events import Emitter, Event

_LOOK_SECONDS = 1.0
_STILL_SECONDS = 60.0  # the agent looks around ten times a second while workers run
_END_SECONDS = 5.0
_REASONS_MAX = 20
_HEARD_MAX = 10_000


class Metrics:
    """Gathers figures while the agent runs, and says whether it moves.

    Args:
        wishes: where figures go; nowhere, and this does nothing.
        events: folder of the run's event files, empty if the ranks will say where.
        grace_seconds: how long the agent may wait for its workers to end.
        clock: time.

    Raises:
        ConfigError: the address cannot be had, or the file not be written.
    """

    def __init__(
        self, wishes: MetricsWishes, events: str, grace_seconds: float, clock: Clock
    ) -> None:
        self._wishes = wishes
        self._clock = clock
        self._patience_seconds = grace_seconds + _STILL_SECONDS
        self._board = Board()
        self._ranks = RankFigures(self._board)
        self._spending = Spending(self._board, clock)
        self._following = Following(Path(events)) if events else None
        self._heard: deque[Record] = deque(maxlen=_HEARD_MAX)
        self._emit: Emitter | None = None
        self._agent = ""
        self._is_watching = self._is_lost = False
        self._moved_seconds = clock.monotonic_seconds()
        self._began_seconds = unix_seconds(clock)
        self._written_seconds = clock.monotonic_seconds()
        self._failed: set[str] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="metrics", daemon=True)
        begin(self._board, __version__, self._began_seconds)
        self._server = None
        if wishes.file:
            self._try_file()
        if wishes.port is not None:
            self._server = Server(wishes.host, wishes.port, self._board.page, self.health)

    @contextmanager
    def running(self, emit: Emitter) -> Iterator[None]:
        """Gather and answer inside; write the file a last time at the end."""
        if not self._wishes.is_on:
            yield
            return
        self._emit = emit
        self._thread.start()
        if self._server:
            self._server.start()
            emit(MetricsServed(self._server.url))
        try:
            yield
        finally:
            self._closing.set()
            self._thread.join(_END_SECONDS)
            if self._server:
                self._server.close()

    def hear(self, record: Mapping[str, Any], event: Event) -> None:
        """Take an event of the agent: a sink. Any thread."""
        if not self._wishes.is_on:
            return
        name = type(event).__name__
        hear_agent(Record(0, name, AGENT_FILE, record), self._board)
        if name in ("WorkerGroupStarted", "LifeEnded"):
            self._moved_seconds = self._clock.monotonic_seconds()
            self._is_watching = name == "WorkerGroupStarted"
        self._is_lost |= name == "RunGivenUp"
        if name in WANTED and (told := parse_line(json.dumps(record, default=str), AGENT_FILE)):
            self._agent = told.agent
            self._heard.append(told)

    def beat(self, notes: Path) -> None:
        """Note that the agent moves, and where the ranks show their signs."""
        self._ranks.notes = str(notes)
        self._moved_seconds = self._clock.monotonic_seconds()

    def health(self) -> tuple[bool, str]:
        """Return whether the agent does its work, and a line about it."""
        if self._is_lost:
            return False, "the agent gave the run up"
        still_seconds = self._clock.monotonic_seconds() - self._moved_seconds
        if self._is_watching and still_seconds > self._patience_seconds:
            return False, f"the agent has not moved for {still_seconds:.0f} s"
        return True, "ok"

    def _try_file(self) -> None:
        try:
            write_textfile(Path(self._wishes.file), self._board.page())
        except OSError as error:
            raise ConfigError(
                f"--metrics-file: cannot write `{self._wishes.file}`: {error.strerror}",
                hint="name a file in the folder of node_exporter's --collector.textfile.directory",
            ) from error

    def _look_on(self) -> None:
        while not self._closing.wait(_LOOK_SECONDS):
            self._look(is_last=False)
        self._look(is_last=True)

    def _look(self, *, is_last: bool) -> None:
        self._attempt("ranks", self._look_at_ranks)
        self._attempt("events", self._look_at_events)
        weigh(self._board)
        now_ms = round(1000 * unix_seconds(self._clock))
        self._attempt("account", lambda: self._spending.tell(now_ms, is_last=is_last))
        now_seconds = self._clock.monotonic_seconds()
        is_due = now_seconds - self._written_seconds >= self._wishes.every_seconds
        if self._wishes.file and (is_due or is_last):
            self._written_seconds = now_seconds
            self._attempt(
                "file", lambda: write_textfile(Path(self._wishes.file), self._board.page())
            )

    def _attempt(self, where: str, look: Callable[[], None]) -> None:
        """Do it; whatever it raises is told, each reason once, and costs its figures only."""
        try:
            look()
        except Exception as error:  # noqa: BLE001 - no figure is worth a run
            self._board.add(names.METRICS_ERRORS)
            reason = f"{type(error).__name__}: {error}"
            if reason not in self._failed and len(self._failed) < _REASONS_MAX:
                self._failed.add(reason)
                assert self._emit is not None, "it runs"  # noqa: S101
                self._emit(MetricsFailed(where, reason))

    def _look_at_ranks(self) -> None:
        self._ranks.look(self._clock.monotonic_seconds(), unix_seconds(self._clock))
        self._board.put(names.SHARED_MEMORY, used_bytes())

    def _look_at_events(self) -> None:
        self._spending.take(self._heard.popleft() for _ in range(len(self._heard)))
        self._following = self._following or self._find()
        if self._following is None:
            return
        told = sorted(self._following.read(), key=lambda one: one.at_ms)
        # What this agent tells was heard already; others write to the same file.
        told = [one for one in told if one.agent != self._agent or not one.agent]
        for one in told:
            hear_rank(one, self._board, is_new=one.at_ms >= 1000 * self._began_seconds)
        self._spending.take(told)

    def _find(self) -> Following | None:
        """Return where the ranks write if nobody but they says so."""
        folder = told_events(self._ranks.notes)
        return Following(folder) if folder and folder.is_dir() else None
