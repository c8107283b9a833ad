"""Collector of metrics from events, heartbeats and event files.

One thread reads heartbeats and event files once per second and writes the text file. A second
thread answers scrapes from values already collected. Neither thread can block the agent, and a
failure in them becomes an event.

Some metrics come from the goodput report, which divides the time of the run into productive and
lost time. The cost of this report is bounded. If there are too many event records, frequent records
are joined over growing intervals. A report that takes longer to compute is computed less often.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient import __version__
from resilient.distributed.heartbeat import progress_path, read_progress
from resilient.distributed.launch_env import read_published_event_file
from resilient.elastic.events import MetricsFailed, MetricsServed
from resilient.elastic.metrics import registry
from resilient.elastic.metrics.registry import MetricsRegistry, write_textfile
from resilient.elastic.metrics.server import MetricsServer
from resilient.elastic.outcome import Cause, OutcomeKind
from resilient.elastic.preemption.notice import unix_seconds
from resilient.errors import ConfigError
from resilient.format.keys import parse_checkpoint
from resilient.goodput.event_log import AGENT_FILE, WANTED, EventRecord, parse_line, present_ms
from resilient.goodput.report import build_report
from resilient.storage.folder import open_inside
from resilient.storage.shared_memory import used_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from resilient.clock import Clock
    from resilient.elastic.options import MetricsOptions
    from resilient.events import Emitter, Event

CHUNK_BYTES = 1 << 20
"""Bytes read from a file at once; the remaining bytes follow at the next read."""
FILES_MAX = 16
"""Number of ranks whose files are read, lowest ranks first: these report events of the run."""


class EventFileTail:
    """Incremental reader of the event files of one folder; one thread.

    Args:
        folder: Folder that may not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}

    def read(self) -> list[EventRecord]:
        """Return the events since the last call, complete lines only.

        Raises:
            OSError: An existing file cannot be read.
            StoreDenied: A file points outside the folder, or is not a regular file.
        """
        return [record for path in self._files() for record in self._read(path)]

    def _files(self) -> list[Path]:
        ranks = {}
        for path in self._folder.glob("rank-*.jsonl"):
            number = path.stem.removeprefix("rank-")
            if number.isdecimal():
                ranks[int(number)] = path
        agent = self._folder / AGENT_FILE
        files = [agent] if agent.exists() else []
        return [*files, *(ranks[rank] for rank in sorted(ranks)[:FILES_MAX])]

    def _read(self, path: Path) -> list[EventRecord]:
        offset = self._offsets.get(path, 0)
        with open_inside(self._folder, path) as file:
            if file.seek(0, 2) < offset:
                offset = 0  # Another file has this name now.
            file.seek(offset)
            data = file.read(CHUNK_BYTES)
        complete_bytes = data.rfind(b"\n") + 1
        if not complete_bytes and len(data) == CHUNK_BYTES:
            complete_bytes = len(data)  # No valid event is that long.
        self._offsets[path] = offset + complete_bytes
        lines = data[:complete_bytes].decode("utf-8", errors="replace").splitlines()
        records = (parse_line(line, path.name) for line in lines)
        return [record for record in records if record is not None]


_CAUSES = frozenset(cause.value for cause in (*Cause, *OutcomeKind))
_OTHER = "other"
_REQUESTED_ENDS = frozenset(
    {OutcomeKind.STOPPED.value, OutcomeKind.PREEMPTED.value, OutcomeKind.KILLED.value}
)
_ENDS_AT_SAME_STEP = frozenset(
    {OutcomeKind.SUCCEEDED.value, OutcomeKind.STOPPED.value, OutcomeKind.PREEMPTED.value}
)
_DIVERGENCE_KINDS = ("nan", "inf", "spike")
_COUNTER_BY_EVENT = {
    "HangFound": registry.HANGS,
    "NoticeReceived": registry.NOTICES,
    "StragglerFound": registry.STRAGGLERS,
}


