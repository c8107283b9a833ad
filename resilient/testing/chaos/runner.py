"""Runner of a chaos experiment: an undisturbed run, then a run under a fault plan.

If the runner receives a termination signal, the runner kills the processes of the experiment and
unmounts the file systems that it has mounted.
"""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

from resilient.errors import ConfigError
from resilient.format.keys import parse_checkpoint
from resilient.testing.chaos.capabilities import mount_small, unmount
from resilient.testing.chaos.clock_shift import MovableClock
from resilient.testing.chaos.injectors import NOTICE_FILE, FaultInjector, is_ready
from resilient.testing.chaos.job import HOST, Job, JobEnvironment, JobFailed
from resilient.testing.chaos.netns import Network
from resilient.testing.chaos.plan import FaultKind, draw_injections
from resilient.testing.chaos.processes import children, kill_all
from resilient.testing.chaos.verdict import (
    ExperimentResult,
    HostEnd,
    RunResult,
    correct_codes,
    examine,
    measure,
    newest_intact,
    saved_steps,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from resilient.clock import Clock
    from resilient.format.keys import CheckpointId
    from resilient.testing.chaos.plan import ChaosPlan, Injection
    from resilient.testing.chaos.verdict import InjectionResult

# Within this time after a link is up again, the hosts know which hosts they had counted as lost.
_SETTLED_SECONDS = 10.0


class FaultedRun:
    """Run of one job through all injections.

    Args:
        job: Job that is not started yet.
        clock: Clock for all waits.
        within_seconds: Time for the job to continue after a fault.
        patience_seconds: Time until the step of the next fault, and until the end.
    """

    def __init__(
        self, job: Job, clock: Clock, within_seconds: float, patience_seconds: float
    ) -> None:
        self._job = job
        self._clock = clock
        self._within_seconds = within_seconds
        self._patience_seconds = patience_seconds
        self._injector = FaultInjector(job, clock, within_seconds)
        self._injected: list[InjectionResult] = []

    def through(
        self, strikes: Sequence[Injection], calm: RunResult, tell: Callable[[str], None]
    ) -> ExperimentResult:
        """Start the job, inject all faults, wait for the end, and return all observations.

        Every failure becomes part of the observations. A fault that ends an attempt waits for a new
        checkpoint since the previous fault. Otherwise attempts without a new checkpoint would
        rightly count as a crash loop.

        Args:
            strikes: Injections in the order of the run.
            calm: Result of the undisturbed run.
            tell: Function that receives a line per injection.
        """
        self._job.start()
        missed_injections: tuple[Injection, ...] = ()
        problem, code = "", None
        try:
            for number, strike in enumerate(strikes):
                code = self._wait_for_step(strike, calm.step)
                if code is not None:
                    missed_injections = tuple(strikes[number:])
                    break
                self._injected.append(self._inject(strike))
                tell(f"{number + 1}/{len(strikes)}  {self._injected[-1].what}")
                if self._injected[-1].problem:
                    problem = self._injected[-1].problem
                    missed_injections = tuple(strikes[number + 1 :])
                    break
            if not problem and code is None:
                code = self._job.wait(self._patience_seconds)
        except JobFailed as error:
            problem, code = str(error), error.code
            missed_injections = tuple(strikes[len(self._injected) :])
        self._job.kill()
        result = RunResult(code if code is not None else 1, problem, steps=saved_steps(self._job))
        return ExperimentResult(calm, result, tuple(self._injected), missed_injections)

    def _wait_for_step(self, strike: Injection, steps: int) -> int | None:
        """Wait for the step of an injection; return the exit code if the job ended before."""
        job, step = self._job, strike.step(steps)
        last_injection = next(
            (result for result in reversed(self._injected) if result.is_new_life), None
        )

        def is_due() -> bool:
            return (
                job.highest >= step
                and bool(job.look())
                and (last_injection is None or job.newest() != last_injection.after)
                and is_ready(strike, job)
            )

        return job.until(is_due, self._patience_seconds)

    def _inject(self, strike: Injection) -> InjectionResult:
        job = self._job
        pids_before, events_before = {process.pid for process in job.look()}, len(job.facts())
        end_counts, reached_steps = [len(host.codes) for host in job.hosts], set(job.reached)
        struck = self._injector.strike(strike)
        struck = replace(struck, after=newest_intact(job.store))
        if struck.code == 0:
            return self._with_ends(struck, end_counts)
        began_seconds = self._clock.monotonic_seconds()
        if struck.code is not None:
            job.start()
        before_poll, problem = job.revive if len(job.hosts) > 1 else None, ""
        try:
            job.until(
                lambda: self._has_recovered(pids_before, struck, began_seconds),
                self._within_seconds,
                before_poll,
            )
        except JobFailed as error:
            problem = str(error)
        seconds = self._clock.monotonic_seconds() - began_seconds
        is_new_life = struck.is_new_life or bool(set(job.reached) - reached_steps)
        struck = replace(struck, seconds=seconds, is_new_life=is_new_life)
        struck = with_attempt_starts(
            struck, job.facts()[events_before:], has_hosts=len(job.hosts) > 1
        )
        struck = self._with_ends(struck, end_counts)
        # Read the code again, because ended hosts may be excused by now.
        code = job.code()
        return replace(struck, problem=problem or (f"it ended with {code}" if code else ""))

    def _has_recovered(self, old: set[int], struck: InjectionResult, began_seconds: float) -> bool:
        """Return whether all ranks progressed, in a new attempt or beyond their earlier steps."""
        ranks, step = self._job.look(), struck.step
        if not ranks or len(ranks) < self._job.ranks:
            return False
        if all(rank.pid not in old and rank.step >= 0 for rank in ranks):
            return True
        since_seconds = self._clock.monotonic_seconds() - began_seconds
        is_settled = (
            struck.strike.fault.kind is not FaultKind.CUT or since_seconds > _SETTLED_SECONDS
        )
        return is_settled and all(rank.pid in old and rank.step > step for rank in ranks)

    def _with_ends(self, struck: InjectionResult, before: Sequence[int]) -> InjectionResult:
        """Add the exits of agents since the injection; excuse hosts that need not return."""
        job, fault = self._job, struck.strike.fault
        if len(job.hosts) == 1:
            return struck
        codes = {host.number: host.code() for host in job.hosts}
        ends = tuple(
            HostEnd(host.number, code, correct_codes(fault, struck.host, host.number))
            for host, codes_before in zip(job.hosts, before, strict=True)
            for code in host.codes[codes_before:]
        )
        if 0 in codes.values():
            job.excused |= {
                end.host for end in ends if codes[end.host] == end.code and end.is_right
            }
        return replace(struck, ends=ends)


def with_attempt_starts(
    struck: InjectionResult, facts: Sequence[Mapping[str, str]], *, has_hosts: bool
) -> InjectionResult:
    """Return an injection with the start of the new attempt and the required start (pure).

    Args:
        struck: Known facts of the injection.
        facts: Events of rank 0 since the injection.
        has_hosts: Whether some hosts may have continued without another host meanwhile.
    """
    is_reconstructed = any(event["event"] == "CheckpointReconstructed" for event in facts)
    # An attempt cannot begin from a checkpoint that was damaged meanwhile.
    starts = began_from(facts, struck.after if struck.damaged else struck.before)
    if not starts:
        return replace(struck, is_reconstructed=is_reconstructed)
    # More attempts may follow as hosts come back. Report one that began from too old a checkpoint.
    too_old_starts = (
        attempt for attempt in starts if attempt[1] is not None and attempt[0] < attempt[1]
    )
    restored, due = next(too_old_starts, starts[0])
    return replace(
        struck, restored=restored, due=due if has_hosts else None, is_reconstructed=is_reconstructed
    )


def began_from(
    facts: Sequence[Mapping[str, str]], before: CheckpointId | None
) -> list[tuple[CheckpointId, CheckpointId | None]]:
    """Return the start of each resumed attempt, with the newest commit at that time (pure).

    Args:
        facts: Events of rank 0.
        before: Newest checkpoint committed before these events.
    """
    newest, parents = before, []
    for event in facts:
        checkpoint = parse_checkpoint(event.get("checkpoint", ""))
        if checkpoint is None:
            continue
        if event["event"] == "CheckpointRestored":
            parents.append((checkpoint, newest))
        elif event["event"] == "CheckpointCommitted":
            newest = checkpoint if newest is None else max(newest, checkpoint)
    return parents


CALM, STRUCK = "calm", "struck"
_DISK = "disk"
_REPOSITORY = "repository"
_DISK_BYTES_MIN = 16 << 20
_CALM_FACTOR = 20.0


@dataclass(frozen=True, slots=True)
class ChaosExperiment:
    """Settings of an experiment.

    Attributes:
        plan: The faults.
        seed: Seed for the choices that the plan leaves open.
        command: Arguments after `resilient train`.
        folder: Folder of both runs.
        within_seconds: Time for a job to continue after a fault.
        hosts: Number of hosts.
    """

    plan: ChaosPlan
    seed: int
    command: tuple[str, ...]
    folder: Path
    within_seconds: float = 600.0
    hosts: int = 1


def run_experiment(
    experiment: ChaosExperiment, clock: Clock, tell: Callable[[str], None]
) -> ExperimentResult:
    """Run the command undisturbed, then under the plan, and return the observations.

    After any exception, no started process continues and no disk stays mounted. If this process is
    killed, the run continues to its end, and a mounted disk stays.

    Args:
        experiment: Settings of the experiment; the plan must be feasible.
        clock: Clock for all waits.
        tell: Function that receives progress, one line at a time.

    Raises:
        ConfigError: The undisturbed run fails, shows no steps or saves nothing, or the folder
            has files that no experiment created.
    """
    clear(experiment.folder)
    with ExitStack() as cleanup:
        network = cleanup.enter_context(Network(experiment.hosts)) if experiment.hosts > 1 else None
        home, job_environment = experiment.folder / CALM, JobEnvironment(network=network)
        calm = Job(home, home / _REPOSITORY, (), experiment.command, clock, job_environment)
        cleanup.callback(calm.kill)
        began_seconds = clock.monotonic_seconds()
        tell("the run without faults")
        calm_result = measure(calm, _run_calm(calm))
        calm_seconds = clock.monotonic_seconds() - began_seconds
        tell(f"the run without faults: {calm_result.step} steps in {calm_seconds:.0f} s")
        repository = cleanup.enter_context(_place(experiment, calm))
        shifted_clock = (
            MovableClock(experiment.folder / STRUCK)
            if experiment.plan.has(FaultKind.CLOCK_SKEW)
            else None
        )
        job_environment = JobEnvironment(shifted_clock, network)
        options = _options(experiment)
        struck = Job(
            experiment.folder / STRUCK,
            repository,
            options,
            experiment.command,
            clock,
            job_environment,
        )
        cleanup.callback(struck.kill)
        patience_seconds = max(experiment.within_seconds, _CALM_FACTOR * calm_seconds)
        run = FaultedRun(struck, clock, experiment.within_seconds, patience_seconds)
        evidence = run.through(draw_injections(experiment.plan, experiment.seed), calm_result, tell)
        tell("comparing")
        final_result = examine(struck, evidence.ended, evidence.struck, calm_result, calm.store)
        return replace(evidence, ended=final_result)


def clear(folder: Path) -> None:
    """Remove the results of an earlier experiment in this folder, and nothing else.

    Raises:
        ConfigError: The folder has other files.
    """
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    for name in sorted(names - {CALM, STRUCK}):
        raise ConfigError(
            f"`{folder}` holds `{name}`, which no experiment created", hint="--folder ANOTHER"
        )
    for name in (CALM, STRUCK):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True)


