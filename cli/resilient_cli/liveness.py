"""Liveness of the process that may write to a repository, from event files and local processes.

The events of an agent name the process of the agent. Only the host of the agent can check this
process. An agent on another host counts as alive if that host wrote an event within the last
minute. The newest generation record may also name a process, and the repository may contain the
heartbeat of this process.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from resilient.checkpoint.fencing import find_writer
from resilient.checkpoint.resume_policy import is_alive_here
from resilient.checkpoint.writer_heartbeat import HeartbeatWatch
from resilient.clock import boot_name
from resilient.errors import RepositoryNotFound, WriterAlive
from resilient.goodput.event_log import agents, read_records
from resilient.goodput.report import SILENT_MS
from resilient.processes import identify
from resilient.redaction import shell_quote

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.checkpoint.fencing import Writer
    from resilient.clock import Clock
    from resilient.goodput.event_log import Agent, EventRecord
    from resilient.storage.store import Store

_START_FIELD = 19
"""Index of the start time (clock ticks since boot) in /proc/PID/stat, after the name."""
_SLACK_MS = 60_000
"""Tolerance for a wall clock that was set between the start of a process and its event."""
_TICKS_MS = 1_000
"""Tolerance for the rounding to clock ticks, if both times count from the same boot."""


def is_agent_alive(agent: Agent) -> bool:
    """Return whether an agent that started on this machine still runs.

    If its first event names the boot of the machine, the time of day is not used, because it may
    have been set since then.
    """
    boot = boot_name()
    if not (agent.boot and boot):
        return is_alive(agent.pid, agent.began_ms)
    if agent.boot != boot:
        return False  # no process survives a reboot
    return _runs_since(agent.pid, agent.since_boot_ms + _suspended_ms() + _TICKS_MS)


def is_alive(pid: int, first_event_ms: int) -> bool:
    """Return whether a process still runs that had started before it wrote an event.

    Process ids are reused: a process that started later is another process. Without /proc, only the
    process id is checked.

    Args:
        pid: Process id on this machine.
        first_event_ms: Time of its first event, in milliseconds since 1970.
    """
    try:
        boot_ms = _boot_ms()
    except (OSError, ValueError, StopIteration):
        boot_ms = 0
    return _runs_since(pid, first_event_ms + _SLACK_MS - boot_ms)


def _runs_since(pid: int, latest_ms: int) -> bool:
    """Return whether a process runs that started at most ``latest_ms`` after the boot."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # the process exists and belongs to another user
    try:
        state, began_ms = _stat(pid)
    except (OSError, ValueError, IndexError):
        return not Path("/proc/self").exists()
    return state not in "ZX" and began_ms <= latest_ms


def _stat(pid: int) -> tuple[str, float]:
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    fields = text.rpartition(")")[2].split()
    return fields[0], 1000 * int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")


def _boot_ms() -> int:
    """Return the boot time in milliseconds since 1970, computed from the current time of day."""
    lines = Path("/proc/stat").read_text(encoding="utf-8").splitlines()
    return 1000 * int(next(line.split()[1] for line in lines if line.startswith("btime ")))


def _suspended_ms() -> int:
    """Return the suspended time of the machine since its boot, in milliseconds.

    The start time of a process includes the suspended time; ``Agent.since_boot_ms`` does not.
    """
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0
    return round(1000 * (time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()))


_RECENT_MS = 5_000
_ENDS = frozenset(
    {"TrainingStopped", "TrainingEnded", "UntilStepReached", "RunEnded", "RunAborted"}
)


class LivenessState(StrEnum):
    """Liveness of the process that may write."""

    ALIVE = "alive"
    DEAD = "dead"
    ENDED = "ended"
    NO_PROCESS = "nobody"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class LivenessReport:
    """Liveness of the process that may write, and the evidence.

    Attributes:
        state: Liveness.
        evidence: Facts that show the state.
        agent: Agent that owns the process; None if no event names one.
        last_event_ms: Time of the last event, in milliseconds since 1970; 0 for none.
    """

    state: LivenessState
    evidence: str
    agent: Agent | None = None
    last_event_ms: int = 0


def check_liveness(writer: Writer, records: Sequence[EventRecord], now_ms: int) -> LivenessReport:
    """Return the liveness of the process that owns the newest generation.

    Args:
        writer: Newest generation.
        records: Event records of the run, sorted by time; empty if they are not on this host.
        now_ms: Current time, in milliseconds since 1970.
    """
    all_agents = agents(records)
    reports = [_check_agent(agent, records, now_ms) for agent in all_agents]
    # A live agent may claim a generation at any moment, even if another agent wrote last.
    living_processes = [
        process for process in reversed(reports) if process.state is LivenessState.ALIVE
    ]
    if live_report := next(iter(living_processes), None) or _check_claim(writer, records):
        return live_report
    if writer.is_nobody:
        return LivenessReport(
            LivenessState.NO_PROCESS, "a command started the generation, and it saves nothing"
        )
    if not all_agents:
        return _check_ranks(records, now_ms)
    claimants = [
        process
        for process in reports
        if process.agent is not None and _may_have_claimed(process.agent, writer)
    ]
    if not claimants:
        return LivenessReport(
            LivenessState.UNKNOWN, "the event files do not show who started this generation"
        )
    return claimants[-1]


