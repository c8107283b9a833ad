"""Which faults can be had here, said before anything starts; none is ever left out in silence."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from resilient.errors import ConfigError
from resilient.testing.chaos.clocks import why_not_moving
from resilient.testing.chaos.faults import Kind

if TYPE_CHECKING:
    from collections.abc import Collection

    from resilient.testing.chaos.faults import ChaosPlan

_PROBE_SECONDS = 20.0
_TAKEN = {
    "repo": "each of the two runs gets a repository of its own",
    "events": "each of the two runs gets event files of its own",
    "storage_options": "the runs save in local folders, whose files can be damaged",
    "resume": "the struck run must find by itself where to go on",
    "nnodes": "chaos starts one host",
    "rdzv_endpoint": "chaos starts one host",
    "dry_run": "give it to `chaos run`",
}


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine can do; empty texts say that it can.

    Attributes:
        processes: why processes cannot be found and struck.
        mounting: why a small file system cannot be mounted.
        tracing: why system calls of another process cannot be made to fail.
        moving: why the clock of one job cannot be moved.
    """

    processes: str = ""
    mounting: str = ""
    tracing: str = ""
    moving: str = ""


def look_at_machine(plan: ChaosPlan) -> Machine:
    """Return what this machine can do, as far as the plan needs it."""
    return Machine(
        processes="" if sys.platform == "linux" else f"it needs /proc, and this is {sys.platform}",
        mounting=_why_not_mounting() if plan.has(Kind.DISK_FULL) else "",
        tracing=_why_not_tracing() if plan.has(Kind.STORAGE_ERROR) else "",
        moving=why_not_moving() if plan.has(Kind.CLOCK_SKEW) else "",
    )


def refuse_impossible(plan: ChaosPlan, given: Collection[str], machine: Machine) -> None:
    """Raise if any fault of the plan cannot be had, or the command leaves no room for it.

    Args:
        plan: the faults.
        given: names of the options of `resilient train` that the command has.
        machine: what can be done here.

    Raises:
        ConfigError: it says all reasons.
    """
    reasons = [
        f"--{name.replace('_', '-')}: {why}" for name, why in _TAKEN.items() if name in given
    ]
    reasons += [
        f"`{kind}`: {why}"
        for kind, why in why_not(machine, has_notice="notice" in given).items()
        if plan.has(kind)
    ]
    if machine.processes:
        reasons.append(machine.processes)
    if reasons:
        raise ConfigError(
            f"plan `{plan.name}` cannot be carried out here: {'; '.join(reasons)}",
            hint="resilient chaos list (what each plan needs), or a plan without that fault",
        )


def why_not(machine: Machine, *, has_notice: bool = False) -> dict[Kind, str]:
    """Return why faults cannot be had, by kind; kinds that can are not there."""
    reasons = {
        Kind.DISK_FULL: machine.mounting,
        Kind.STORAGE_ERROR: machine.tracing,
        Kind.NOTICE: "the command has a --notice of its own" if has_notice else "",
        Kind.CUT: "chaos starts one host, and one host has no network to cut",
        Kind.CLOCK_SKEW: machine.moving,
    }
    return {kind: why for kind, why in reasons.items() if why}


def _why_not_mounting() -> str:
    if os.geteuid() != 0:
        return "it mounts a small file system, which only root may"
    with tempfile.TemporaryDirectory(prefix="resilient-chaos-") as folder:
        return mount_small(Path(folder), 1 << 20) or unmount(Path(folder))


def mount_small(folder: Path, size_bytes: int) -> str:
    """Mount a file system in memory; return why it cannot be, or nothing."""
    size = f"size={size_bytes}"
    return _run("mount", "-t", "tmpfs", "-o", size, "resilient-chaos", str(folder))


def unmount(folder: Path) -> str:
    """Take a file system away; return why it cannot be, or nothing."""
    return _run("umount", "-l", str(folder))


def _why_not_tracing() -> str:
    if shutil.which("strace") is None:
        return "it needs strace, which is not installed"
    return _run("strace", "-f", "-o", "/dev/null", "-e", "trace=fsync", "true")


def _run(*command: str) -> str:
    try:
        done = subprocess.run(  # noqa: S603 - a program of the system, from a fixed list
            command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"`{command[0]}` does not run here: {error}"
    return f"`{command[0]}` may not do it here: {done.stderr.strip()[:200]}" * bool(done.returncode)
