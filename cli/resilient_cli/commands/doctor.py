"""``resilient doctor``: checks of this machine and of a repository.

The machine checks cover packages, GPUs, shared memory, the clock and signals. The store checks
write objects under a random prefix that no other code reads, and delete them again.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from resilient.checkpoint.catalog import committed
from resilient.clock import SystemClock
from resilient.elastic.options import DaemonOptions
from resilient.elastic.preemption.factory import detect
from resilient.elastic.saver_daemon import resolve_memory_limit
from resilient.errors import KeyExists, NotExclusive, StoreError, UsageError
from resilient.storage.store import free_bytes
from resilient_cli import preemption_budget
from resilient_cli.output import CommandResult, Table, show
from resilient_cli.preemption_budget import Check
from resilient_cli.repositories import open_repository

if TYPE_CHECKING:
    from collections.abc import Callable

    from resilient.clock import Clock
    from resilient.storage.store import Store

_PROC = Path("/proc")
_SHM = Path("/dev/shm")  # noqa: S108 - the mount of shared memory
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
    """Check that no other distribution with our import name is installed."""
    try:
        package = distribution(name)
    except PackageNotFoundError:
        return Check("package", is_ok=True, found="no other distribution named `resilient`")
    return Check(
        "package",
        is_ok=False,
        found=f"`{name}` {package.version} of another project has the same import name",
        hint=f"pip uninstall {name} && pip install --force-reinstall resilient-train",
    )


def check_gpus(program: str = "nvidia-smi") -> Check:
    """Check the GPUs that the driver reports for uncorrected errors."""
    path = shutil.which(program)
    if path is None:
        return Check("gpus", is_ok=True, found="no NVIDIA driver: training is on the CPU")
    command = [path, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        process = subprocess.run(  # noqa: S603 - the driver's own program
            command, capture_output=True, text=True, timeout=_WAIT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("gpus", is_ok=False, found=f"{program} failed: {error}", hint="dmesg | tail")
    rows = [[cell.strip() for cell in row.split(",")] for row in process.stdout.splitlines() if row]
    if process.returncode or not rows:
        reason = (process.stderr or process.stdout).strip()[:200]
        return Check("gpus", is_ok=False, found=f"{program} failed: {reason}", hint="dmesg | tail")
    faulty_gpus = [
        number for number, row in enumerate(rows) if row[-1].isdecimal() and int(row[-1])
    ]
    summary = f"{len(rows)} x {rows[0][0]}, {rows[0][1]} MiB"
    if faulty_gpus:
        text, hint = f"{summary}; uncorrected errors on {faulty_gpus}", "nvidia-smi -q -d ECC"
        return Check("gpus", is_ok=False, found=text, hint=hint)
    return Check("gpus", is_ok=True, found=summary)


def check_shared_memory(root: Path = _SHM) -> Check:
    """Check how much shared memory a saver daemon gets for staged checkpoints."""
    options = resolve_memory_limit(DaemonOptions(host_bytes_max=0), root)
    if options.host_bytes_max > 0:
        text = f"{options.host_bytes_max // _MIB} MiB for staged checkpoints in {root}"
        return Check("shared memory", is_ok=True, found=text)
    return Check(
        "shared memory",
        is_ok=False,
        found=f"no saver daemon: {options.why_not} (in a pod, mount an emptyDir with medium: "
        "Memory at /dev/shm)",
        hint="docker run --shm-size 8g IMAGE",
    )


def check_clock() -> Check:
    """Check that the kernel counts its clock as synchronised (adjtimex(2), read only)."""
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    if state < 0:
        return Check(
            "clock",
            is_ok=True,
            found="the kernel does not report whether the clock is synchronised",
        )
    if state == _TIME_ERROR:
        return Check(
            "clock",
            is_ok=False,
            found="not synchronised: notices carry times, and stores reject signed requests",
            hint="systemctl start chronyd",
        )
    return Check("clock", is_ok=True, found="synchronised")


def check_signals(proc: Path = _PROC) -> Check:
    """Check that SIGTERM reaches a child process, and ends it with the intended exit code."""
    init_name = _read(proc / "1" / "comm")
    if init_name in _SHELLS:
        return Check(
            "signals",
            is_ok=False,
            found=f"process 1 is `{init_name}`, which does not forward SIGTERM unless it ends with "
            "`exec`",
            hint="exec resilient train ...",
        )
    for name, status_field in (("ignored", "SigIgn"), ("blocked", "SigBlk")):
        if _mask(proc, status_field) >> (signal.SIGTERM - 1) & 1:
            text, hint = f"SIGTERM is {name} by the parent process", "grep -rn \"trap '' TERM\" ."
            return Check("signals", is_ok=False, found=text, hint=hint)
    code = _ask_to_stop()
    is_ok = code == 75  # noqa: PLR2004 - the exit code of the listener above
    text = (
        ("SIGTERM arrives and ends a child")
        if is_ok
        else f"a child ended with {code} after SIGTERM"
    )
    return Check("signals", is_ok=is_ok, found=text)


def _ask_to_stop() -> int:
    with subprocess.Popen(  # noqa: S603 - our own program
        [sys.executable, "-S", "-c", _LISTENER], stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None, "stdout must be a pipe"  # noqa: S101
        child.stdout.readline()
        child.terminate()
        try:
            return child.wait(_WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            return child.wait()


def _mask(proc: Path, field: str) -> int:
    rows = _read(proc / "self" / "status").splitlines()
    mask = next((row.split()[1] for row in rows if row.startswith(f"{field}:")), "0")
    return int(mask, 16)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


_SMALL_BYTES, _LARGE_BYTES = 1 << 10, 8 << 20
_ROUNDS = 5
_SLOW_SECONDS = 1.0


@dataclass(slots=True)
class StoreProbe:
    """Results of the checks of a store.

    Attributes:
        checks: Result of each check.
        bytes_per_second: Write speed of a large object; 0 if it could not be written.
        checkpoint_bytes: Size of the newest checkpoint; 0 if there is none.
    """

    checks: list[Check] = field(default_factory=list)
    bytes_per_second: float = 0.0
    checkpoint_bytes: int = 0

    @property
    def save_seconds(self) -> float | None:
        """Estimated seconds to save the newest checkpoint's size; None if unknown."""
        if not self.bytes_per_second or not self.checkpoint_bytes:
            return None
        return self.checkpoint_bytes / self.bytes_per_second