def _run_calm(job: Job) -> RunResult:
    job.start()
    code = None
    while code is None:
        # Wait without a limit: only the user knows how long the script trains.
        code = job.until(lambda: False, float("inf"))
    newest = job.newest()
    if code:
        failed_output = next((host.output_path for host in job.hosts if host.code()), job.folder)
        raise ConfigError(
            f"the run without faults ended with {code}, so there is nothing to compare with",
            hint=f"tail {failed_output}",
        )
    if newest is None:
        raise ConfigError(
            "the run without faults saved nothing in the repository that `resilient train --repo` "
            "names",
            hint="resilient.Trainer saves there, and so does a Checkpointer without a URL",
        )
    if job.highest < 1:
        raise ConfigError(
            "the run without faults reported no steps, so no fault can be injected at a step",
            hint="resilient.Trainer reports steps; in your own loop call resilient.heartbeat",
        )
    return RunResult(code, step=newest.step, steps=saved_steps(job))


def _options(experiment: ChaosExperiment) -> list[str]:
    """Return options for the faulted run; the same options of the user come later and win."""
    restarts_max = str(sum(fault.count for fault in experiment.plan.faults) + 3)
    file = experiment.folder / STRUCK / NOTICE_FILE.format(host=HOST)
    notice = ["--notice", f"file:{file}"] if experiment.plan.has(FaultKind.NOTICE) else []
    # A host with many injected faults is not unhealthy, and the others must not leave it out.
    host_options = ["--max-host-failures", restarts_max] if experiment.hosts > 1 else []
    return ["--max-restarts", restarts_max, *host_options, *notice]