def record_agent_event(record: EventRecord, registry_of_metrics: MetricsRegistry) -> None:
    """Record an event of the agent of this process."""
    if record.event in _COUNTER_BY_EVENT:
        registry_of_metrics.add(_COUNTER_BY_EVENT[record.event])
    elif record.event == "WorkerGroupStarted":
        registry_of_metrics.add(registry.LIVES)
        registry_of_metrics.put(registry.WORLD_SIZE, record.number("world_size"))
        registry_of_metrics.put(registry.LOCAL_WORLD_SIZE, record.number("local_world_size"))
        registry_of_metrics.put(registry.NODES, record.number("nodes"))
    elif record.event == "RestartDecisionMade":
        _record_restart_decision(record, registry_of_metrics)
    elif record.event == "AttemptEnded":
        # The ranks end before the next poll. Ranks that end together have done the same steps.
        if record.text("ended") in _ENDS_AT_SAME_STEP and record.number("step", -1) >= 0:
            registry_of_metrics.put(registry.STEP, record.number("step"))
    elif record.event in ("RunEnded", "RunAborted"):
        registry_of_metrics.put(registry.EXIT_CODE, record.number("exit_code"))


def record_rank_event(
    record: EventRecord, registry_of_metrics: MetricsRegistry, *, is_new: bool
) -> None:
    """Record an event of a rank.

    Args:
        record: The event.
        registry_of_metrics: Registry for the values.
        is_new: Whether the event is newer than this agent; counters start with the agent.
    """
    if record.event == "GenerationClaimed":
        registry_of_metrics.put(registry.GENERATION, record.number("generation"))
        # A run without a parent checkpoint starts over and ignores older checkpoints.
        if not record.text("parent"):
            for metric in (
                registry.CHECKPOINT_STEP,
                registry.CHECKPOINT_TIME,
                registry.CHECKPOINT_BYTES,
            ):
                registry_of_metrics.drop(metric)
    elif record.event in ("CheckpointCommitted", "CheckpointRestored"):
        checkpoint = parse_checkpoint(record.text("checkpoint"))
        registry_of_metrics.put(
            registry.CHECKPOINT_STEP, checkpoint.step if checkpoint else record.number("step")
        )
    if record.event == "CheckpointCommitted":
        registry_of_metrics.put(registry.CHECKPOINT_TIME, record.at_ms / 1000)
        registry_of_metrics.put(registry.CHECKPOINT_BYTES, record.number("size_bytes"))
    if is_new:
        _count_rank_event(record, registry_of_metrics)


def begin(registry_of_metrics: MetricsRegistry, version: str, now_seconds: float) -> None:
    """Register the initial values, because Prometheus cannot see the growth of a missing counter.

    Args:
        registry_of_metrics: Empty registry.
        version: Version of the library.
        now_seconds: Current time, Unix seconds.
    """
    registry_of_metrics.put(registry.AGENT_INFO, 1, version)
    registry_of_metrics.put(registry.AGENT_START, now_seconds)
    for metric in registry.ALL:
        if metric.kind == "counter" and not metric.label:
            registry_of_metrics.add(metric, 0)
    for cause in (Cause.EXIT, Cause.SIGNAL, Cause.OOM_KILL, Cause.HANG):
        registry_of_metrics.add(registry.FAILURES, 0, cause.value)
        registry_of_metrics.add(registry.RESTARTS, 0, cause.value)
    for kind in _DIVERGENCE_KINDS:
        registry_of_metrics.add(registry.LOSSES_BROKEN, 0, kind)


def _record_restart_decision(record: EventRecord, registry_of_metrics: MetricsRegistry) -> None:
    end_kind = record.text("ended")
    cause = record.text("cause") or end_kind
    cause = cause if cause in _CAUSES else _OTHER
    if record.text("action") == "Restart":
        registry_of_metrics.add(registry.RESTARTS, 1, cause)
    if end_kind == OutcomeKind.FAILED.value:
        registry_of_metrics.add(registry.FAILURES, 1, cause)
    if end_kind in _REQUESTED_ENDS:
        registry_of_metrics.add(registry.PREEMPTIONS)
    registry_of_metrics.put(registry.RESTARTS_LEFT, record.number("restarts_left"))


