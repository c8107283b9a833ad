"""Injection of planned faults into a running job: signals, storage errors, network cuts and others.

An injection returns when the fault is over or the job has ended. The faults of files are a flipped
bit, a full disk and a failing fsync. A full disk or a failing fsync ends when the job reports a
failed save, or after the planned number of seconds.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from resilient.checkpoint.catalog import committed, folders_of
from resilient.checkpoint.verify import verify
from resilient.testing.chaos.job import Job, JobFailed
from resilient.testing.chaos.plan import FaultKind, Target
from resilient.testing.chaos.processes import is_running, send
from resilient.testing.chaos.verdict import KILLED, SAVE_FAILED, STOPPED, InjectionResult, ended_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from resilient.clock import Clock
    from resilient.testing.chaos.job import Host
    from resilient.testing.chaos.plan import Injection
    from resilient.testing.chaos.processes import RankProcess

_POLL_SECONDS = 0.1
_BLOCK = bytes(1 << 16)


def flip_bit(path: Path, random: Random) -> None:
    """Flip one bit of a file in place."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        bit = random.randrange(8 * size)
        file.seek(bit // 8)
        byte = file.read(1)[0] ^ 1 << bit % 8
        file.seek(bit // 8)
        file.write(bytes([byte]))


@contextmanager
def filled_disk(ballast: Path) -> Iterator[None]:
    """Fill the file system of ``ballast`` completely, until the block ends."""
    try:
        with ballast.open("wb", buffering=0) as file:
            size = len(_BLOCK)
            while size:
                try:
                    file.write(_BLOCK[:size])
                except OSError:
                    # Write smaller and smaller blocks, until not even one byte fits.
                    size //= 2
        yield
    finally:
        ballast.unlink(missing_ok=True)


@contextmanager
def broken_syncs(pids: list[int], clock: Clock, within_seconds: float = 20.0) -> Iterator[None]:
    """Make fsync fail with EIO in these processes and their children inside the block.

    Raises:
        JobFailed: The processes cannot be traced.
    """
    calls = "fsync,fdatasync"
    command = ["strace", "-qq", "-f", "-o", "/dev/null", "-e", f"trace={calls}"]
    command += ["-e", f"inject={calls}:error=EIO"]
    for pid in pids:
        command += ["-p", str(pid)]
    tracer = subprocess.Popen(  # noqa: S603 - a fixed program
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        deadline_seconds = clock.monotonic_seconds() + within_seconds
        while not all(_is_traced(pid) for pid in pids if is_running(pid)):
            if tracer.poll() is not None or clock.monotonic_seconds() > deadline_seconds:
                raise JobFailed("strace cannot attach to the job")
            clock.sleep(_POLL_SECONDS)
        yield
    finally:
        # strace detaches from its processes, and they continue.
        tracer.terminate()
        tracer.wait()


def _is_traced(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8") as file:  # noqa: PTH123
            return any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in file)
    except OSError:
        return True


_STEPS = 2


def wait_for_failed_save(
    job: Job, clock: Clock, within_seconds: float, result: InjectionResult
) -> InjectionResult:
    """Wait until a save has failed, and return the consequences.

    Args:
        job: Job whose saves cannot become durable.
        clock: Clock for the time limit.
        within_seconds: Deadline for a job that is expected to end.
        result: Known facts of the injection.

    Raises:
        JobFailed: The job neither ends nor continues.
    """
    count = len(job.facts())

    def has_failed() -> bool:
        return any(event["event"] == "SaveAborted" for event in job.facts()[count:])

    seconds = result.strike.fault.seconds
    began_seconds = clock.monotonic_seconds()
    try:
        code = job.until(has_failed, seconds)
    except JobFailed:
        # The job saved nothing meanwhile, or did not notice the failure. The run continues.
        return replace(result, what=f"{result.what} for {seconds:g} s, and no save failed")
    took_seconds = clock.monotonic_seconds() - began_seconds
    action_text = f"{result.what} for {took_seconds:.1f} s"
    if code is None and _ends_soon(job, within_seconds):
        code = job.wait(within_seconds)
    if code is None:
        return replace(result, what=action_text)
    return ended_by(result, action_text, code, *SAVE_FAILED)


def _ends_soon(job: Job, within_seconds: float) -> bool:
    """Return whether a failed save ends the job, as it does unless the script decides otherwise."""
    step = job.highest
    return job.until(lambda: job.highest > step + _STEPS, within_seconds) is not None


NOTICE_FILE = "notice-{host}.json"
_ORPHANS_SECONDS = 30.0
_SLICE_SECONDS, _RUNNING_SHARE = 0.1, 0.1


class FaultInjector:
    """Injector of a plan's faults into one job.

    Args:
        job: Job that runs at the start of an injection.
        clock: Clock for all waits.
        within_seconds: Deadline for a job that is expected to end.
    """

    def __init__(self, job: Job, clock: Clock, within_seconds: float) -> None:
        self._job = job
        self._clock = clock
        self._within_seconds = within_seconds
        self._injectors: dict[FaultKind, Callable[[InjectionResult], InjectionResult]] = {
            FaultKind.KILL: self._kill,
            FaultKind.STOP: self._stop,
            FaultKind.SLOW: self._slow,
            FaultKind.PREEMPT: self._preempt,
            FaultKind.NOTICE: self._notice,
            FaultKind.BIT_FLIP: self._flip,
            FaultKind.STORAGE_ERROR: self._break_storage,
            FaultKind.DISK_FULL: self._fill_disk,
            FaultKind.CLOCK_SKEW: self._move_clock,
            FaultKind.CUT: self._cut,
        }

    def strike(self, strike: Injection) -> InjectionResult:
        """Inject a fault; return its description, and the exit code if it ended the job.

        Raises:
            JobFailed: The job did not end in time, or ended before the fault.
        """
        job = self._job
        ranks = [process.pid for process in job.look()]
        is_of_host = strike.fault.is_of_host and len(job.hosts) > 1
        host = strike.host(len(job.hosts)) if is_of_host else None
        result = InjectionResult(
            strike, str(strike.fault.kind), job.highest, before=job.newest(), host=host
        )
        struck = self._injectors[strike.fault.kind](result)
        # Ranks may have finished steps during the fault. Ranks of another attempt do not count.
        return replace(struck, step=job.last_step(ranks) or struck.step)

    def _kill(self, result: InjectionResult) -> InjectionResult:
        fault = result.strike.fault
        if fault.in_save:
            self._wait_for_save()
        result = replace(result, before=self._job.newest())
        if fault.target is Target.RANK:
            victim = self._victim(result)
            send([victim.pid], signal.SIGKILL)
            action_text = f"SIGKILL to {self._name(victim)}"
            return replace(
                result, what=action_text, host=self._host_number(victim), is_new_life=True
            )
        if fault.target is Target.JOB:
            return self._kill_job(replace(result, what="SIGKILL to the whole job"))
        if fault.target is Target.HOST:
            return self._kill_host(result)
        return self._kill_agent(result)

    def _kill_job(self, result: InjectionResult) -> InjectionResult:
        self._job.kill()
        code = self._job.wait(self._within_seconds)
        return ended_by(result, result.what, code, KILLED)

    def _kill_host(self, result: InjectionResult) -> InjectionResult:
        host, seconds = self._host(result), result.strike.fault.seconds
        host.kill()
        self._watch(seconds)
        action_text = f"SIGKILL to all of {host.name}, which is away for {seconds:g} s"
        return replace(result, what=action_text, is_new_life=True)

    def _kill_agent(self, result: InjectionResult) -> InjectionResult:
        host = self._host(result)
        ranks = [process.pid for process in host.look()]
        host.kill_agent()
        if result.host is not None:
            result = replace(result, what=f"SIGKILL to the agent of {host.name}", is_new_life=True)
            return replace(result, orphans=self._orphans(ranks))
        code = self._job.wait(self._within_seconds)
        action_text = "SIGKILL to the agent"
        return replace(ended_by(result, action_text, code, KILLED), orphans=self._orphans(ranks))

    def _cut(self, result: InjectionResult) -> InjectionResult:
        host, seconds, network = self._host(result), result.strike.fault.seconds, self._job.network
        assert network is not None, "a plan with this fault starts the job on hosts"  # noqa: S101
        network.cut(host.number)
        try:
            self._watch(seconds)
        finally:
            network.join(host.number)
        return replace(result, what=f"{host.name} cut off for {seconds:g} s")

    def _watch(self, seconds: float) -> None:
        """Wait, and record the steps of the ranks meanwhile."""
        deadline_seconds = self._clock.monotonic_seconds() + seconds
        while self._clock.monotonic_seconds() < deadline_seconds:
            self._job.look()
            self._clock.sleep(_SLICE_SECONDS)

    def _orphans(self, ranks: list[int]) -> tuple[int, ...]:
        deadline_seconds = self._clock.monotonic_seconds() + _ORPHANS_SECONDS
        while self._clock.monotonic_seconds() < deadline_seconds:
            if not any(map(is_running, ranks)):
                return ()
            self._clock.sleep(_SLICE_SECONDS)
        orphan_pids = tuple(filter(is_running, ranks))
        send(orphan_pids, signal.SIGKILL)
        return orphan_pids

    def _stop(self, result: InjectionResult) -> InjectionResult:
        victim, seconds = self._victim(result), result.strike.fault.seconds
        send([victim.pid], signal.SIGSTOP)
        self._clock.sleep(seconds)
        send([victim.pid], signal.SIGCONT)
        action_text = f"SIGSTOP to {self._name(victim)} for {seconds:g} s"
        return replace(result, what=action_text, host=self._host_number(victim))

    def _slow(self, result: InjectionResult) -> InjectionResult:
        victim, seconds = self._victim(result), result.strike.fault.seconds
        deadline_seconds = self._clock.monotonic_seconds() + seconds
        while self._clock.monotonic_seconds() < deadline_seconds:
            send([victim.pid], signal.SIGSTOP)
            self._clock.sleep(_SLICE_SECONDS * (1 - _RUNNING_SHARE))
            send([victim.pid], signal.SIGCONT)
            self._clock.sleep(_SLICE_SECONDS * _RUNNING_SHARE)
        action_text = f"{self._name(victim)} with a tenth of its time for {seconds:g} s"
        return replace(result, what=action_text, host=self._host_number(victim))

    def _preempt(self, result: InjectionResult) -> InjectionResult:
        self._job.terminate()
        code = self._job.wait(self._within_seconds)
        return ended_by(result, "SIGTERM to the job", code, STOPPED, 0)

    def _notice(self, result: InjectionResult) -> InjectionResult:
        host, seconds = self._host(result), result.strike.fault.seconds
        path = self._job.folder / NOTICE_FILE.format(host=host.name)
        temporary_path = path.with_suffix(".tmp")
        temporary_path.write_text(
            json.dumps({"reason": "chaos", "seconds": seconds}), encoding="utf-8"
        )
        temporary_path.replace(path)
        try:
            code = self._job.wait(self._within_seconds)
        finally:
            path.unlink()
        host_text = "the host" if result.host is None else host.name
        action_text = f"a notice that {host_text} stops in {seconds:g} s"
        return ended_by(result, action_text, code, STOPPED, 0)

    def _flip(self, result: InjectionResult) -> InjectionResult:
        killed = self._kill_job(result)
        newest = self._job.newest()
        assert newest is not None, "two checkpoints were intact at the injection"  # noqa: S101
        random = Random(result.strike.draw)  # noqa: S311 - repeatable is the point
        sizes = folders_of(self._job.store)[newest]
        name = random.choice(sorted(file for file, size in sizes.items() if size))
        flip_bit(self._job.repository / newest.folder / name, random)
        is_found = bool(verify(self._job.store, newest))
        action_text = f"one bit flipped in {newest.folder}/{name}"
        return replace(killed, what=action_text, before=newest, damaged=newest, is_found=is_found)

    def _break_storage(self, result: InjectionResult) -> InjectionResult:
        result = replace(result, what="EIO from fsync")
        with broken_syncs(self._job.processes(), self._clock):
            return wait_for_failed_save(self._job, self._clock, self._within_seconds, result)

    def _fill_disk(self, result: InjectionResult) -> InjectionResult:
        result = replace(result, what="no space left")
        with filled_disk(self._job.repository / "chaos-ballast"):
            return wait_for_failed_save(self._job, self._clock, self._within_seconds, result)

    def _move_clock(self, result: InjectionResult) -> InjectionResult:
        shifted_clock, seconds = self._job.shifted_clock, result.strike.fault.seconds
        assert shifted_clock is not None, "a plan with this fault starts the job with a clock"  # noqa: S101
        shifted_clock.move(seconds)
        return replace(result, what=f"the time of day jumps by {seconds:+g} s")

    def _wait_for_save(self) -> None:
        code = self._job.until(self._job.is_saving, self._within_seconds)
        if code is not None:
            raise JobFailed("the job ended before the next save", code)

    def _victim(self, result: InjectionResult) -> RankProcess:
        ranks = self._job.look()
        if not ranks:
            raise JobFailed("no rank was running when the fault was due", self._job.code())
        return ranks[result.strike.rank(len(ranks))]

    def _name(self, victim: RankProcess) -> str:
        host_number = self._host_number(victim)
        of_host = "" if host_number is None else f" of {self._job.hosts[host_number].name}"
        return f"rank {victim.local_rank}{of_host}"

    def _host_number(self, victim: RankProcess) -> int | None:
        return victim.host if len(self._job.hosts) > 1 else None

    def _host(self, result: InjectionResult) -> Host:
        return self._job.hosts[result.host or 0]


def is_ready(strike: Injection, job: Job) -> bool:
    """Return whether a fault can be injected now: a bit flip needs two intact checkpoints."""
    if strike.fault.kind is not FaultKind.BIT_FLIP:
        return True
    return sum(not verify(job.store, checkpoint) for checkpoint in committed(job.store)[:3]) > 1