@contextmanager
def _place(experiment: ChaosExperiment, calm: Job) -> Iterator[Path]:
    """Yield the repository of the faulted run: on its own small disk if the plan fills it."""
    repository = experiment.folder / STRUCK / _REPOSITORY
    if not experiment.plan.has(FaultKind.DISK_FULL):
        yield repository
        return
    disk = experiment.folder / STRUCK / _DISK
    disk.mkdir()
    used_bytes = sum(path.stat().st_size for path in calm.repository.rglob("*") if path.is_file())
    try:
        problem = mount_small(disk, max(_DISK_BYTES_MIN, 4 * used_bytes))
        if problem:
            raise ConfigError(f"cannot mount a small disk at `{disk}`: {problem}")
        yield disk / _REPOSITORY
    finally:
        # Keep the content of the disk for an investigation of the run.
        if (disk / _REPOSITORY).is_dir():
            shutil.copytree(disk / _REPOSITORY, repository, dirs_exist_ok=True)
        if disk.is_mount():
            unmount(disk)
        disk.rmdir()


_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Terminated(BaseException):
    """A signal asked this process to end.

    Attributes:
        number: Number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def obeying_orders() -> Iterator[None]:
    """Raise a signal as an exception inside the block, and kill all started processes.

    A second signal does not disturb the cleanup. Signals ignored before (nohup) stay ignored. Main
    thread only.

    Raises:
        Terminated: SIGTERM, SIGINT or SIGHUP came.
    """
    previous_handlers = {order: signal.getsignal(order) for order in _STOP_SIGNALS}
    handled = [number for number, handler in previous_handlers.items() if handler != signal.SIG_IGN]

    def obey(number: int, _frame: object) -> NoReturn:
        for item in handled:
            signal.signal(item, lambda *_: None)
        raise Terminated(number)

    for item in handled:
        signal.signal(item, obey)
    try:
        yield
    except Terminated:
        # The signal may have come between the start of a process and its registration.
        for pid in children(os.getpid()):
            kill_all(pid)
        raise
    finally:
        for item in handled:
            signal.signal(item, previous_handlers[item])