def _count_rank_event(record: EventRecord, registry_of_metrics: MetricsRegistry) -> None:
    if record.event == "CheckpointCommitted":
        _count_save(record, registry_of_metrics)
    elif record.event == "SaveAborted":
        registry_of_metrics.add(registry.SAVES_ABORTED)
    elif record.event == "LossDivergenceDetected" and record.text("kind") in _DIVERGENCE_KINDS:
        registry_of_metrics.add(registry.LOSSES_BROKEN, 1, record.text("kind"))


def _count_save(record: EventRecord, registry_of_metrics: MetricsRegistry) -> None:
    registry_of_metrics.add(registry.CHECKPOINTS)
    written_bytes = record.number("written_bytes", -1)
    registry_of_metrics.add(
        registry.CHECKPOINT_WRITTEN,
        written_bytes if written_bytes >= 0 else record.number("size_bytes"),
    )
    registry_of_metrics.add(registry.COMMIT, record.milliseconds("commit_seconds") / 1000)
    registry_of_metrics.add(registry.STALL, record.milliseconds("stall_seconds") / 1000)


RANKS_MAX = 256
_WINDOW_SECONDS = 60.0


class RankFigures:
    """Metrics from the heartbeats of the ranks; one thread.

    Args:
        registry_of_metrics: Registry for the values.

    Attributes:
        agent_folder: Folder of the agent with the heartbeats; empty while unknown.
    """

    def __init__(self, registry_of_metrics: MetricsRegistry) -> None:
        self.agent_folder = ""
        self._registry = registry_of_metrics
        self._attempt_number = 0.0
        self._steps_done: dict[int, int] = {}
        self._recent: deque[tuple[float, int]] = deque()

    def look(self, monotonic_seconds: float, unix_seconds: float) -> None:
        """Record the heartbeats of the ranks.

        Args:
            monotonic_seconds: Current time on the clock of the heartbeats.
            unix_seconds: Current time, Unix seconds.
        """
        size = self._registry.value(registry.LOCAL_WORLD_SIZE)
        if not self.agent_folder or size is None:
            return
        self._forget_previous_ranks()
        progress_by_rank = {}
        for local in range(min(int(size), RANKS_MAX)):
            heartbeat = read_progress(progress_path(self.agent_folder, local))
            if heartbeat is None or heartbeat.step < 0:
                continue
            progress_by_rank[local] = heartbeat.step
            if self._steps_done.get(local) != heartbeat.step:
                # The rank entered its current phase at the end of the step, or a little later.
                ago_seconds = max(0.0, monotonic_seconds - heartbeat.since_seconds)
                self._registry.put(registry.RANK_STEP_TIME, unix_seconds - ago_seconds, str(local))
            self._registry.put(registry.RANK_STEP, heartbeat.step, str(local))
        self._steps_done = progress_by_rank
        if progress_by_rank and len(progress_by_rank) == min(int(size), RANKS_MAX):
            self._record_step(min(progress_by_rank.values()), monotonic_seconds)

    def _forget_previous_ranks(self) -> None:
        """Forget the ranks of the previous attempt: the new one may have fewer."""
        attempt = self._registry.value(registry.LIVES) or 0.0
        if attempt != self._attempt_number:
            self._attempt_number = attempt
            self._steps_done.clear()
            self._recent.clear()
            for metric in (registry.RANK_STEP, registry.RANK_STEP_TIME, registry.STEP_RATE):
                self._registry.drop(metric)

    def _record_step(self, step: int, now_seconds: float) -> None:
        registry_of_metrics, recent = self._registry, self._recent
        registry_of_metrics.put(registry.STEP, step)
        if recent and step < recent[-1][1]:
            recent.clear()
        recent.append((now_seconds, step))
        while now_seconds - recent[0][0] > _WINDOW_SECONDS:
            recent.popleft()
        first_seconds, first_step = recent[0]
        if now_seconds > first_seconds:
            registry_of_metrics.put(
                registry.STEP_RATE, (step - first_step) / (now_seconds - first_seconds)
            )