def examine(store: Store, clock: Clock) -> StoreProbe:
    """Check what a store can do; report an error of the store as a failed check."""
    probe, prefix = StoreProbe(), f"doctor-{secrets.token_hex(8)}"
    try:
        probe.checks.append(_check_exclusive(store, f"{prefix}/new"))
        probe.checks.append(_check_atomic(store, f"{prefix}/put"))
        probe.checks.append(_check_latency(store, clock, f"{prefix}/small"))
        probe.checks.append(_check_throughput(store, clock, f"{prefix}/large", probe))
        probe.checks.append(_check_space(store, probe))
    except (StoreError, OSError) as error:
        hint = getattr(error, "hint", "")
        probe.checks.append(Check("storage", is_ok=False, found=str(error), hint=hint))
    finally:
        for name in ("new", "put", "small", "large"):
            with suppress(StoreError, OSError):
                store.delete(f"{prefix}/{name}")
    return probe


def _check_exclusive(store: Store, key: str) -> Check:
    try:
        store.put_new(key, b"first")
        store.put_new(key, b"second")
    except KeyExists:
        is_ok = store.get(key) == b"first"
    except NotExclusive as error:
        text, hint = error.message, "resilient train --single-writer"
        return Check("conditional write", is_ok=False, found=text, hint=hint)
    else:
        is_ok = False
    text = (
        ("of two writers one succeeds")
        if is_ok
        else ("a second writer replaced the object of the first")
    )
    return Check("conditional write", is_ok, text, "" if is_ok else "resilient doctor --repo URL")


def _check_atomic(store: Store, key: str) -> Check:
    """Replace an object and read it back: a partial write would match neither version."""
    for data in (b"a" * _SMALL_BYTES, b"b" * (2 * _SMALL_BYTES)):
        store.put(key, data)
        if store.get(key) != data or store.stat(key).size_bytes != len(data):
            return Check(
                "atomic put", is_ok=False, found="a read returned other bytes than were written"
            )
    keys = [entry.key for entry in store.list(key.partition("/")[0])]
    is_ok = key in keys
    text = (
        ("objects are written whole and listed at once")
        if is_ok
        else ("a listing lacks an object that was written")
    )
    return Check("atomic put", is_ok, text)


def _check_latency(store: Store, clock: Clock, key: str) -> Check:
    put_seconds = sorted(
        _measure_seconds(clock, lambda: store.put(key, os.urandom(_SMALL_BYTES)))
        for _ in range(_ROUNDS)
    )
    text = (
        f"{put_seconds[len(put_seconds) // 2] * 1000:.1f} ms for a small object, "
        f"{put_seconds[-1] * 1000:.1f} at most"
    )
    is_ok = put_seconds[-1] < _SLOW_SECONDS
    text += "" if is_ok else ", and each commit needs several such requests"
    return Check("latency", is_ok, text, "" if is_ok else "resilient help storage")


def _check_throughput(store: Store, clock: Clock, key: str, probe: StoreProbe) -> Check:
    data = os.urandom(_LARGE_BYTES)
    took_seconds = _measure_seconds(clock, lambda: store.put(key, data))
    probe.bytes_per_second = len(data) / max(took_seconds, 1e-9)
    text = f"{probe.bytes_per_second / _MIB:.0f} MiB/s for one object of {_LARGE_BYTES // _MIB} MiB"
    return Check("throughput", is_ok=True, found=text)


