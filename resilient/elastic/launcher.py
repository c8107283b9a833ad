"""Construction of the agent of ``resilient train`` from its options, and the start of the agent.

This module is the composition root: only this module imports all parts of the agent.
"""

from __future__ import annotations

import os
import socket
import sys
import uuid
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.clock import SystemClock
from resilient.distributed.launch_env import read_published_repository
from resilient.distributed.start_identity import new_start
from resilient.elastic.events import (
    AgentStarted,
    LaunchCountUnknown,
    ResumeOptionRepeated,
    RunEnded,
)
from resilient.elastic.metrics.collector import Metrics
from resilient.elastic.options import DaemonOptions, MetricsOptions, Timeouts, WorkerOptions
from resilient.elastic.preemption.factory import choose_sources
from resilient.elastic.preemption.watcher import Watcher
from resilient.elastic.restart_controller import (
    ProgressLog,
    ProgressState,
    count_runs,
    newest_committed,
)
from resilient.elastic.run_dir import EventFile, make_folder
from resilient.elastic.saver_daemon import resolve_memory_limit
from resilient.elastic.signals import StopInterrupt, StopSignals
from resilient.errors import ConfigError, PeerFailed, Preempted, ResilientError
from resilient.events import Emitter, console

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous import RendezvousHandler

    from resilient.elastic.agent import ElasticAgent, PeriodicCallback

_STATIC_PORT = 29500
# Default port of torch.
_C10D_PORT = 29400
_READ_SECONDS = 60
# A metadata server that never answers delays the first worker by this much.
_FIRST_POLLS_SECONDS = 3.0
_CONNECT_POLL_SECONDS = 0.2
_BOOTSTRAP = Path(__file__).parent / "workers" / "bootstrap.py"


@dataclass(frozen=True, slots=True)
class RendezvousOptions:
    """Rendezvous of the nodes; the option names are those of torchrun.

    Attributes:
        nnodes: ``N`` or ``MIN:MAX``.
        backend: ``c10d``, ``static`` or another backend of torch.
        endpoint: ``host:port``.
        run_id: Id of the job, the same on every node and different for every job.
        conf: ``key=value,key=value``.
        standalone: Whether the run has one node and no rendezvous.
        node_rank: Rank of this node, for ``static``.
        master_addr: Address of the first node, for ``static``.
        master_port: Port of the first node, for ``static``.
        local_addr: Address of this node as seen by the others.
    """

    nnodes: str = "1"
    backend: str = "c10d"
    endpoint: str = ""
    run_id: str = ""
    conf: str = ""
    standalone: bool = False
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    local_addr: str = ""


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """Options of ``resilient train``.

    Attributes:
        target: Script, or module name if ``is_module``.
        arguments: Arguments of the script, unchanged.
        is_module: Whether ``target`` is a module name.
        is_program: Whether ``target`` is an executable and not Python.
        nproc_per_node: Workers of this host: a number, ``cpu``, ``gpu`` or ``auto``.
        max_restarts: Restarts after failures.
        rendezvous: Rendezvous of the nodes.
        patience: Timeouts of the agent.
        wishes: Options passed to the workers.
        host_bytes_max: Memory of this host for staged bytes. With 0, the default, the agent chooses
            by the machine; a negative number disables the saver daemon.
        notice: Sources of preemption notices; see
            :func:`resilient.elastic.preemption.factory.choose_sources`.
        metrics: Destinations of the Prometheus metrics.
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    is_program: bool = False
    nproc_per_node: str = "1"
    max_restarts: int = 3
    rendezvous: RendezvousOptions = field(default_factory=RendezvousOptions)
    patience: Timeouts = field(default_factory=Timeouts)
    wishes: WorkerOptions = field(default_factory=WorkerOptions)
    host_bytes_max: int = 0
    notice: str = "off"
    metrics: MetricsOptions = field(default_factory=MetricsOptions)


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Options with all defaults resolved.

    Attributes:
        command: Command of each worker.
        nproc: Number of workers of this host.
        nodes_min: Smallest number of nodes to train with.
        nodes_max: Largest number of nodes.
        backend: Backend of the rendezvous.
        endpoint: Endpoint of the rendezvous.
        run_id: Id of the job.
        conf: Settings of the rendezvous.
        local_addr: Address of this node; empty lets torch choose.
        is_alone: Whether the run has this node only.
    """

    command: tuple[str, ...]
    nproc: int
    nodes_min: int
    nodes_max: int
    backend: str
    endpoint: str
    run_id: str
    conf: dict[str, Any]
    local_addr: str
    is_alone: bool = False