def record_steps_at_risk(registry_of_metrics: MetricsRegistry) -> None:
    """Record the number of steps that a failure would lose now.

    The ranks may already have ended, and a saver daemon may still save their cached steps.
    """
    step, durable = (
        registry_of_metrics.value(registry.STEP),
        registry_of_metrics.value(registry.CHECKPOINT_STEP),
    )
    if durable is None and registry_of_metrics.value(registry.GENERATION) is not None:
        durable = 0.0  # The run has a generation but no checkpoint yet.
    if step is not None and durable is not None:
        registry_of_metrics.put(registry.STEPS_AT_RISK, max(0.0, step - durable))


RECORDS_MAX = 20_000
"""Largest number of records; if joined records exceed it, the goodput metrics are removed."""
_JOIN_WINDOW_MS_MAX = 86_400_000
_FREQUENT_EVENTS: Mapping[str, tuple[str, ...]] = {
    "MetricsLogged": (),
    "ProgressReported": (),
    "PhaseEnded": ("took_seconds",),
    "CheckpointCommitted": ("stall_seconds",),
}
"""Frequent events, with the fields to sum."""
_KEPT_FIELDS = (
    "agent",
    "boot",
    "monotonic",
    "run",
    "host",
    "generation",
    "rank",
    "step",
    "global_step",
)
_EVERY_SECONDS = 5.0
_PAUSE_FACTOR = 50.0


class GoodputFigures:
    """Metrics from the goodput report over all records; one thread.

    Args:
        registry_of_metrics: Registry for the values.
        clock: Clock for the cost of a report.

    Attributes:
        is_full: Whether there were too many records; the metrics are removed then.
    """

    def __init__(self, registry_of_metrics: MetricsRegistry, clock: Clock) -> None:
        self.is_full = False
        self._registry = registry_of_metrics
        self._clock = clock
        self._records: list[EventRecord] = []
        self._join_window_ms = 1000
        self._due_seconds = 0.0

    def add_records(self, records: Iterable[EventRecord]) -> None:
        """Store records."""
        if self.is_full:
            return
        self._records += map(_without_report_fields, records)
        while len(self._records) > RECORDS_MAX and not self.is_full:
            self._thin()

    def update(self, now_ms: int, *, is_last: bool = False) -> None:
        """Update the metrics from a new report, if a report is due.

        Args:
            now_ms: Wall clock time in milliseconds.
            is_last: Whether to update even if no report is due.
        """
        began_seconds = self._clock.monotonic_seconds()
        if not self._records or (began_seconds < self._due_seconds and not is_last):
            return
        report = build_report(self._records, present_ms(self._records, self._clock, now_ms))
        took_seconds = self._clock.monotonic_seconds() - began_seconds
        self._due_seconds = began_seconds + max(_EVERY_SECONDS, _PAUSE_FACTOR * took_seconds)
        for time_class, spent_ms in report.spent_ms.items():
            self._registry.put(registry.SPENT, spent_ms / 1000, time_class.value)
        self._registry.put(registry.GOODPUT, report.goodput)
        self._registry.put(registry.LOST_STEPS, report.lost_steps)

    def _thin(self) -> None:
        """Join frequent records; if there are still too many, drop all records."""
        self._records = join(self._records, self._join_window_ms)
        if len(self._records) > RECORDS_MAX // 2:
            self._join_window_ms *= 2
        self.is_full = self._join_window_ms > _JOIN_WINDOW_MS_MAX
        if self.is_full:
            self._records = []
            for metric in (registry.SPENT, registry.GOODPUT, registry.LOST_STEPS):
                self._registry.drop(metric)


