"""Processes of a job, found in /proc; Linux only."""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from resilient.distributed.heartbeat import read_progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_HEARTBEAT_FILE = re.compile(r" (/\S+/pulse-([0-9]+))$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class RankProcess:
    """Rank of a host.

    Attributes:
        local_rank: Rank among the ranks of its host.
        pid: Process id.
        step: Last finished step, -1 for none in this attempt.
        host: Number of the host within the job.
    """

    local_rank: int
    pid: int
    step: int
    host: int = 0


def children(pid: int) -> list[int]:
    """Return the direct children of a process; empty if the process is gone."""
    pids: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        # A thread may end between the two reads.
        with suppress(OSError):
            pids += map(int, path.read_text(encoding="ascii").split())
    return pids


def descendants(pid: int) -> list[int]:
    """Return every descendant of a process, parents first."""
    pids = children(pid)
    for process in pids:
        pids += [child_pid for child_pid in children(process) if child_pid not in pids]
    return pids


def rank_processes(agent_pid: int) -> list[RankProcess]:
    """Return the ranks of an agent that write heartbeats, lowest first.

    A rank is a child of its agent with a mapped heartbeat file; processes forked by a rank do not
    count.
    """
    ranks = []
    for pid in children(agent_pid):
        with suppress(OSError):
            text = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
            heartbeat_file = _HEARTBEAT_FILE.search(text)
            heartbeat = read_progress(Path(heartbeat_file[1])) if heartbeat_file else None
            if heartbeat_file and heartbeat:
                ranks.append(RankProcess(int(heartbeat_file[2]), pid, heartbeat.step))
    return sorted(ranks, key=lambda process: process.local_rank)


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to the processes that still exist."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_all(pid: int) -> list[int]:
    """Kill a process and its descendants at one moment; return their ids."""
    return kill_together(lambda: [pid, *descendants(pid)])


def kill_together(find: Callable[[], list[int]]) -> list[int]:
    """Kill the found processes at one moment; return their ids."""
    victims = find()
    # Stop all processes first, so that none of them sees another one die.
    send(victims, signal.SIGSTOP)
    victims += [process for process in find() if process not in victims]
    send(victims, signal.SIGKILL)
    return victims
