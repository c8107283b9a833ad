"""Whether whoever may write to a repository lives: as far as its event files and this machine tell.

A repository names a host and a moment, never a process. The launcher's events name one; its host
knows whether it lives, and to others it is alive while it has told something just now.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from resilient.accounting.account import SILENT_MS
from resilient.accounting.agents import agents
from resilient.accounting.records import read_records
from resilient.errors import RepositoryNotFound
from resilient.vault.registry.live_writer import is_alive_here
from resilient_cli.processes import is_agent_alive

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.accounting.agents import Agent
    from resilient.accounting.records import Record
    from resilient.vault.writers import Writer

_JUST_NOW_MS = 5_000
_ENDS = frozenset({"TrainingStopped", "TrainingEnded", "TrainedUntil", "RunEnded", "RunGivenUp"})


class State(StrEnum):
    """What is known of who may write."""

    ALIVE = "alive"
    DEAD = "dead"
    ENDED = "ended"
    NOBODY = "nobody"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Testimony:
    """What is known of the process that may write, and from where.

    Attributes:
        state: whether it lives.
        why: how that is known.
        agent: the launcher; None if no event names one.
        told_ms: its last word, in milliseconds since 1970; 0 for none.
    """

    state: State
    why: str
    agent: Agent | None = None
    told_ms: int = 0


def testify(writer: Writer, records: Sequence[Record], now_ms: int) -> Testimony:
    """Return what is known of the process that belongs to the newest life.

    Args:
        writer: the newest life.
        records: of the event files of the run, by time; none if they are elsewhere.
        now_ms: what time it is, in milliseconds since 1970.
    """
    known = agents(records)
    seen = [_of_agent(one, records, now_ms) for one in known]
    # Whoever lives may claim a life at any moment, also if another wrote last.
    alive = [one for one in reversed(seen) if one.state is State.ALIVE]
    if proof := next(iter(alive), None) or _of_claim(writer, records):
        return proof
    if writer.is_nobody:
        return Testimony(State.NOBODY, "a command began the life, and it saves nothing")
    if not known:
        return _of_ranks(records, now_ms)
    mine = [one for one in seen if one.agent is not None and _may_have_claimed(one.agent, writer)]
    if not mine:
        return Testimony(State.UNKNOWN, "the event files tell nothing of who began this life")
    return mine[-1]


def is_dead(records: Sequence[Record], now_ms: int) -> bool:
    """Say whether the launcher of a run died without a word, as far as is known here.

    Args:
        records: of the event files of the run, by time.
        now_ms: what time it is, in milliseconds since 1970.
    """
    seen = [_of_agent(one, records, now_ms) for one in agents(records)]
    states = [one.state for one in seen]
    # In another namespace of processes it lives under another number, and goes on telling.
    return (
        states[-1:] == [State.DEAD]
        and State.ALIVE not in states
        and now_ms - seen[-1].told_ms > _JUST_NOW_MS
    )


def records_of(run: Path | None, place: str) -> list[Record]:
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


def _of_agent(agent: Agent, records: Sequence[Record], now_ms: int) -> Testimony:
    told_ms = max((one.at_ms for one in records if one.host == agent.host), default=agent.began_ms)
    if agent.exit_code is not None:
        why = f"the launcher said that it ended, with exit code {agent.exit_code}"
        return Testimony(State.ENDED, why, agent, told_ms)
    if agent.host == socket.gethostname():
        if is_agent_alive(agent):
            return Testimony(State.ALIVE, f"pid {agent.pid} runs here", agent, told_ms)
        return Testimony(State.DEAD, f"pid {agent.pid} of this machine is gone", agent, told_ms)
    if now_ms - told_ms <= SILENT_MS:
        why = f"pid {agent.pid} of {agent.host} told something in the last minute"
        return Testimony(State.ALIVE, why, agent, told_ms)
    why = f"pid {agent.pid} of {agent.host} is silent: only that machine knows"
    return Testimony(State.UNKNOWN, why, agent, told_ms)


def _of_claim(writer: Writer, records: Sequence[Record]) -> Testimony | None:
    """Return what the record of the newest life proves; None if it proves no living process."""
    record = writer.record
    if record is None or record.process is None or not is_alive_here(record):
        return None
    told_ms = records[-1].at_ms if records else 0
    why = f"pid {record.process.pid} began the life and runs here"
    return Testimony(State.ALIVE, why, None, told_ms)


def _of_ranks(records: Sequence[Record], now_ms: int) -> Testimony:
    """Say what the events of ranks tell that no launcher of ours began."""
    if not records:
        return Testimony(State.UNKNOWN, "there are no event files here; --run FOLDER names them")
    last = records[-1]
    if last.event in _ENDS:
        return Testimony(State.ENDED, "training said that it ended", None, last.at_ms)
    if now_ms - last.at_ms <= SILENT_MS:
        return Testimony(State.ALIVE, "a rank told something in the last minute", None, last.at_ms)
    return Testimony(State.UNKNOWN, "its ranks are silent, and name no process", None, last.at_ms)


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