def resolve(options: TrainOptions) -> LaunchPlan:
    """Return the plan for ``options``; imports torch only to count processors or devices.

    Raises:
        ConfigError: An option is malformed or contradicts another.
    """
    rendezvous = options.rendezvous
    nodes_min, nodes_max = _parse_nnodes(rendezvous.nnodes)
    is_alone = _is_alone(rendezvous)
    if is_alone and nodes_max > 1:
        raise ConfigError(
            f"--standalone contradicts --nnodes {rendezvous.nnodes}",
            hint="omit --standalone and give --rdzv-endpoint HOST:PORT",
        )
    conf: dict[str, Any] = _parse_conf(rendezvous.conf)
    if rendezvous.backend == "static":
        conf["rank"] = rendezvous.node_rank
    kind = ("-m",) if options.is_module else ("--exec",) if options.is_program else ()
    return LaunchPlan(
        command=("-u", str(_BOOTSTRAP), *kind, options.target, *options.arguments),
        nproc=_count_workers(options.nproc_per_node),
        nodes_min=nodes_min,
        nodes_max=nodes_max,
        backend="c10d" if is_alone else rendezvous.backend,
        endpoint="localhost:0" if is_alone else _endpoint(rendezvous),
        run_id=rendezvous.run_id or (uuid.uuid4().hex[:12] if is_alone else "none"),
        conf={"timeout": 900, **conf},
        # Inside a container the host name may not resolve.
        local_addr=rendezvous.local_addr or ("127.0.0.1" if is_alone else ""),
        is_alone=is_alone,
    )


def build_agent(
    options: TrainOptions,
    stops: StopSignals,
    emit: Emitter,
    wait_first_polls: Callable[[], None],
) -> ElasticAgent:
    """Return the agent of this host, connected to the rendezvous and ready to supervise.

    The sources of notices are polled while this function imports torch, so ``wait_first_polls``
    usually returns at once.

    Raises:
        ConfigError: An option is malformed, contradicts another, or asks for more memory than
            this host has.
        PeerFailed: The rendezvous cannot be reached.
        StopInterrupt: ``stops`` received a signal meanwhile.
    """
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from resilient.elastic.agent import ElasticAgent
    from resilient.elastic.rendezvous.connect import RendezvousReconnect

    plan = resolve(options)
    loopback_address = "127.0.0.1" if plan.nodes_max == 1 else ""
    daemon = resolve_memory_limit(
        DaemonOptions(options.host_bytes_max, loopback_address, plan.nproc)
    )
    with stops.interrupting():
        wait_first_polls()
        handler = _connect_in_thread(plan)
    spec = WorkerSpec(
        role="default",
        local_world_size=plan.nproc,
        entrypoint=sys.executable,
        args=plan.command,
        rdzv_handler=handler,
        max_restarts=options.max_restarts,
        monitor_interval=options.patience.interval_seconds,
        local_addr=plan.local_addr or None,
    )
    worker_options = replace(
        options.wishes,
        keeper=daemon,
        notes=str(make_folder()),
        start=new_start(os.environ, options.rendezvous.run_id),
    )
    emit = emit.bind(run=plan.run_id)

    is_counted = options.patience.limits.preemptions_max is not None and worker_options.repo
    runs = count_runs(worker_options.repo, worker_options.storage_options) if is_counted else 0
    if runs is None:
        emit(LaunchCountUnknown())
    if worker_options.resume != "auto":
        emit(ResumeOptionRepeated(worker_options.resume, worker_options.start.job))

    def ask(within_seconds: float) -> object:
        url = worker_options.repo or read_published_repository(worker_options.notes)
        if not url:
            return ProgressState.URL_UNKNOWN
        return newest_committed(url, worker_options.storage_options, within_seconds)

    progress = ProgressLog(ask, runs or 0)
    agent = ElasticAgent(spec, worker_options, options.patience, progress, SystemClock(), emit)
    if not plan.is_alone:
        join_seconds = float(plan.conf.get("join_timeout", 0))
        agent.reconnect = RendezvousReconnect(partial(_connect_in_thread, plan), join_seconds)
    return agent


def run_agent(options: TrainOptions, signals: list[int] | None = None) -> int:
    """Run the job of this host to its end and return the exit code. Main thread only.

    The function handles signals before it imports torch, and then the signals in ``signals``. A
    stop at that point loses no work, and the same command can be run again. A stop also ends a wait
    for the rendezvous.

    Raises:
        ConfigError: An option is malformed or contradicts another.
        PeerFailed: The rendezvous cannot be reached.
    """
    clock, grace_seconds = SystemClock(), options.patience.grace_seconds
    metrics = Metrics(options.metrics, options.wishes.events, grace_seconds, clock)
    file = EventFile(options.wishes.events)
    context = {"agent": f"{socket.gethostname()}:{os.getpid()}"}
    emit = Emitter(clock, (console(), file, metrics.record_event), context)
    emit(AgentStarted())
    stops = StopSignals(clock, grace_seconds)
    sources = choose_sources(options.notice, os.environ, clock)
    watcher = Watcher(sources, stops, clock, emit, grace_seconds)
    with stops.listening(signals), metrics.running(emit):
        watcher.start()
        try:
            code = _supervise(
                options, stops, watcher, emit, (metrics.record_agent_alive, file.check_event_folder)
            )
        finally:
            watcher.close()
    if code in (0, Preempted.exit_code):
        watcher.acknowledge()
    return code


