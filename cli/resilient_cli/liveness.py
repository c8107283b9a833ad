"""Is a writer alive.

Whether a process of this machine is still the one that somebody told of.

Whether whoever may write to a repository lives: as far as its event files and this machine tell.

A repository names a host and a moment, never a process. The launcher's events name one; its host
knows whether it lives, and to others it is alive while it has told something just now.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from resilient.checkpoint.live_writer import is_alive_here
from resilient.clock import boot_name
from resilient.errors import RepositoryNotFound
from resilient.goodput.event_log import agents, read_records
from resilient.goodput.report import SILENT_MS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.checkpoint.fencing import Writer
    from resilient.goodput.event_log import Agent, EventRecord

_START_FIELD = 19
"""Of /proc/PID/stat behind the name, from 0: when it began, in clock ticks since the boot."""
_SLACK_MS = 60_000
"""What told the time of a process's start and of an event may have been set meanwhile."""
_TICKS_MS = 1_000
"""Both are seconds of one start of the machine, one of them in ticks: nothing can set them."""


def is_agent_alive(agent: Agent) -> bool:
    """Say whether a launcher that was told of on this machine runs still.

    Where its first word says at which start of the machine that was, the time of day, which may
    have been set since, is not asked.
    """
    ours = boot_name()
    if not (agent.boot and ours):
        return is_alive(agent.pid, agent.began_ms)
    if agent.boot != ours:
        return False  # all that ran then is gone
    return _runs_since(agent.pid, agent.since_boot_ms + _slept_ms() + _TICKS_MS)


def is_alive(pid: int, told_ms: int) -> bool:
    """Say whether a process runs that had begun when it told something.

    Numbers of processes are used again: one that began later is another. Where there is no
    /proc, the number is all there is.

    Args:
        pid: of this machine.
        told_ms: when it said its first word, in milliseconds since 1970.
    """
    try:
        boot_ms = _boot_ms()
    except (OSError, ValueError, StopIteration):
        boot_ms = 0
    return _runs_since(pid, told_ms + _SLACK_MS - boot_ms)


def _runs_since(pid: int, latest_ms: int) -> bool:
    """Say whether a process runs that began so long after the boot, or before."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's, but there
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
    """Return when the machine was started, as it tells by its time of day now."""
    lines = Path("/proc/stat").read_text(encoding="utf-8").splitlines()
    return 1000 * int(next(one.split()[1] for one in lines if one.startswith("btime ")))


def _slept_ms() -> int:
    """Return how long the machine was suspended: starts of processes count that, words do not."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0
    return round(1000 * (time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()))


_JUST_NOW_MS = 5_000
_ENDS = frozenset(
    {"TrainingStopped", "TrainingEnded", "UntilStepReached", "RunEnded", "RunAborted"}
)


class LivenessState(StrEnum):
    """What is known of who may write."""

    ALIVE = "alive"
    DEAD = "dead"
    ENDED = "ended"
    NOBODY = "nobody"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class LivenessReport:
    """What is known of the process that may write, and from where.

    Attributes:
        state: whether it lives.
        why: how that is known.
        agent: the launcher; None if no event names one.
        told_ms: its last word, in milliseconds since 1970; 0 for none.
    """

    state: LivenessState
    why: str
    agent: Agent | None = None
    told_ms: int = 0


def check_liveness(writer: Writer, records: Sequence[EventRecord], now_ms: int) -> LivenessReport:
    """Return what is known of the process that belongs to the newest life.

    Args:
        writer: the newest life.
        records: of the event files of the run, by time; none if they are elsewhere.
        now_ms: what time it is, in milliseconds since 1970.
    """
    known = agents(records)
    seen = [_of_agent(one, records, now_ms) for one in known]
    # Whoever lives may claim a life at any moment, also if another wrote last.
    alive = [one for one in reversed(seen) if one.state is LivenessState.ALIVE]
    if proof := next(iter(alive), None) or _of_claim(writer, records):
        return proof
    if writer.is_nobody:
        return LivenessReport(
            LivenessState.NOBODY, "a command began the life, and it saves nothing"
        )
    if not known:
        return _of_ranks(records, now_ms)
    mine = [one for one in seen if one.agent is not None and _may_have_claimed(one.agent, writer)]
    if not mine:
        return LivenessReport(
            LivenessState.UNKNOWN, "the event files tell nothing of who began this life"
        )
    return mine[-1]


