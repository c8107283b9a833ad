"""This machine: packages, GPUs, shared memory, the clock, and the way of a signal."""

from __future__ import annotations

import ctypes
import shutil
import signal
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from resilient.agent.keeper.memory import grant
from resilient.agent.options import KeeperWishes
from resilient_cli.doctor.check import Check

_PROC = Path("/proc")
_SHM = Path("/dev/shm")  # noqa: S108 - where shared memory lies
_QUERY = "name,memory.total,ecc.errors.uncorrected.volatile.total"
_WAIT_SECONDS = 20.0
_TIME_ERROR = 5
_TIMEX_BYTES = 512
_SHELLS = {"sh", "bash", "dash", "ash", "zsh"}
_LISTENER = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("ready", flush=True)
signal.pause()
"""
_MIB = 1 << 20


def check_package(name: str = "resilient") -> Check:
    """Say whether another project's package of our import name is installed beside ours."""
    try:
        other = distribution(name)
    except PackageNotFoundError:
        return Check("package", is_ok=True, found="no other distribution named `resilient`")
    return Check(
        "package",
        is_ok=False,
        found=f"`{name}` {other.version} of another project has the same import name",
        hint=f"pip uninstall {name} && pip install --force-reinstall resilient-train",
    )


def check_gpus(program: str = "nvidia-smi") -> Check:
    """Say which GPUs the driver shows, and whether one reports uncorrected errors."""
    path = shutil.which(program)
    if path is None:
        return Check("gpus", is_ok=True, found="no NVIDIA driver: training is on the CPU")
    command = [path, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(  # noqa: S603 - the driver's own program
            command, capture_output=True, text=True, timeout=_WAIT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("gpus", is_ok=False, found=f"{program} failed: {error}", hint="dmesg | tail")
    rows = [[cell.strip() for cell in row.split(",")] for row in said.stdout.splitlines() if row]
    if said.returncode or not rows:
        why = (said.stderr or said.stdout).strip()[:200]
        return Check("gpus", is_ok=False, found=f"{program} failed: {why}", hint="dmesg | tail")
    broken = [number for number, row in enumerate(rows) if row[-1].isdecimal() and int(row[-1])]
    shown = f"{len(rows)} x {rows[0][0]}, {rows[0][1]} MiB"
    if broken:
        found, hint = f"{shown}; uncorrected errors on {broken}", "nvidia-smi -q -d ECC"
        return Check("gpus", is_ok=False, found=found, hint=hint)
    return Check("gpus", is_ok=True, found=shown)


def check_shared_memory(root: Path = _SHM) -> Check:
    """Say how much memory a keeper of staged checkpoints would have."""
    granted = grant(KeeperWishes(host_bytes_max=0), root)
    if granted.host_bytes_max > 0:
        found = f"{granted.host_bytes_max // _MIB} MiB for staged checkpoints in {root}"
        return Check("shared memory", is_ok=True, found=found)
    return Check(
        "shared memory",
        is_ok=False,
        found=f"no keeper of staged checkpoints: {granted.why_not} (in a pod an emptyDir with "
        "medium: Memory at /dev/shm gives it)",
        hint="docker run --shm-size 8g IMAGE",
    )


def check_clock() -> Check:
    """Say whether the kernel counts its clock as synchronised (adjtimex(2), reading only)."""
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    if state < 0:
        return Check("clock", is_ok=True, found="the kernel does not say whether it is in step")
    if state == _TIME_ERROR:
        return Check(
            "clock",
            is_ok=False,
            found="not synchronised: notices name moments, and signed requests are refused",
            hint="systemctl start chronyd",
        )
    return Check("clock", is_ok=True, found="synchronised")


def check_signals(proc: Path = _PROC) -> Check:
    """Say whether SIGTERM would get to a process that is started here, and end it as asked."""
    first = _read(proc / "1" / "comm")
    if first in _SHELLS:
        return Check(
            "signals",
            is_ok=False,
            found=f"process 1 is `{first}`, which passes no SIGTERM on, unless it ends with `exec`",
            hint="exec resilient train ...",
        )
    for name, field in (("ignored", "SigIgn"), ("blocked", "SigBlk")):
        if _mask(proc, field) >> (signal.SIGTERM - 1) & 1:
            found, hint = f"SIGTERM is {name} by who started this", "grep -rn \"trap '' TERM\" ."
            return Check("signals", is_ok=False, found=found, hint=hint)
    code = _ask_to_stop()
    is_ok = code == 75  # noqa: PLR2004 - the exit code of the listener above
    found = "SIGTERM arrives and is obeyed" if is_ok else f"a child asked to stop ended with {code}"
    return Check("signals", is_ok=is_ok, found=found)


def _ask_to_stop() -> int:
    with subprocess.Popen(  # noqa: S603 - our own program
        [sys.executable, "-S", "-c", _LISTENER], stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None, "it was asked for"  # noqa: S101
        child.stdout.readline()
        child.terminate()
        try:
            return child.wait(_WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            return child.wait()


def _mask(proc: Path, field: str) -> int:
    rows = _read(proc / "self" / "status").splitlines()
    found = next((row.split()[1] for row in rows if row.startswith(f"{field}:")), "0")
    return int(found, 16)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
