"""``resilient stop``: stop requests to the agents of a run."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from resilient.clock import SystemClock
from resilient.errors import DeadlineExceeded, NotRunning, StoreDenied
from resilient.goodput.event_log import agents, read_records
from resilient.redaction import shell_quote
from resilient_cli.liveness import is_agent_alive
from resilient_cli.output import CommandResult, show
from resilient_cli.repositories import output_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.goodput.event_log import Agent


def build_stop_result(stopped_agents: Sequence[Agent]) -> CommandResult:
    """Build the answer of ``stop``: the end of each agent, if the agent recorded it."""
    lines = tuple(_describe_agent(agent) for agent in stopped_agents)
    ids = tuple(str(agent.pid) for agent in stopped_agents)
    return CommandResult(
        "stop", "stop", {"agents": [asdict(agent) for agent in stopped_agents]}, lines, ids
    )


def _describe_agent(agent: Agent) -> str:
    if agent.exit_code is None:
        return f"pid {agent.pid}: asked to save and exit"
    return f"pid {agent.pid}: exit {agent.exit_code}, {agent.reason}"


Run = Annotated[
    list[Path],
    typer.Argument(metavar="RUN...", help="Folder of event files, or the output folder."),
]
Now = Annotated[bool, typer.Option("--now", help="Exit at once; unsaved steps are lost.")]
ThisHost = Annotated[
    bool,
    typer.Option(
        "--this-host", help="Remove this host from the run, if enough other hosts remain."
    ),
]
Within = Annotated[float, typer.Option(help="Seconds to wait for the end; 0 does not wait.", min=0)]
_POLL_SECONDS = 0.1
_BETWEEN_SECONDS = 1.0
"""Pause before the second signal: the agent counts two orders within 0.5 s as one.

A later order means: leave at once.
"""


def stop(
    ctx: typer.Context,
    run: Run,
    *,
    now: Now = False,
    this_host: ThisHost = False,
    within: Within = 120.0,
) -> int:
    """Ask a run of this machine to save and exit, and wait for its end.

    The effect is that of SIGTERM to `resilient train`: all ranks agree on a step and save it, and
    the launcher exits with 75, so that a scheduler starts it again. The same command resumes. The
    exit code is 0 after the end. For a run on several machines, stop one launcher. With
    --this-host, a run that may shrink (--nnodes MIN:MAX) continues on the other machines.

    Example: resilient stop runs/mine
    """
    local_agents, remote_agents = _find_running_agents(run)
    if not local_agents:
        raise _not_running_error(run, remote_agents)
    clock = SystemClock()
    _signal(local_agents)
    if not this_host:
        # Directly after SIGTERM, SIGINT counts as the same order, and extends it to all hosts.
        _signal(local_agents, signal.SIGINT)
    if now:
        clock.sleep(_BETWEEN_SECONDS)
        _signal([agent for agent in local_agents if is_agent_alive(agent)])
    deadline = clock.monotonic_seconds() + within
    while within and any(is_agent_alive(agent) for agent in local_agents):
        if clock.monotonic_seconds() > deadline:
            raise DeadlineExceeded(
                f"pid {local_agents[0].pid} has not ended within {within:g} s",
                deadline_seconds=within,
                hint=f"resilient status {shell_quote(run[0])}; resilient stop --now "
                f"{shell_quote(run[0])} loses unsaved steps",
            )
        clock.sleep(_POLL_SECONDS)
    agent_by_process = {(agent.host, agent.pid): agent for agent in agents(read_records(run))}
    show(
        build_stop_result([agent_by_process[agent.host, agent.pid] for agent in local_agents]),
        output_of(ctx),
    )
    return 0


def _find_running_agents(run: Sequence[Path]) -> tuple[list[Agent], list[Agent]]:
    """Return the running agents of this host, and those of other hosts without a recorded end."""
    open_ = [agent for agent in agents(read_records(run)) if agent.exit_code is None]
    host = socket.gethostname()
    local_agents = [agent for agent in open_ if agent.host == host and is_agent_alive(agent)]
    return local_agents, [agent for agent in open_ if agent.host != host]


def _not_running_error(run: Sequence[Path], remote_agents: Sequence[Agent]) -> NotRunning:
    if remote_agents:
        newest_agent = remote_agents[-1]
        return NotRunning(
            f"no launcher of `{run[0]}` runs on this machine; it started on {newest_agent.host}",
            hint=f"ssh {shell_quote(newest_agent.host)} resilient stop {shell_quote(run[0])}",
        )
    return NotRunning(
        f"no launcher of `{run[0]}` is running", hint=f"resilient status {shell_quote(run[0])}"
    )


def _signal(agents_to_stop: Sequence[Agent], number: signal.Signals = signal.SIGTERM) -> None:
    """Send a signal to agents; ignore agents that have already ended."""
    for agent in agents_to_stop:
        try:
            os.kill(agent.pid, number)
        except ProcessLookupError:
            continue
        except PermissionError as error:
            raise StoreDenied(
                f"pid {agent.pid} belongs to another user", hint=f"sudo kill -TERM {agent.pid}"
            ) from error
