"""Both runs: one that nothing happens to, and one to which the plan does."""

from __future__ import annotations

import shutil
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from resilient.errors import ConfigError
from resilient.format.names import parse_checkpoint
from resilient.testing.chaos.clocks import MovableClock
from resilient.testing.chaos.evidence import Ended, Evidence
from resilient.testing.chaos.faults import Kind, draw_strikes
from resilient.testing.chaos.feasible import mount_small, unmount
from resilient.testing.chaos.job import Job, WentWrong
from resilient.testing.chaos.leftovers import examine, newest_whole, saved_steps
from resilient.testing.chaos.strikes import NOTICE_FILE, Striker, is_ready

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from resilient.clock import Clock
    from resilient.testing.chaos.evidence import Struck
    from resilient.testing.chaos.faults import ChaosPlan, Strike

CALM, STRUCK = "calm", "struck"
_DISK = "disk"
_REPOSITORY = "repository"
_DISK_BYTES_MIN = 16 << 20
_CALM_FACTOR = 20.0


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What is to be tried.

    Attributes:
        plan: the faults.
        seed: decides what the plan leaves open.
        command: what follows `resilient train`.
        folder: of both runs.
        within_seconds: how long a job may take to go on after a fault.
    """

    plan: ChaosPlan
    seed: int
    command: tuple[str, ...]
    folder: Path
    within_seconds: float = 600.0


def rehearse(wish: Rehearsal, clock: Clock, tell: Callable[[str], None]) -> Evidence:
    """Run the command undisturbed, then under the plan, and return what was seen.

    Whatever is raised inside, nothing that it has started goes on and no disk stays mounted. If
    this process is killed, the run goes on to its end by itself, and a disk stays.

    Args:
        wish: what is to be tried; the plan must be feasible.
        clock: time.
        tell: hears what happens, a line at a time.

    Raises:
        ConfigError: the undisturbed run does not end well, shows no steps or saves nothing, or
            the folder holds what no rehearsal made.
    """
    clear(wish.folder)
    with ExitStack() as ends:
        calm = Job(wish.folder / CALM, wish.folder / CALM / _REPOSITORY, (), wish.command, clock)
        ends.callback(calm.kill)
        began_seconds = clock.monotonic_seconds()
        tell("the undisturbed run")
        calmly = _run_calm(calm)
        calm_seconds = clock.monotonic_seconds() - began_seconds
        tell(f"the undisturbed run: {calmly.step} steps in {calm_seconds:.0f} s")
        repository = ends.enter_context(_place(wish, calm))
        hands = MovableClock(wish.folder / STRUCK) if wish.plan.has(Kind.CLOCK_SKEW) else None
        struck = Job(wish.folder / STRUCK, repository, _options(wish), wish.command, clock, hands)
        ends.callback(struck.kill)
        run = _StruckRun(wish, struck, clock, max(wish.within_seconds, _CALM_FACTOR * calm_seconds))
        evidence = run.through(calmly, tell)
        tell("comparing")
        left = examine(struck, evidence.ended, evidence.struck, calm.store)
        return replace(evidence, ended=left)


def clear(folder: Path) -> None:
    """Remove what an earlier rehearsal left in its folder, and never anything else.

    Raises:
        ConfigError: something else is there.
    """
    names = {one.name for one in folder.iterdir()} if folder.is_dir() else set()
    for name in sorted(names - {CALM, STRUCK}):
        raise ConfigError(
            f"`{folder}` holds `{name}`, which no rehearsal made", hint="--folder ANOTHER"
        )
    for name in (CALM, STRUCK):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True)


def _run_calm(job: Job) -> Ended:
    job.start()
    code = None
    while code is None:
        # However long it takes: a person knows how long their script trains.
        code = job.until(lambda: False, float("inf"))
    newest = job.newest()
    if code:
        raise ConfigError(
            f"the undisturbed run ended with {code}, so there is nothing to compare with",
            hint=f"tail {job.said}",
        )
    if newest is None:
        raise ConfigError(
            "the undisturbed run saved nothing in the repository that `resilient train --repo` "
            "names",
            hint="resilient.Trainer saves there, and so does a Checkpointer that is given no URL",
        )
    if job.highest < 1:
        raise ConfigError(
            "the undisturbed run showed no steps, so nothing can be struck at one",
            hint="resilient.Trainer shows them; in a loop of your own call resilient.heartbeat",
        )
    return Ended(code, step=newest.step, steps=saved_steps(job))


def _options(wish: Rehearsal) -> list[str]:
    """Return options for the struck run; the same ones given by the user come later and win."""
    count = sum(one.count for one in wish.plan.faults)
    notice = ["--notice", f"file:{wish.folder / STRUCK / NOTICE_FILE}"]
    return ["--max-restarts", str(count + 3), *(notice if wish.plan.has(Kind.NOTICE) else [])]


@contextmanager
def _place(wish: Rehearsal, calm: Job) -> Iterator[Path]:
    """Yield where the struck run saves: on a small disk of its own if the plan fills it."""
    repository = wish.folder / STRUCK / _REPOSITORY
    if not wish.plan.has(Kind.DISK_FULL):
        yield repository
        return
    disk = wish.folder / STRUCK / _DISK
    disk.mkdir()
    used = sum(one.stat().st_size for one in calm.repository.rglob("*") if one.is_file())
    try:
        problem = mount_small(disk, max(_DISK_BYTES_MIN, 4 * used))
        if problem:
            raise ConfigError(f"cannot mount a small disk at `{disk}`: {problem}")
        yield disk / _REPOSITORY
    finally:
        # What was on it is for whoever looks into what happened.
        if (disk / _REPOSITORY).is_dir():
            shutil.copytree(disk / _REPOSITORY, repository, dirs_exist_ok=True)
        if disk.is_mount():
            unmount(disk)
        disk.rmdir()


class _StruckRun:
    """Leads one job through all strikes.

    Args:
        wish: what is to be tried.
        job: not started yet.
        clock: time.
        patience_seconds: until a step comes at which something is struck, and until the end.
    """

    def __init__(self, wish: Rehearsal, job: Job, clock: Clock, patience_seconds: float) -> None:
        self._strikes = draw_strikes(wish.plan, wish.seed)
        self._job = job
        self._clock = clock
        self._within_seconds = wish.within_seconds
        self._patience_seconds = patience_seconds
        self._striker = Striker(job, clock, wish.within_seconds)
        self._struck: list[Struck] = []

    def through(self, calm: Ended, tell: Callable[[str], None]) -> Evidence:
        """Start the job, strike it, wait for its end; whatever goes wrong is part of what is seen.

        A fault that ends a life waits until the run has saved since the one before: life after
        life without a new checkpoint would rightly be taken for a crash loop.
        """
        self._job.start()
        missed: tuple[Strike, ...] = ()
        problem, code = "", None
        try:
            for number, strike in enumerate(self._strikes):
                code = self._reach(strike, calm.step)
                if code is not None:
                    missed = self._strikes[number:]
                    break
                self._struck.append(self._strike(strike))
                tell(f"{number + 1}/{len(self._strikes)}  {self._struck[-1].what}")
                if self._struck[-1].problem:
                    problem, missed = self._struck[-1].problem, self._strikes[number + 1 :]
                    break
            if not problem and code is None:
                code = self._job.wait(self._patience_seconds)
        except WentWrong as error:
            problem, code = str(error), error.code
            missed = self._strikes[len(self._struck) :]
        self._job.kill()
        ended = Ended(code if code is not None else 1, problem, steps=saved_steps(self._job))
        return Evidence(calm, ended, tuple(self._struck), missed)

    def _reach(self, strike: Strike, steps: int) -> int | None:
        """Wait for the step of a strike; return the exit code if the job ended before."""
        job, step = self._job, strike.step(steps)
        last = next((one for one in reversed(self._struck) if one.is_new_life), None)

        def is_due() -> bool:
            return (
                job.highest >= step
                and bool(job.look())
                and (last is None or job.newest() != last.after)
                and is_ready(strike, job)
            )

        return job.until(is_due, self._patience_seconds)

    def _strike(self, strike: Strike) -> Struck:
        job = self._job
        old, told = {one.pid for one in job.look()}, len(job.facts())
        struck = self._striker.strike(strike)
        struck = replace(struck, after=newest_whole(job.store))
        if struck.code == 0:
            return struck
        began_seconds = self._clock.monotonic_seconds()
        if struck.code is not None:
            job.start()
        try:
            code = job.until(lambda: self._goes_on(old, struck.step), self._within_seconds)
            problem = f"it ended with {code}" if code else ""
        except WentWrong as error:
            problem = str(error)
        seconds = self._clock.monotonic_seconds() - began_seconds
        pids = {one.pid for one in job.look()}
        is_new_life = struck.is_new_life or bool(pids - old)
        struck = replace(struck, seconds=seconds, problem=problem, is_new_life=is_new_life)
        return self._with_resume(struck, told)

    def _goes_on(self, old: set[int], step: int) -> bool:
        """Whether all ranks have finished a step since: of a new life, or beyond those before."""
        ranks = self._job.look()
        if not ranks or len(ranks) < self._job.ranks:
            return False
        is_new = all(one.pid not in old and one.step >= 0 for one in ranks)
        return is_new or all(one.pid in old and one.step > step for one in ranks)

    def _with_resume(self, struck: Struck, told: int) -> Struck:
        """Add where the new life began."""
        facts = self._job.facts()[told:]
        names = [one["checkpoint"] for one in facts if one["event"] == "CheckpointRestored"]
        is_mended = any(one["event"] == "CheckpointMended" for one in facts)
        restored = parse_checkpoint(names[0]) if names else None
        return replace(struck, restored=restored, is_mended=is_mended)