def _supervise(
    options: TrainOptions,
    stops: StopSignals,
    watcher: Watcher,
    emit: Emitter,
    callbacks: tuple[PeriodicCallback, ...],
) -> int:
    try:
        with stops.interrupting():
            _check_resume(options, emit)
        wait_first_polls = partial(watcher.wait_first_polls, _FIRST_POLLS_SECONDS)
        agent = build_agent(options, stops, emit, wait_first_polls)
    except StopInterrupt:
        reason = "stopped before the first attempt: the same command starts the run"
        emit(RunEnded(Preempted.exit_code, reason))
        return Preempted.exit_code
    return agent.supervise(stops, callbacks).code


def _check_resume(options: TrainOptions, emit: Emitter) -> None:
    """Refuse a ``--resume`` that the workers would refuse, before torch is imported."""
    resume_option = options.wishes.resume
    if resume_option in ("auto", "never") or not _is_alone(options.rendezvous):
        return
    from resilient.elastic.resume_check import check_resume

    try:
        check_resume(options.wishes, new_start(os.environ, options.rendezvous.run_id))
    except ResilientError as error:
        emit(
            RunEnded(
                error.exit_code, f"`--resume {resume_option}` was refused, no worker was started"
            )
        )
        raise


def _connect_in_thread(plan: LaunchPlan) -> RendezvousHandler:
    """Connect in a thread, because torch's wait for a late first node blocks signal handling."""
    # Threads of the pool are daemons, so a waiting thread does not delay the exit.
    pool = ThreadPool(1)
    try:
        result = pool.apply_async(_connect_rendezvous, (plan,))
        # A signal just before a wait, or in another thread, does not end the wait. The handler
        # runs between two short waits.
        while not result.ready():
            result.wait(_CONNECT_POLL_SECONDS)
        return result.get()
    finally:
        pool.close()


def _connect_rendezvous(plan: LaunchPlan) -> RendezvousHandler:
    if plan.is_alone:
        from resilient.elastic.rendezvous.single_node import SingleNodeRendezvous

        return SingleNodeRendezvous(plan.run_id, plan.local_addr)
    # A shared rendezvous store breaks scaling up in torch 2.13; each attempt serves its own store.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters

    from resilient.elastic.rendezvous.connect import connect
    from resilient.elastic.rendezvous.roster import limit_silence_toward

    parameters = RendezvousParameters(
        backend=plan.backend,
        endpoint=plan.endpoint,
        run_id=plan.run_id,
        min_nodes=plan.nodes_min,
        max_nodes=plan.nodes_max,
        local_addr=plan.local_addr or None,
        **plan.conf,
    )
    try:
        handler = connect(parameters)
    except RendezvousError as error:
        raise PeerFailed(
            f"cannot reach the rendezvous at `{plan.endpoint}`: {error}",
            hint="check --rdzv-endpoint, and that the first node is up",
        ) from error
    except ValueError as error:
        raise ConfigError(f"cannot set up the rendezvous `{plan.backend}`: {error}") from error
    if plan.backend == "c10d":
        port = plan.endpoint.rpartition(":")[2] if ":" in plan.endpoint else _C10D_PORT
        seconds = parameters.get_as_int("read_timeout", _READ_SECONDS) or _READ_SECONDS
        limit_silence_toward(int(port), seconds)
    return handler


def _is_alone(rendezvous: RendezvousOptions) -> bool:
    """Return whether the run has this host only, and no rendezvous."""
    is_one = _parse_nnodes(rendezvous.nnodes)[1] == 1
    return rendezvous.standalone or (
        is_one and not rendezvous.endpoint and rendezvous.backend == "c10d"
    )


def _endpoint(rendezvous: RendezvousOptions) -> str:
    if rendezvous.endpoint:
        return rendezvous.endpoint
    if rendezvous.backend == "static":
        return f"{rendezvous.master_addr}:{rendezvous.master_port or _STATIC_PORT}"
    raise ConfigError(
        "several nodes need a rendezvous endpoint",
        hint="give --rdzv-endpoint HOST:PORT, the same on every node",
    )


def _parse_nnodes(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if low.isdecimal() and (high or low).isdecimal():
        nodes_min, nodes_max = int(low), int(high or low)
        if 0 < nodes_min <= nodes_max:
            return nodes_min, nodes_max
    raise ConfigError(f"--nnodes {text!r} is not N or MIN:MAX")


def _parse_conf(text: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    for name, equals, _ in pairs:
        if not name.strip() or not equals:
            raise ConfigError(f"--rdzv-conf {text!r} is not key=value,key=value")
    return {name.strip(): value.strip() for name, _, value in pairs}


def _count_workers(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    if text not in ("cpu", "gpu", "auto"):
        raise ConfigError(f"--nproc-per-node {text!r} is not a number, cpu, gpu or auto")
    from torch.distributed.run import determine_local_world_size

    try:
        return int(determine_local_world_size(text))
    except ValueError as error:
        raise ConfigError(f"--nproc-per-node {text}: {error}") from error
