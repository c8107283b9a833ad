"""Each fault, done to a job. A strike returns once the fault is over, or has ended the job."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from resilient.testing.chaos.damage import broken_syncs, flip_bit, full
from resilient.testing.chaos.evidence import Struck, ended_by
from resilient.testing.chaos.failing_saves import until_a_save_fails
from resilient.testing.chaos.faults import Kind, Target
from resilient.testing.chaos.honesty import KILLED, STOPPED
from resilient.testing.chaos.job import WentWrong
from resilient.testing.chaos.processes import is_running, send
from resilient.vault.health.verify import verify
from resilient.vault.registry.catalog import committed, folders_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from resilient.clock import Clock
    from resilient.testing.chaos.faults import Strike
    from resilient.testing.chaos.host import Host
    from resilient.testing.chaos.job import Job
    from resilient.testing.chaos.processes import RankProcess

NOTICE_FILE = "notice-{host}.json"
_ORPHANS_SECONDS = 30.0
_SLICE_SECONDS, _AWAKE = 0.1, 0.1


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
            Kind.CUT: self._cut,
        }

    def strike(self, strike: Strike) -> Struck:
        """Do it, and return what was done, with the job's exit code if it ended by it.

        Raises:
            WentWrong: the job did not end in time, or ended before it was struck.
        """
        job = self._job
        ranks = [one.pid for one in job.look()]
        is_of_host = strike.fault.is_of_host and len(job.hosts) > 1
        host = strike.host(len(job.hosts)) if is_of_host else None
        told = Struck(strike, str(strike.fault.kind), job.highest, before=job.newest(), host=host)
        struck = self._ways[strike.fault.kind](told)
        # Ranks may have finished steps while they were struck; those of another life count none.
        return replace(struck, step=job.last_step(ranks) or struck.step)

    def _kill(self, told: Struck) -> Struck:
        fault = told.strike.fault
        if fault.in_save:
            self._until_it_saves()
        told = replace(told, before=self._job.newest())
        if fault.target is Target.RANK:
            victim = self._victim(told)
            send([victim.pid], signal.SIGKILL)
            what = f"SIGKILL to {self._name(victim)}"
            return replace(told, what=what, host=self._place(victim), is_new_life=True)
        if fault.target is Target.JOB:
            return self._kill_job(replace(told, what="SIGKILL to the whole job"))
        if fault.target is Target.HOST:
            return self._kill_host(told)
        return self._kill_agent(told)

    def _kill_job(self, told: Struck) -> Struck:
        self._job.kill()
        code = self._job.wait(self._within_seconds)
        return ended_by(told, told.what, code, KILLED)

    def _kill_host(self, told: Struck) -> Struck:
        host, seconds = self._host(told), told.strike.fault.seconds
        host.kill()
        self._watch(seconds)
        what = f"SIGKILL to all of {host.name}, which is away for {seconds:g} s"
        return replace(told, what=what, is_new_life=True)

    def _kill_agent(self, told: Struck) -> Struck:
        host = self._host(told)
        ranks = [one.pid for one in host.look()]
        host.kill_agent()
        if told.host is not None:
            told = replace(told, what=f"SIGKILL to the agent of {host.name}", is_new_life=True)
            return replace(told, orphans=self._orphans(ranks))
        code = self._job.wait(self._within_seconds)
        what = "SIGKILL to the agent"
        return replace(ended_by(told, what, code, KILLED), orphans=self._orphans(ranks))

    def _cut(self, told: Struck) -> Struck:
        host, seconds, network = self._host(told), told.strike.fault.seconds, self._job.network
        assert network is not None, "a plan with this fault starts the job on hosts"  # noqa: S101
        network.cut(host.number)
        try:
            self._watch(seconds)
        finally:
            network.join(host.number)
        return replace(told, what=f"{host.name} cut off for {seconds:g} s")

    def _watch(self, seconds: float) -> None:
        """Wait, and see how far ranks get meanwhile."""
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
        left = tuple(filter(is_running, ranks))
        send(left, signal.SIGKILL)
        return left

    def _stop(self, told: Struck) -> Struck:
        victim, seconds = self._victim(told), told.strike.fault.seconds
        send([victim.pid], signal.SIGSTOP)
        self._clock.sleep(seconds)
        send([victim.pid], signal.SIGCONT)
        what = f"SIGSTOP to {self._name(victim)} for {seconds:g} s"
        return replace(told, what=what, host=self._place(victim))

    def _slow(self, told: Struck) -> Struck:
        victim, seconds = self._victim(told), told.strike.fault.seconds
        deadline_seconds = self._clock.monotonic_seconds() + seconds
        while self._clock.monotonic_seconds() < deadline_seconds:
            send([victim.pid], signal.SIGSTOP)
            self._clock.sleep(_SLICE_SECONDS * (1 - _AWAKE))
            send([victim.pid], signal.SIGCONT)
            self._clock.sleep(_SLICE_SECONDS * _AWAKE)
        what = f"{self._name(victim)} with a tenth of its time for {seconds:g} s"
        return replace(told, what=what, host=self._place(victim))

    def _preempt(self, told: Struck) -> Struck:
        self._job.terminate()
        code = self._job.wait(self._within_seconds)
        return ended_by(told, "SIGTERM to the job", code, STOPPED, 0)

    def _notice(self, told: Struck) -> Struck:
        host, seconds = self._host(told), told.strike.fault.seconds
        path = self._job.folder / NOTICE_FILE.format(host=host.name)
        fresh = path.with_suffix(".tmp")
        fresh.write_text(json.dumps({"reason": "chaos", "seconds": seconds}), encoding="utf-8")
        fresh.replace(path)
        try:
            code = self._job.wait(self._within_seconds)
        finally:
            path.unlink()
        which = "the host" if told.host is None else host.name
        what = f"a notice that {which} goes in {seconds:g} s"
        return ended_by(told, what, code, STOPPED, 0)

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
        told = replace(told, what="EIO from fsync")
        with broken_syncs(self._job.processes(), self._clock):
            return until_a_save_fails(self._job, self._clock, self._within_seconds, told)

    def _fill_disk(self, told: Struck) -> Struck:
        told = replace(told, what="no space left")
        with full(self._job.repository / "chaos-ballast"):
            return until_a_save_fails(self._job, self._clock, self._within_seconds, told)

    def _move_clock(self, told: Struck) -> Struck:
        hands, seconds = self._job.hands, told.strike.fault.seconds
        assert hands is not None, "a plan with this fault starts the job with some"  # noqa: S101
        hands.move(seconds)
        return replace(told, what=f"the time of day jumps by {seconds:+g} s")

    def _until_it_saves(self) -> None:
        code = self._job.until(self._job.is_saving, self._within_seconds)
        if code is not None:
            raise WentWrong("it ended before it saved again", code)

    def _victim(self, told: Struck) -> RankProcess:
        ranks = self._job.look()
        if not ranks:
            raise WentWrong("no rank was there to be struck", self._job.code())
        return ranks[told.strike.rank(len(ranks))]

    def _name(self, victim: RankProcess) -> str:
        place = self._place(victim)
        of_host = "" if place is None else f" of {self._job.hosts[place].name}"
        return f"rank {victim.local_rank}{of_host}"

    def _place(self, victim: RankProcess) -> int | None:
        return victim.host if len(self._job.hosts) > 1 else None

    def _host(self, told: Struck) -> Host:
        return self._job.hosts[told.host or 0]


def is_ready(strike: Strike, job: Job) -> bool:
    """Whether the job has what a fault needs: to flip a bit, a second checkpoint to go back to."""
    if strike.fault.kind is not Kind.BIT_FLIP:
        return True
    return sum(not verify(job.store, one) for one in committed(job.store)[:3]) > 1