def ask_heartbeat(
    found: LivenessReport, writer: Writer, store: Store, clock: Clock
) -> LivenessReport:
    """Complete an unknown liveness with the writer's heartbeat, if the repository holds one.

    The function waits for the next heartbeat for up to 1.5 heartbeat intervals.

    Raises:
        StoreError: The store failed; a missing answer is no evidence.
    """
    record = writer.record
    if found.state is not LivenessState.UNKNOWN or record is None or record.process is None:
        return found
    began_seconds, process = clock.monotonic_seconds(), record.process
    is_alive = HeartbeatWatch(store, clock).wait(record.number, record.token)
    if is_alive is None:
        return found
    process_text = f"pid {process.pid} of {process.host}"
    if is_alive:
        return replace(
            found, state=LivenessState.ALIVE, evidence=f"{process_text} sent a heartbeat"
        )
    seconds = clock.monotonic_seconds() - began_seconds
    return replace(found, evidence=f"{process_text} sent no heartbeat for {seconds:.0f} s")


def require_no_live_writer(store: Store, clock: Clock, words: str) -> None:
    """Refuse a command that would end the run of a live writer, as a manual start is refused.

    A writer counts as alive only if the process of the newest generation runs on this host, or if
    its heartbeat changes. The function waits for the heartbeat for up to 1.5 heartbeat intervals.

    Args:
        store: Repository.
        clock: Clock of this host.
        words: The refused command, with the option that overrides the refusal.

    Raises:
        WriterAlive: Another process is proven alive and writes to the repository.
        StoreError: The store failed.
    """
    writer = find_writer(store)
    record = writer.record if writer else None
    process = record.process if record else None
    if record is None or process is None or process == identify(os.getpid()):
        return
    is_alive = is_alive_here(record)
    if not is_alive and not process.is_of_this_boot:
        is_alive = bool(HeartbeatWatch(store, clock).wait(record.number, record.token))
    if is_alive:
        raise WriterAlive(
            f"process {process.pid} on {record.host} has written to {store.url} since "
            f"{record.claimed_at}, and is alive; nothing was changed",
            hint=f"resilient stop {shell_quote(store.url)}; {words} loses its unsaved steps",
        )


def is_dead(records: Sequence[EventRecord], now_ms: int) -> bool:
    """Return whether the agent of a run died without an end event, as far as this machine knows.

    Args:
        records: Event records of the run, sorted by time.
        now_ms: Current time, in milliseconds since 1970.
    """
    reports = [_check_agent(agent, records, now_ms) for agent in agents(records)]
    states = [process.state for process in reports]
    # An agent in another PID namespace has another pid here, and continues to write events.
    return (
        states[-1:] == [LivenessState.DEAD]
        and LivenessState.ALIVE not in states
        and now_ms - reports[-1].last_event_ms > _RECENT_MS
    )


def records_of(run: Path | None, place: str) -> list[EventRecord]:
    """Return the event records of a run, from the given folder or from the repository itself.

    Raises:
        RepositoryNotFound: The given folder holds no event file.
    """
    if run is not None:
        return read_records([run])
    folder = Path(place.removeprefix("file://"))
    try:
        return read_records([folder]) if "://" not in str(folder) else []
    except RepositoryNotFound:
        return []


def _check_agent(agent: Agent, records: Sequence[EventRecord], now_ms: int) -> LivenessReport:
    last_event_ms = max(
        (record.at_ms for record in records if record.host == agent.host), default=agent.began_ms
    )
    if agent.exit_code is not None:
        reason = f"the launcher ended with exit code {agent.exit_code}"
        return LivenessReport(LivenessState.ENDED, reason, agent, last_event_ms)
    if agent.host == socket.gethostname():
        if is_agent_alive(agent):
            return LivenessReport(
                LivenessState.ALIVE, f"pid {agent.pid} runs here", agent, last_event_ms
            )
        return LivenessReport(
            LivenessState.DEAD, f"pid {agent.pid} of this machine has ended", agent, last_event_ms
        )
    if now_ms - last_event_ms <= SILENT_MS:
        reason = f"pid {agent.pid} of {agent.host} wrote an event in the last minute"
        return LivenessReport(LivenessState.ALIVE, reason, agent, last_event_ms)
    reason = f"pid {agent.pid} of {agent.host} is silent: check on that machine"
    return LivenessReport(LivenessState.UNKNOWN, reason, agent, last_event_ms)


def _check_claim(writer: Writer, records: Sequence[EventRecord]) -> LivenessReport | None:
    """Return the evidence of the newest generation record; None unless its process runs here."""
    record = writer.record
    if record is None or record.process is None or not is_alive_here(record):
        return None
    last_event_ms = records[-1].at_ms if records else 0
    reason = f"pid {record.process.pid} started the generation and runs here"
    return LivenessReport(LivenessState.ALIVE, reason, None, last_event_ms)


def _check_ranks(records: Sequence[EventRecord], now_ms: int) -> LivenessReport:
    """Return the liveness of ranks that no agent started, from their events."""
    if not records:
        return LivenessReport(
            LivenessState.UNKNOWN, "no event files were found here; name them with --run FOLDER"
        )
    last_record = records[-1]
    if last_record.event in _ENDS:
        return LivenessReport(
            LivenessState.ENDED, "training ended by itself", None, last_record.at_ms
        )
    if now_ms - last_record.at_ms <= SILENT_MS:
        return LivenessReport(
            LivenessState.ALIVE, "a rank wrote an event in the last minute", None, last_record.at_ms
        )
    return LivenessReport(
        LivenessState.UNKNOWN,
        "its ranks are silent, and their process is unknown",
        None,
        last_record.at_ms,
    )


def _may_have_claimed(agent: Agent, writer: Writer) -> bool:
    """Return whether an agent can own the newest generation, by host and time."""
    if writer.record is None:
        return True
    if agent.host != writer.record.host:
        return False
    try:
        claimed_ms = datetime.fromisoformat(writer.record.claimed_at).timestamp() * 1000
    except ValueError:
        return True
    return agent.began_ms <= claimed_ms
