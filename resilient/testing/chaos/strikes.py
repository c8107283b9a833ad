"""Each fault, done to a job. A strike returns once the fault is over, or has ended the job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from resilient.testing.chaos.evidence import Struck
from resilient.testing.chaos.faults import Kind, Target
from resilient.testing.chaos.job import WentWrong
from resilient.testing.chaos.processes import descendants, is_running, kill_all, send
from resilient.vault.health.verify import verify
from resilient.vault.registry.catalog import committed, folders_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from resilient.clock import Clock
    from resilient.testing.chaos.faults import Strike
    from resilient.testing.chaos.job import Job

NOTICE_FILE = "notice.json"
_KILLED, _PREEMPTED = 137, 75
_SAVE_FAILED = (69, 73)
_ORPHANS_SECONDS = 30.0
_SLICE_SECONDS, _AWAKE = 0.1, 0.1
_BLOCK = bytes(1 << 16)


class Striker:
    """Does what a plan says to one job.

    Args:
        job: it runs when a strike begins.
        clock: time.
        within_seconds: how long a job may take to end when it should.
    """

    def __init__(self, job: Job, clock: Clock, within_seconds: float) -> None:
        self._job = job
        self._clock = clock
        self._within_seconds = within_seconds
        self._ways: dict[Kind, Callable[[Struck], Struck]] = {
            Kind.KILL: self._kill,
            Kind.STOP: self._stop,
            Kind.SLOW: self._slow,
            Kind.PREEMPT: self._preempt,
            Kind.NOTICE: self._notice,
            Kind.BIT_FLIP: self._flip,
            Kind.STORAGE_ERROR: self._break_storage,
            Kind.DISK_FULL: self._fill_disk,
            Kind.CLOCK_SKEW: self._move_clock,
        }

    def strike(self, strike: Strike) -> Struck:
        """Do it, and return what was done, with the job's exit code if it ended by it.

        Raises:
            WentWrong: the job did not end in time, or ended before it was struck.
        """
        before = self._job.newest()
        told = Struck(strike, str(strike.fault.kind), self._job.highest, before=before)
        struck = self._ways[strike.fault.kind](told)
        # A rank may have finished steps while it was struck.
        return replace(struck, step=max(struck.step, self._job.highest))

    def _kill(self, told: Struck) -> Struck:
        fault = told.strike.fault
        if fault.in_save:
            self._until_it_saves()
        told = replace(told, before=self._job.newest())
        if fault.target is Target.RANK:
            rank, pid = self._victim(told)
            send([pid], signal.SIGKILL)
            return replace(told, what=f"SIGKILL to rank {rank}", is_new_life=True)
        if fault.target is Target.JOB:
            return self._kill_job(replace(told, what="SIGKILL to the whole job"))
        ranks = [one.pid for one in self._job.look()]
        send([self._job.pid], signal.SIGKILL)
        code = self._job.wait(self._within_seconds)
        what = "SIGKILL to the agent"
        return replace(self._ended(told, what, code, _KILLED), orphans=self._orphans(ranks))

    def _kill_job(self, told: Struck) -> Struck:
        kill_all(self._job.pid)
        code = self._job.wait(self._within_seconds)
        return self._ended(told, told.what, code, _KILLED)

    def _orphans(self, ranks: list[int]) -> tuple[int, ...]:
        deadline_seconds = self._clock.monotonic_seconds() + _ORPHANS_SECONDS
        while self._clock.monotonic_seconds() < deadline_seconds:
            if not any(map(is_running, ranks)):
                return ()
            self._clock.sleep(_SLICE_SECONDS)
        left = tuple(filter(is_running, ranks))
        send(left, signal.SIGKILL)
        return left

    def _stop(self, told: Struck) -> Struck:
        rank, pid = self._victim(told)
        seconds = told.strike.fault.seconds
        send([pid], signal.SIGSTOP)
        self._clock.sleep(seconds)
        send([pid], signal.SIGCONT)
        return replace(told, what=f"SIGSTOP to rank {rank} for {seconds:g} s")

    def _slow(self, told: Struck) -> Struck:
        rank, pid = self._victim(told)
        seconds = told.strike.fault.seconds
        deadline_seconds = self._clock.monotonic_seconds() + seconds
        while self._clock.monotonic_seconds() < deadline_seconds:
            send([pid], signal.SIGSTOP)
            self._clock.sleep(_SLICE_SECONDS * (1 - _AWAKE))
            send([pid], signal.SIGCONT)
            self._clock.sleep(_SLICE_SECONDS * _AWAKE)
        return replace(told, what=f"rank {rank} with a tenth of its time for {seconds:g} s")

    def _preempt(self, told: Struck) -> Struck:
        self._job.terminate()
        code = self._job.wait(self._within_seconds)
        return self._ended(told, "SIGTERM to the job", code, _PREEMPTED, 0)

    def _notice(self, told: Struck) -> Struck:
        seconds = told.strike.fault.seconds
        path = self._job.folder / NOTICE_FILE
        fresh = path.with_suffix(".tmp")
        fresh.write_text(json.dumps({"reason": "chaos", "seconds": seconds}), encoding="utf-8")
        fresh.replace(path)
        try:
            code = self._job.wait(self._within_seconds)
        finally:
            path.unlink()
        what = f"a notice that the host goes in {seconds:g} s"
        return self._ended(told, what, code, _PREEMPTED, 0)

    def _flip(self, told: Struck) -> Struck:
        killed = self._kill_job(told)
        newest = self._job.newest()
        assert newest is not None, "there were two when it was struck"  # noqa: S101
        random = Random(told.strike.draw)  # noqa: S311 - repeatable is the point
        sizes = folders_of(self._job.store)[newest]
        name = random.choice(sorted(one for one, size in sizes.items() if size))
        flip_bit(self._job.repository / newest.folder / name, random)
        is_found = bool(verify(self._job.store, newest))
        what = f"one bit flipped in {newest.folder}/{name}"
        return replace(killed, what=what, before=newest, damaged=newest, is_found=is_found)

    def _break_storage(self, told: Struck) -> Struck:
        pids = [self._job.pid, *descendants(self._job.pid)]
        told = replace(told, what="EIO from fsync")
        with broken_syncs(pids, self._clock):
            return self._until_a_save_fails(told)

    def _fill_disk(self, told: Struck) -> Struck:
        told = replace(told, what="no space left")
        with full(self._job.repository / "chaos-ballast"):
            return self._until_a_save_fails(told)

    def _move_clock(self, told: Struck) -> Struck:
        hands, seconds = self._job.hands, told.strike.fault.seconds
        assert hands is not None, "a plan with this fault starts the job with some"  # noqa: S101
        hands.move(seconds)
        return replace(told, what=f"the time of day jumps by {seconds:+g} s")

    def _until_a_save_fails(self, told: Struck) -> Struck:
        count = len(self._job.facts())

        def has_failed() -> bool:
            return any(one["event"] == "SaveAborted" for one in self._job.facts()[count:])

        seconds = told.strike.fault.seconds
        began_seconds = self._clock.monotonic_seconds()
        try:
            code = self._job.until(has_failed, seconds)
        except WentWrong:
            # Nothing was saved meanwhile, or it was not noticed; the run goes on.
            return replace(told, what=f"{told.what} for {seconds:g} s, and no save failed")
        took_seconds = self._clock.monotonic_seconds() - began_seconds
        what = f"{told.what} for {took_seconds:.1f} s"
        if code is None and self._ends_soon():
            code = self._job.wait(self._within_seconds)
        if code is None:
            return replace(told, what=what)
        return self._ended(told, what, code, *_SAVE_FAILED)

    def _ends_soon(self) -> bool:
        """Whether a failed save ends the job: it does unless the script says otherwise."""
        step = self._job.highest
        code = self._job.until(lambda: self._job.highest > step + 2, self._within_seconds)
        return code is not None

    def _until_it_saves(self) -> None:
        code = self._job.until(self._job.is_saving, self._within_seconds)
        if code is not None:
            raise WentWrong("it ended before it saved again", code)

    def _victim(self, told: Struck) -> tuple[int, int]:
        ranks = self._job.look()
        if not ranks:
            raise WentWrong("no rank was there to be struck", self._job.code())
        chosen = ranks[told.strike.rank(len(ranks))]
        return chosen.local_rank, chosen.pid

    def _ended(self, told: Struck, what: str, code: int, *right: int) -> Struck:
        return replace(told, what=what, code=code, codes=right, is_new_life=code != 0)


def is_ready(strike: Strike, job: Job) -> bool:
    """Whether the job has what a fault needs: to flip a bit, a second checkpoint to go back to."""
    if strike.fault.kind is not Kind.BIT_FLIP:
        return True
    return sum(not verify(job.store, one) for one in committed(job.store)[:3]) > 1


def flip_bit(path: Path, random: Random) -> None:
    """Change one bit of a file where it lies."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        bit = random.randrange(8 * size)
        file.seek(bit // 8)
        byte = file.read(1)[0] ^ 1 << bit % 8
        file.seek(bit // 8)
        file.write(bytes([byte]))


@contextmanager
def full(ballast: Path) -> Iterator[None]:
    """Leave no free byte in the file system of ``ballast`` inside."""
    try:
        with ballast.open("wb", buffering=0) as file:
            size = len(_BLOCK)
            while size:
                try:
                    file.write(_BLOCK[:size])
                except OSError:
                    # Smaller and smaller, until not even one byte fits.
                    size //= 2
        yield
    finally:
        ballast.unlink(missing_ok=True)


@contextmanager
def broken_syncs(pids: list[int], clock: Clock, within_seconds: float = 20.0) -> Iterator[None]:
    """Let fsync fail with EIO in these processes, and in what they start, inside.

    Raises:
        WentWrong: they cannot be traced.
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
                raise WentWrong("strace does not get hold of the job")
            clock.sleep(_SLICE_SECONDS)
        yield
    finally:
        # It lets go of whom it traces, and they go on.
        tracer.terminate()
        tracer.wait()


def _is_traced(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8") as file:  # noqa: PTH123
            return any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in file)
    except OSError:
        return True
