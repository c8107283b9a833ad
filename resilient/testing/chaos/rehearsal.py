"""Both runs: one that nothing happens to, and one to which the plan does."""

from __future__ import annotations

import shutil
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from resilient.errors import ConfigError
from resilient.testing.chaos.clocks import MovableClock
from resilient.testing.chaos.evidence import Ended, Evidence
from resilient.testing.chaos.faults import Kind, draw_strikes
from resilient.testing.chaos.feasible import mount_small, unmount
from resilient.testing.chaos.job import HOST, Job, Surroundings
from resilient.testing.chaos.leftovers import examine, measure, saved_steps
from resilient.testing.chaos.namespaces import Network
from resilient.testing.chaos.strikes import NOTICE_FILE
from resilient.testing.chaos.struck_run import StruckRun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from resilient.clock import Clock
    from resilient.testing.chaos.faults import ChaosPlan

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
        hosts: on how many it runs.
    """

    plan: ChaosPlan
    seed: int
    command: tuple[str, ...]
    folder: Path
    within_seconds: float = 600.0
    hosts: int = 1


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
        network = ends.enter_context(Network(wish.hosts)) if wish.hosts > 1 else None
        home, around = wish.folder / CALM, Surroundings(network=network)
        calm = Job(home, home / _REPOSITORY, (), wish.command, clock, around)
        ends.callback(calm.kill)
        began_seconds = clock.monotonic_seconds()
        tell("the undisturbed run")
        calmly = measure(calm, _run_calm(calm))
        calm_seconds = clock.monotonic_seconds() - began_seconds
        tell(f"the undisturbed run: {calmly.step} steps in {calm_seconds:.0f} s")
        repository = ends.enter_context(_place(wish, calm))
        hands = MovableClock(wish.folder / STRUCK) if wish.plan.has(Kind.CLOCK_SKEW) else None
        around = Surroundings(hands, network)
        options = _options(wish)
        struck = Job(wish.folder / STRUCK, repository, options, wish.command, clock, around)
        ends.callback(struck.kill)
        patience_seconds = max(wish.within_seconds, _CALM_FACTOR * calm_seconds)
        run = StruckRun(struck, clock, wish.within_seconds, patience_seconds)
        evidence = run.through(draw_strikes(wish.plan, wish.seed), calmly, tell)
        tell("comparing")
        left = examine(struck, evidence.ended, evidence.struck, calmly, calm.store)
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
            hint=f"tail {next((one.said for one in job.hosts if one.code()), job.folder)}",
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
    often = str(sum(one.count for one in wish.plan.faults) + 3)
    file = wish.folder / STRUCK / NOTICE_FILE.format(host=HOST)
    notice = ["--notice", f"file:{file}"] if wish.plan.has(Kind.NOTICE) else []
    # A host that is struck often is not an unhealthy one, which the others leave out.
    healthy = ["--max-host-failures", often] if wish.hosts > 1 else []
    return ["--max-restarts", often, *healthy, *notice]


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
