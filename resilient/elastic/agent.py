"""Elastic agent of one host, which runs attempts until the restart policy ends the run.

An attempt is one start of all workers. torch provides the rendezvous and assigns the ranks. This
package starts, monitors and stops the workers and decides on restarts. The agent loop of torch is
not used, because it loses exit codes, waits 30 s for survivors, leaves orphans, and ends at
SIGUSR1.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    SimpleElasticAgent,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.api import WorkerGroup as TorchGroup
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
)

from resilient.elastic.attempt_monitor import AttemptMonitor, MonitorContext
from resilient.elastic.events import (
    AttemptEnded,
    GroupRestarted,
    RunAborted,
    RunEnded,
    WorkerGroupStarted,
    failure_event,
)
from resilient.elastic.health_monitor import HealthMonitor
from resilient.elastic.outcome import CODE_PREEMPTED, Outcome, OutcomeKind
from resilient.elastic.rendezvous.attempt import Attempt, AttemptRegistry, HostEnv, worker_environ
from resilient.elastic.rendezvous.connect import NO_RECONNECT
from resilient.elastic.rendezvous.leave import (
    exit_reason,
    leave_rendezvous,
    leave_round,
    outcome_of_closed,
)
from resilient.elastic.rendezvous.membership import ExitBarrier, MembershipWatch
from resilient.elastic.rendezvous.remote_hangs import PeerHangExchange
from resilient.elastic.rendezvous.roster import Roster
from resilient.elastic.restart_controller import RestartController
from resilient.elastic.restart_policy import (
    Action,
    Finish,
    GiveUp,
    LeaveHost,
    Restart,
    name_command,
)
from resilient.elastic.run_dir import AgentDirectory
from resilient.elastic.saver_daemon import DaemonSupervisor
from resilient.elastic.signals import StopInterrupt, StopSignals
from resilient.elastic.worker_logs import WorkerLogCapture
from resilient.elastic.workers.build_locks import remove_dead_locks
from resilient.elastic.workers.fork_server_client import ForkServer
from resilient.elastic.workers.group import WorkerCommand, WorkerGroup
from resilient.errors import PeerFailed

if TYPE_CHECKING:
    from resilient.clock import Clock
    from resilient.elastic.options import Timeouts, WorkerOptions
    from resilient.elastic.restart_controller import ProgressLog
    from resilient.elastic.worker_errors import WorkerFailure
    from resilient.events import Emitter

_CODE_HOST_UNHEALTHY = 71

PeriodicCallback = Callable[[Path], None]
_Leaving = Finish | LeaveHost | GiveUp


class ElasticAgent(SimpleElasticAgent):
    """Agent that keeps the workers of this host running and exits with a meaningful code.

    Args:
        spec: Group description of torch; ``entrypoint`` and ``args`` are the worker command.
        options: Options passed to every worker.
        patience: Timeouts of the agent.
        progress: Checkpoint progress of the repository, for crash-loop detection.
        clock: Clock for all waits.
        emit: Listener for events.

    Attributes:
        reconnect: Policy for a lost node that served the rendezvous: wait for the node or not.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        options: WorkerOptions,
        patience: Timeouts,
        progress: ProgressLog,
        clock: Clock,
        emit: Emitter,
    ) -> None:
        super().__init__(spec)
        self.reconnect = NO_RECONNECT
        self._worker_options, self._timeouts = options, patience
        self._progress = progress
        self._clock, self._emit = clock, emit
        self._stops = StopSignals(clock, patience.grace_seconds)
        self._registry = AttemptRegistry(spec.rdzv_handler.get_run_id(), clock)
        resume_command = name_command(options.resume)
        self._restart_controller = RestartController(
            spec, patience.limits, progress, clock, emit, resume_command
        )
        self._directory = AgentDirectory(options.notes)
        self._folder = self._directory.path
        self._daemon_supervisor = DaemonSupervisor(
            self._folder, options.keeper, patience.grace_seconds, emit
        )
        self._health = HealthMonitor(self._folder, patience.hang, clock, emit)
        self._fork_server = ForkServer(self._folder, emit, is_on=options.is_warm)
        self._outputs = WorkerLogCapture(options.log_dir, self._folder, clock)
        self._cause, self._number = "start", 0
        self._callbacks: tuple[PeriodicCallback, ...] = ()
        self._stop_seconds = self._rendezvous_seconds = 0.0
        self._attempt: Attempt | None = None
        self._roster = Roster(spec.rdzv_handler, None, emit)
        self._workers: WorkerGroup | None = None

    def supervise(
        self, stops: StopSignals | None = None, callbacks: tuple[PeriodicCallback, ...] = ()
    ) -> _Leaving:
        """Run the group to its end and return the decision that ends the run.

        Main thread only, because the agent handles signals, and the kernel kills the workers when
        this thread ends.

        Args:
            stops: Signal handler that was active before this agent existed.
            callbacks: Functions called regularly while workers run, each with the agent's folder.
        """
        self._stops, self._callbacks = stops or self._stops, callbacks
        try:
            with self._stops.listening():
                action = self._run_attempts()
                stop_arguments = self._stops, self._clock, self._timeouts.grace_seconds
                is_continued_without = leave_rendezvous(
                    self._worker_group, self._roster, action, *stop_arguments
                )
        finally:
            self._shutdown()
            self._fork_server.stop()
            self._daemon_supervisor.stop(self._stops.left_seconds())
            self._directory.remove()
        if is_continued_without:
            leave_round(self._worker_group.spec.rdzv_handler)
        event_class = RunEnded if isinstance(action, Finish) else RunAborted
        self._emit(event_class(exit_code=action.code, reason=action.reason))
        return action

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:  # noqa: ARG002 - torch's signature
        """Run :meth:`supervise` through the interface of torch's agents."""
        action = self.supervise()
        is_done = isinstance(action, Finish) and action.code == 0
        return RunResult(state=WorkerState.SUCCEEDED if is_done else WorkerState.FAILED)

    def _run_attempts(self) -> _Leaving:
        while True:
            self._number += 1
            outcome, failures = self._run_attempt()
            outcome = self._restart_controller.with_late_stop_request(outcome, self._stops)
            nodes = self._worker_group.group_world_size
            action = self._restart_controller.after(outcome, nodes, self._stops.request)
            if failures:
                self._report(failures, action)
            if not isinstance(action, Restart):
                return action
            self._cause = action.cause
            restarts_left, took_seconds = self._restart_controller.restarts_left, self._stop_seconds
            self._emit(GroupRestarted(action.cause, self._number + 1, restarts_left, took_seconds))
            if not self._stops.wait(action.delay_seconds):
                reason = f"asked to stop during a wait: {self._restart_controller.again} resumes"
                return Finish(CODE_PREEMPTED, reason)

    def _run_attempt(self) -> tuple[Outcome, list[WorkerFailure]]:
        """Run one attempt: join the rendezvous, start the workers, watch and stop them."""
        group = self._worker_group
        try:
            self._daemon_supervisor.start()
            self._initialize_workers(group)
        except StopInterrupt:
            return Outcome(OutcomeKind.STOPPED, -signal.SIGTERM, self._stops.asked_by), []
        except (RendezvousClosedError, RendezvousGracefulExitError) as error:
            has_run_before, handler = self._number > 1, group.spec.rdzv_handler
            return outcome_of_closed(handler, error, has_run_before=has_run_before), []
        except (RendezvousError, dist.DistError, PeerFailed) as error:
            return _unreachable(error, self._roster), []
        except OSError as error:
            return Outcome(OutcomeKind.FAILED, _CODE_HOST_UNHEALTHY, reason=str(error)), []
        try:
            outcome, failures = self._watch()
        finally:
            self._stop_workers(group)
        attempt, step = _name_of(self._attempt), self._health.last_step()
        self._emit(
            AttemptEnded(self._number, attempt, outcome.kind.value, step, self._stop_seconds)
        )
        is_rejoining = outcome.kind is OutcomeKind.UNREACHABLE and self.reconnect.is_wanted
        return (Outcome(OutcomeKind.REGROUPED) if is_rejoining else outcome), failures

    def _watch(self) -> tuple[Outcome, list[WorkerFailure]]:
        # torch sets its attributes outside the constructor, so their declared types are None.
        group: Any = self._worker_group
        assert self._workers is not None, "set when watching starts"  # noqa: S101
        clock, patience = (
            self._clock,
            self._timeouts.adjusted_for_daemon(has_daemon=bool(self._daemon_supervisor.path)),
        )
        handler, nodes = group.spec.rdzv_handler, group.group_world_size
        self._roster = Roster(handler, group.store, self._emit)
        members = MembershipWatch(handler, patience.interval_seconds, clock, self._roster)
        barrier = ExitBarrier(group.store, group.group_rank, nodes, clock, patience.barrier_seconds)
        stops, notes, attempt = self._stops, self._worker_options.notes, _name_of(self._attempt)
        peer_hangs = PeerHangExchange(
            group.store, group.group_rank, nodes, attempt, clock, self._emit
        )
        run_periodic_work = partial(
            _run_periodic_work, self._fork_server, self._callbacks, self._folder
        )
        sources = (stops, members, barrier, self._health, peer_hangs)
        monitor_context = MonitorContext(
            *sources, patience, clock, self._emit, run_periodic_work, notes, attempt, nodes
        )
        watch = AttemptMonitor(self._workers, monitor_context)
        members.start()
        peer_hangs.start()
        try:
            return watch.observe(), watch.failures
        finally:
            self._stop_seconds = watch.stop_seconds
            peer_hangs.stop()
            members.stop()
            self._roster.report_lost(members.lost)

    def _report(self, failures: list[WorkerFailure], action: Action) -> None:
        follows = _describe_action(action, self._number + 1, self._restart_controller.restarts_left)
        self._emit(failure_event(failures, self._number, self._progress.describe(), follows))

    def _rendezvous(self, worker_group: TorchGroup) -> None:
        began_seconds = self._clock.monotonic_seconds()
        with self._stops.interrupting():
            self.reconnect.join_with_retries(
                worker_group.spec, partial(self._join, worker_group), self._emit
            )
        self._rendezvous_seconds = self._clock.monotonic_seconds() - began_seconds

    def _join(self, worker_group: TorchGroup) -> None:
        super()._rendezvous(worker_group)
        if self._roster.is_of(worker_group.spec.rdzv_handler):
            self._restart_controller.excuse_lost_nodes(self._roster.report_missing())
        number, cause, resume = self._number, self._cause, self._worker_options.resume
        self._attempt = self._registry.agree(worker_group, number, cause, resume)

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        assert self._attempt is not None, "set by the rendezvous"  # noqa: S101
        self._daemon_supervisor.ready()
        remove_dead_locks(os.environ, self._clock, self._emit)
        ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        self._outputs.begin(self._attempt.attempt, self._attempt.cause, ranks)
        commands = [self._command(worker_group, worker) for worker in worker_group.workers]
        self._health.begin(ranks)
        began_seconds = self._clock.monotonic_seconds()
        self._workers = WorkerGroup(commands, self._clock, self._fork_server)
        self._emit(
            WorkerGroupStarted(
                life=self._number,
                attempt=self._attempt.attempt,
                cause=self._attempt.cause,
                world_size=worker_group.workers[0].world_size,
                local_world_size=len(commands),
                nodes=worker_group.group_world_size,
                is_warm=self._workers.is_warm,
                met_seconds=self._rendezvous_seconds,
                start_seconds=self._clock.monotonic_seconds() - began_seconds,
            )
        )
        self._fork_server.keep(commands[0])
        return dict(self._workers.pids)

    def _command(self, worker_group: TorchGroup, worker: Any) -> WorkerCommand:
        assert self._attempt is not None, "set by the rendezvous"  # noqa: S101
        spec = worker_group.spec
        error_file = self._folder / f"{self._number}-{worker.local_rank}.json"
        host = HostEnv(self._daemon_supervisor.path, self._timeouts.grace_seconds)
        environ = worker_environ(
            os.environ, worker_group, worker, self._attempt, self._worker_options, host
        )
        return WorkerCommand(
            rank=worker.global_rank,
            local_rank=worker.local_rank,
            argv=(str(spec.entrypoint), *map(str, spec.args)),
            environ={
                **environ,
                **self._fork_server.import_log_environ(worker.local_rank),
                **self._outputs.pipe_environ(worker.local_rank),
                "TORCHELASTIC_ERROR_FILE": str(error_file),
            },
            error_file=error_file,
        )

    def _stop_workers(self, worker_group: TorchGroup) -> None:  # noqa: ARG002 - torch's signature
        self._shutdown()

    def _monitor_workers(self, worker_group: TorchGroup) -> RunResult:  # noqa: ARG002 - see above
        return RunResult(state=_state_of(self._workers))

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None
    ) -> None:
        del death_sig
        workers, self._workers = self._workers, None
        if workers is None:
            return
        if workers.is_running:
            patience = self._timeouts.adjusted_for_daemon(
                has_daemon=bool(self._daemon_supervisor.path)
            )
            workers.stop(patience.survivor_seconds if timeout is None else timeout)
        workers.close()
        self._outputs.end()


def _run_periodic_work(
    fork_server: ForkServer, callbacks: tuple[PeriodicCallback, ...], notes: Path
) -> None:
    fork_server.keep()
    for callback in callbacks:
        callback(notes)


def _unreachable(error: Exception, roster: Roster) -> Outcome:
    roster.report_silent_nodes()
    reason = f"no rendezvous with the other nodes: {exit_reason(error)}"
    return Outcome(OutcomeKind.UNREACHABLE, reason=reason)


def _name_of(attempt: Attempt | None) -> str:
    return attempt.attempt if attempt else ""


def _state_of(workers: WorkerGroup | None) -> WorkerState:
    if workers is None:
        return WorkerState.STOPPED
    workers.wait(0)
    if any(exit_.status for exit_ in workers.exits):
        return WorkerState.FAILED
    return WorkerState.HEALTHY if workers.is_running else WorkerState.SUCCEEDED


def _describe_action(action: Action, number: int, restarts_left: int) -> str:
    if not isinstance(action, Restart):
        return f"exit {action.code}"
    delay = f" in {action.delay_seconds:.1f} s" if action.delay_seconds else ""
    return f"restart as attempt {number}{delay}, {restarts_left} restarts left"