def _check_space(store: Store, probe: StoreProbe) -> Check:
    checkpoints = committed(store)
    if checkpoints:
        folder = checkpoints[0].folder
        probe.checkpoint_bytes = sum(entry.size_bytes for entry in store.list(folder))
    free = free_bytes(store)
    if free is None:
        return Check("space", is_ok=True, found="the store does not report its free space")
    # Garbage collection deletes the old checkpoint only after the new one exists.
    is_ok = free >= 2 * probe.checkpoint_bytes
    text = (
        f"{free // _MIB} MiB free, the newest checkpoint has {probe.checkpoint_bytes // _MIB} MiB"
    )
    return Check("space", is_ok, text, "" if is_ok else "resilient ckpt prune --dry-run")


def _measure_seconds(clock: Clock, work: Callable[[], object]) -> float:
    began_seconds = clock.monotonic_seconds()
    work()
    return clock.monotonic_seconds() - began_seconds


Repo = Annotated[
    str | None,
    typer.Option(
        "-r", "--repo", envvar="RESILIENT_REPO", help="Also check the store of this repository."
    ),
]
Events = Annotated[
    Path | None, typer.Option(help="Event files of a run, the source of measured save times.")
]
Grace = Annotated[
    float,
    typer.Option(
        "--grace", "--shutdown-timeout", help="Value of --grace for resilient train.", min=0
    ),
]
Termination = Annotated[
    float | None,
    typer.Option(help="Seconds from SIGTERM to SIGKILL: terminationGracePeriodSeconds, KillWait."),
]
Notice = Annotated[
    str, typer.Option(help="auto, off, aws, gcp, azure, gke, slurm, or the seconds of notice.")
]


def doctor(
    ctx: typer.Context,
    *,
    repo: Repo = None,
    events: Events = None,
    grace: Grace = 25.0,
    termination_grace: Termination = None,
    notice: Notice = "auto",
) -> None:
    """Check what training depends on. Exit code 1: a check failed."""
    checks = [
        check_package(),
        check_gpus(),
        check_shared_memory(),
        check_clock(),
        check_signals(),
    ]
    notice_seconds = _notice(notice)
    probe = (
        examine(open_repository(repo, None, reads_unsigned=True), SystemClock())
        if repo
        else StoreProbe()
    )
    checks += probe.checks
    terms = _terms(probe, events)
    checks += preemption_budget.judge(
        preemption_budget.PreemptionBudget(
            terms[0], terms[1], grace, termination_grace, notice_seconds, terms[2]
        )
    )
    show(_answer(checks), ctx.find_root().obj)
    raise typer.Exit(0 if all(check.is_ok for check in checks) else 1)


def _notice(word: str) -> float | None:
    """Return the seconds of notice before a preemption; None if unknown.

    Raises:
        UsageError: The word is unknown.
    """
    if word == "auto":
        notice_seconds = [
            preemption_budget.NOTICE_SECONDS[provider] for provider in detect(os.environ)
        ]
        return min(notice_seconds, default=None)
    if word in preemption_budget.NOTICE_SECONDS:
        return preemption_budget.NOTICE_SECONDS[word]
    if word == "off":
        return None
    try:
        return float(word)
    except ValueError as error:
        names = ", ".join(preemption_budget.NOTICE_SECONDS)
        raise UsageError(f"--notice {word!r} is not auto, off, {names} or seconds") from error


def _terms(probe: StoreProbe, events: Path | None) -> tuple[float | None, float, str]:
    """Return the seconds of a save and of a promotion, and the source of these numbers."""
    save_times = preemption_budget.read_events(events) if events else preemption_budget.SaveTimes()
    save_seconds = preemption_budget.p95(save_times.saves)
    if save_seconds is not None:
        return (
            save_seconds,
            preemption_budget.p95(save_times.promotions) or 0.0,
            f"p95 of {len(save_times.saves)} saves",
        )
    return (
        probe.save_seconds,
        0.0,
        ("estimated from the size of the newest checkpoint and the store's speed"),
    )


def _answer(checks: list[Check]) -> CommandResult:
    rows = tuple((check.name, check.verdict, check.found) for check in checks)
    hints = tuple(f"hint: {check.name}: {check.hint}" for check in checks if check.hint)
    warnings = tuple(check.name for check in checks if not check.is_ok)
    document = {"is_ok": not warnings, "checks": [check.to_json() for check in checks]}
    return CommandResult(
        "doctor", "diagnosis", document, (Table(("CHECK", "", "FOUND"), rows), *hints), ids=warnings
    )
