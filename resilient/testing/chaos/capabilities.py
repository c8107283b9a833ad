"""Check before a chaos experiment that this machine can inject the planned faults.

A fault that the machine cannot inject raises an error, and is never skipped silently.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError
from resilient.testing.chaos.clock_shift import why_not_moving
from resilient.testing.chaos.netns import why_no_hosts
from resilient.testing.chaos.plan import FaultKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.testing.chaos.plan import ChaosPlan

_PROBE_SECONDS = 20.0
_RESERVED_OPTIONS = {
    "repo": "each of the two runs gets its own repository",
    "events": "each of the two runs gets its own event files",
    "storage_options": "the runs save in local folders, whose files can be damaged",
    "resume": "the run under faults must find its checkpoint by itself",
    "dry_run": "pass it to `chaos run`",
}
_OF_ONE_HOST = {
    "nnodes": "chaos starts one host, and more with `chaos run --hosts N`",
    "rdzv_endpoint": "chaos starts one host, and more with `chaos run --hosts N`",
}
_OF_HOSTS = dict.fromkeys(
    (
        *("rdzv_endpoint", "rdzv_backend", "rdzv_id", "local_addr"),
        *("node_rank", "master_addr", "master_port", "standalone"),
    ),
    "chaos sets the rendezvous of its hosts",
)
_NEEDS_HOSTS = "it applies to one of several hosts: chaos run --hosts 2, or more"


@dataclass(frozen=True, slots=True)
class MachineCapabilities:
    """Capabilities of this machine; an empty text means that the capability is present.

    Attributes:
        processes: Reason why processes cannot be found and signalled.
        mounting: Reason why a small file system cannot be mounted.
        tracing: Reason why this machine cannot make system calls of another process fail.
        moving: Reason why the clock of one job cannot be moved.
        hosts: Reason why several hosts cannot be created.
    """

    processes: str = ""
    mounting: str = ""
    tracing: str = ""
    moving: str = ""
    hosts: str = ""


def look_at_machine(plan: ChaosPlan, hosts: int = 1) -> MachineCapabilities:
    """Return the capabilities of this machine that the plan needs on ``hosts`` hosts."""
    return MachineCapabilities(
        processes="" if sys.platform == "linux" else f"it needs /proc, and this is {sys.platform}",
        mounting=_why_not_mounting() if plan.has(FaultKind.DISK_FULL) else "",
        tracing=_why_not_tracing() if plan.has(FaultKind.STORAGE_ERROR) else "",
        moving=why_not_moving() if plan.has(FaultKind.CLOCK_SKEW) else "",
        hosts=why_no_hosts() if hosts > 1 or plan.needs_hosts else "",
    )


def require_capabilities(
    plan: ChaosPlan, options: Mapping[str, Any], machine: MachineCapabilities, hosts: int = 1
) -> None:
    """Raise if a fault of the plan is impossible here, or conflicts with the command.

    Args:
        plan: The faults.
        options: Options of `resilient train` in the command, by name.
        machine: Capabilities of this machine.
        hosts: Number of hosts for the command.

    Raises:
        ConfigError: Any fault is impossible; the error lists all reasons.
    """
    reserved_options = {**_RESERVED_OPTIONS, **(_OF_HOSTS if hosts > 1 else _OF_ONE_HOST)}
    reasons = [
        f"--{name.replace('_', '-')}: {reason}"
        for name, reason in reserved_options.items()
        if name in options
    ]
    if hosts > 1:
        reasons += filter(None, (_why_not_nodes(str(options.get("nnodes", "")), hosts),))
        reasons += [f"--hosts {hosts}: {machine.hosts}"] * bool(machine.hosts)
    reason_by_kind = why_not(plan, machine, hosts=hosts, has_notice="notice" in options)
    reasons += [f"`{kind}`: {reason}" for kind, reason in reason_by_kind.items()]
    if machine.processes:
        reasons.append(machine.processes)
    if reasons:
        raise ConfigError(
            f"plan `{plan.name}` cannot run here: {'; '.join(reasons)}",
            hint="resilient chaos list (what each plan needs), or a plan without that fault",
        )


def why_not(
    plan: ChaosPlan, machine: MachineCapabilities, *, hosts: int = 1, has_notice: bool = False
) -> dict[str, str]:
    """Return the reasons why faults of a plan are impossible, by kind of fault."""
    reasons = {
        FaultKind.DISK_FULL.value: machine.mounting,
        FaultKind.STORAGE_ERROR.value: machine.tracing,
        FaultKind.NOTICE.value: "the command has its own --notice" if has_notice else "",
        FaultKind.CLOCK_SKEW.value: machine.moving,
    }
    reason_by_kind = {
        kind: reason for kind, reason in reasons.items() if reason and plan.has(FaultKind(kind))
    }
    reason_without_hosts = machine.hosts or (_NEEDS_HOSTS if hosts == 1 else "")
    names = {
        "kill of a host" if fault.kind is FaultKind.KILL else fault.kind.value
        for fault in plan.faults
        if fault.needs_hosts
    }
    return reason_by_kind | (
        dict.fromkeys(sorted(names), reason_without_hosts) if reason_without_hosts else {}
    )


def _why_not_nodes(nnodes: str, hosts: int) -> str:
    """Return the reason why ``hosts`` does not fit ``MIN:MAX``, empty if it does."""
    bounds = nnodes.split(":")
    if not nnodes or not all(bound.isdecimal() for bound in bounds):
        return ""  # The option is absent, or the command itself rejects it.
    if int(bounds[0]) <= hosts <= int(bounds[-1]):
        return ""
    return f"--nnodes {nnodes}: there are {hosts} hosts, which must be in between"


def _why_not_mounting() -> str:
    if os.geteuid() != 0:
        return "it mounts a small file system, which needs root"
    with tempfile.TemporaryDirectory(prefix="resilient-chaos-") as folder:
        return mount_small(Path(folder), 1 << 20) or unmount(Path(folder))


def mount_small(folder: Path, size_bytes: int) -> str:
    """Mount a file system in memory; return the reason of a failure, empty on success."""
    size = f"size={size_bytes}"
    return _run("mount", "-t", "tmpfs", "-o", size, "resilient-chaos", str(folder))


def unmount(folder: Path) -> str:
    """Unmount a file system; return the reason of a failure, empty on success."""
    return _run("umount", "-l", str(folder))


def _why_not_tracing() -> str:
    if shutil.which("strace") is None:
        return "it needs strace, which is not installed"
    return _run("strace", "-f", "-o", "/dev/null", "-e", "trace=fsync", "true")


def _run(*command: str) -> str:
    try:
        process = subprocess.run(  # noqa: S603 - a program of the system, from a fixed list
            command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"`{command[0]}` does not run here: {error}"
    return (f"`{command[0]}` is not permitted here: {process.stderr.strip()[:200]}") * bool(
        process.returncode
    )