def is_dead(records: Sequence[EventRecord], now_ms: int) -> bool:
    """Say whether the launcher of a run died without a word, as far as is known here.

    Args:
        records: of the event files of the run, by time.
        now_ms: what time it is, in milliseconds since 1970.
    """
    seen = [_of_agent(one, records, now_ms) for one in agents(records)]
    states = [one.state for one in seen]
    # In another namespace of processes it lives under another number, and goes on telling.
    return (
        states[-1:] == [LivenessState.DEAD]
        and LivenessState.ALIVE not in states
        and now_ms - seen[-1].told_ms > _JUST_NOW_MS
    )


def records_of(run: Path | None, place: str) -> list[EventRecord]:
    """Return the records of a run: of the folder that was named, or of a repository's own.

    Raises:
        RepositoryNotFound: the folder that was named holds no event file.
    """
    if run is not None:
        return read_records([run])
    folder = Path(place.removeprefix("file://"))
    try:
        return read_records([folder]) if "://" not in str(folder) else []
    except RepositoryNotFound:
        return []


def _of_agent(agent: Agent, records: Sequence[EventRecord], now_ms: int) -> LivenessReport:
    told_ms = max((one.at_ms for one in records if one.host == agent.host), default=agent.began_ms)
    if agent.exit_code is not None:
        why = f"the launcher said that it ended, with exit code {agent.exit_code}"
        return LivenessReport(LivenessState.ENDED, why, agent, told_ms)
    if agent.host == socket.gethostname():
        if is_agent_alive(agent):
            return LivenessReport(LivenessState.ALIVE, f"pid {agent.pid} runs here", agent, told_ms)
        return LivenessReport(
            LivenessState.DEAD, f"pid {agent.pid} of this machine is gone", agent, told_ms
        )
    if now_ms - told_ms <= SILENT_MS:
        why = f"pid {agent.pid} of {agent.host} told something in the last minute"
        return LivenessReport(LivenessState.ALIVE, why, agent, told_ms)
    why = f"pid {agent.pid} of {agent.host} is silent: only that machine knows"
    return LivenessReport(LivenessState.UNKNOWN, why, agent, told_ms)


def _of_claim(writer: Writer, records: Sequence[EventRecord]) -> LivenessReport | None:
    """Return what the record of the newest life proves; None if it proves no living process."""
    record = writer.record
    if record is None or record.process is None or not is_alive_here(record):
        return None
    told_ms = records[-1].at_ms if records else 0
    why = f"pid {record.process.pid} began the life and runs here"
    return LivenessReport(LivenessState.ALIVE, why, None, told_ms)


def _of_ranks(records: Sequence[EventRecord], now_ms: int) -> LivenessReport:
    """Say what the events of ranks tell that no launcher of ours began."""
    if not records:
        return LivenessReport(
            LivenessState.UNKNOWN, "there are no event files here; --run FOLDER names them"
        )
    last = records[-1]
    if last.event in _ENDS:
        return LivenessReport(LivenessState.ENDED, "training said that it ended", None, last.at_ms)
    if now_ms - last.at_ms <= SILENT_MS:
        return LivenessReport(
            LivenessState.ALIVE, "a rank told something in the last minute", None, last.at_ms
        )
    return LivenessReport(
        LivenessState.UNKNOWN, "its ranks are silent, and name no process", None, last.at_ms
    )


def _may_have_claimed(agent: Agent, writer: Writer) -> bool:
    """Say whether a life can be this launcher's, by host and time."""
    if writer.record is None:
        return True
    if agent.host != writer.record.host:
        return False
    try:
        claimed = datetime.fromisoformat(writer.record.claimed_at).timestamp() * 1000
    except ValueError:
        return True
    return agent.began_ms <= claimed