def join(records: Sequence[EventRecord], window_ms: int) -> list[EventRecord]:
    """Return the records, with frequent records of a source joined within ``window_ms``.

    The last progress record of each group remains. Records of time that delayed training become one
    record with the summed time, so totals do not change. Records are never joined across the start
    or end of an attempt.
    """
    joined_records: list[EventRecord] = []
    start_by_key: dict[tuple[str, ...], tuple[int, int]] = {}
    for record in sorted(records, key=lambda item: item.at_ms):
        if record.event not in _FREQUENT_EVENTS:
            start_by_key.clear()
            joined_records.append(record)
            continue
        key = (record.event, record.source, record.agent, record.text("phase"))
        began_ms, nth = start_by_key.get(key, (record.at_ms - window_ms, 0))
        if record.at_ms - began_ms < window_ms:
            joined_records[nth] = _merge_records(joined_records[nth], record)
        else:
            start_by_key[key] = (record.at_ms, len(joined_records))
            joined_records.append(record)
    return joined_records


def _merge_records(first: EventRecord, last: EventRecord) -> EventRecord:
    fields = dict(last.fields)
    for name in _FREQUENT_EVENTS[last.event]:
        fields[name] = first.number(name) + last.number(name)
    if last.event == "CheckpointCommitted":
        fields["commit_seconds"] = max(last.number("commit_seconds"), fields["stall_seconds"])
    return replace(last, fields=fields)


def _without_report_fields(record: EventRecord) -> EventRecord:
    """Return a record without the fields that only a report shows."""
    if record.event != "MetricsLogged":
        return record
    return replace(
        record, fields={name: record.fields[name] for name in _KEPT_FIELDS if name in record.fields}
    )


_LOOK_SECONDS = 1.0
_IDLE_SECONDS = 60.0  # The agent checks its workers ten times per second while they run.
_END_SECONDS = 5.0
_REASONS_MAX = 20
_NEW_RECORDS_MAX = 10_000


class Metrics:
    """Metrics and health of the running agent.

    Args:
        options: Destinations of the metrics; without any, all methods do nothing.
        events: Folder of the run's event files; empty to take it from the ranks.
        grace_seconds: Time that the agent may wait for its workers to end.
        clock: Clock for all times.

    Raises:
        ConfigError: The address is not available, or the file cannot be written.
    """

    def __init__(
        self, options: MetricsOptions, events: str, grace_seconds: float, clock: Clock
    ) -> None:
        self._options = options
        self._clock = clock
        self._patience_seconds = grace_seconds + _IDLE_SECONDS
        self._registry = MetricsRegistry()
        self._ranks = RankFigures(self._registry)
        self._goodput_figures = GoodputFigures(self._registry, clock)
        self._event_tail = EventFileTail(Path(events)) if events else None
        self._new_records: deque[EventRecord] = deque(maxlen=_NEW_RECORDS_MAX)
        self._emit: Emitter | None = None
        self._agent = ""
        self._is_watching = self._is_lost = False
        self._progress_at_seconds = clock.monotonic_seconds()
        self._began_seconds = unix_seconds(clock)
        self._written_seconds = clock.monotonic_seconds()
        self._failures: set[str] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._collect_until_closed, name="metrics", daemon=True
        )
        begin(self._registry, __version__, self._began_seconds)
        self._server = None
        if options.file:
            self._require_writable_file()
        if options.port is not None:
            self._server = MetricsServer(
                options.host, options.port, self._registry.page, self.health
            )

    @contextmanager
    def running(self, emit: Emitter) -> Iterator[None]:
        """Collect and serve metrics inside the block, and write the file once more at its end."""
        if not self._options.is_on:
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

    def record_event(self, record: Mapping[str, Any], event: Event) -> None:
        """Record an event of the agent, as an event sink. Any thread."""
        if not self._options.is_on:
            return
        name = type(event).__name__
        record_agent_event(EventRecord(0, name, AGENT_FILE, record), self._registry)
        if name in ("WorkerGroupStarted", "AttemptEnded"):
            self._progress_at_seconds = self._clock.monotonic_seconds()
            self._is_watching = name == "WorkerGroupStarted"
        self._is_lost |= name == "RunAborted"
        if name in WANTED and (
            event_record := parse_line(json.dumps(record, default=str), AGENT_FILE)
        ):
            self._agent = event_record.agent
            self._new_records.append(event_record)

    def record_agent_alive(self, agent_folder: Path) -> None:
        """Record that the agent runs, and the folder of the ranks' heartbeats."""
        self._ranks.agent_folder = str(agent_folder)
        self._progress_at_seconds = self._clock.monotonic_seconds()

    def health(self) -> tuple[bool, str]:
        """Return whether the agent works, and a line about its state."""
        if self._is_lost:
            return False, "the agent gave up the run"
        idle_seconds = self._clock.monotonic_seconds() - self._progress_at_seconds
        if self._is_watching and idle_seconds > self._patience_seconds:
            return False, f"the agent has made no progress for {idle_seconds:.0f} s"
        return True, "ok"

    def _require_writable_file(self) -> None:
        try:
            write_textfile(Path(self._options.file), self._registry.page())
        except OSError as error:
            raise ConfigError(
                f"--metrics-file: cannot write `{self._options.file}`: {error.strerror}",
                hint="give a file in the folder of node_exporter's --collector.textfile.directory",
            ) from error

    def _collect_until_closed(self) -> None:
        while not self._closing.wait(_LOOK_SECONDS):
            self._look(is_last=False)
        self._look(is_last=True)

    def _look(self, *, is_last: bool) -> None:
        self._attempt("ranks", self._look_at_ranks)
        self._attempt("events", self._look_at_events)
        record_steps_at_risk(self._registry)
        now_ms = round(1000 * unix_seconds(self._clock))
        self._attempt("account", lambda: self._goodput_figures.update(now_ms, is_last=is_last))
        now_seconds = self._clock.monotonic_seconds()
        is_due = now_seconds - self._written_seconds >= self._options.every_seconds
        if self._options.file and (is_due or is_last):
            self._written_seconds = now_seconds
            self._attempt(
                "file", lambda: write_textfile(Path(self._options.file), self._registry.page())
            )

    def _attempt(self, where: str, look: Callable[[], None]) -> None:
        """Run one collection; an exception is reported once per reason and stops only this one."""
        try:
            look()
        except Exception as error:  # noqa: BLE001 - a failed metric must not end the run
            self._registry.add(registry.METRICS_ERRORS)
            reason = f"{type(error).__name__}: {error}"
            if reason not in self._failures and len(self._failures) < _REASONS_MAX:
                self._failures.add(reason)
                assert self._emit is not None, "it runs"  # noqa: S101
                self._emit(MetricsFailed(where, reason))

    def _look_at_ranks(self) -> None:
        self._ranks.look(self._clock.monotonic_seconds(), unix_seconds(self._clock))
        self._registry.put(registry.SHARED_MEMORY, used_bytes())

    def _look_at_events(self) -> None:
        self._goodput_figures.add_records(
            self._new_records.popleft() for _ in range(len(self._new_records))
        )
        self._event_tail = self._event_tail or self._find()
        if self._event_tail is None:
            return
        records = sorted(self._event_tail.read(), key=lambda record: record.at_ms)
        # Events of this agent are already recorded; other agents write to the same file.
        records = [record for record in records if record.agent != self._agent or not record.agent]
        for record in records:
            record_rank_event(
                record, self._registry, is_new=record.at_ms >= 1000 * self._began_seconds
            )
        self._goodput_figures.add_records(records)

    def _find(self) -> EventFileTail | None:
        """Return the event folder that the ranks published."""
        folder = read_published_event_file(self._ranks.agent_folder)
        return EventFileTail(folder) if folder and folder.is_dir() else None
