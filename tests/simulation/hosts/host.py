"""A host, and the processes of agents on it, one after the other."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters

from resilient.elastic.agent import ElasticAgent
from resilient.elastic.hang_detection import HangRule
from resilient.elastic.options import DaemonOptions, Timeouts, WorkerOptions
from resilient.elastic.rendezvous import connect as connect_module
from resilient.elastic.restart_controller import ProgressLog
from resilient.elastic.restart_policy import FailureLimits
from resilient.elastic.signals import StopInterrupt, StopSignals
from resilient.errors import PeerFailed, Preempted
from resilient.events import Emitter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from resilient.events import Event
    from tests.simulation.hosts.network import Place
    from tests.simulation.hosts.ranks import Rank
    from tests.simulation.hosts.storm import HostStorm
    from tests.simulation.loop import Task

PATIENCE = Timeouts(
    interval_seconds=0.5,
    grace_seconds=6.0,
    survivor_seconds=1.0,
    barrier_seconds=40.0,
    hang=HangRule(fixed_seconds=25.0, patience_seconds=40.0),
    limits=FailureLimits(no_progress_lives_max=0, host_failures_max=0),
)
RESTARTS = 50
JOIN_SECONDS = 90.0
_CONF = {
    "join_timeout": int(JOIN_SECONDS),
    "last_call_timeout": 3,
    "close_timeout": 10,
    "heartbeat_timeout": 5,
    "keep_alive_interval": 3,
    "keep_alive_max_attempt": 3,
}


class SimStops(StopSignals):
    """The agent's own, told by the storm rather than by the kernel."""

    @contextmanager
    def listening(self, heard: Sequence[int] | None = None) -> Iterator[None]:
        """Hear nothing from the kernel."""
        del heard
        yield


class Process:
    """One agent, from its start to its end.

    Attributes:
        signals: that it has not heard yet; it does where its main thread waits.
        places: stores that it serves.
        code: what it ended with; None while it runs, or when it was killed.
        began_seconds: when it was started; ``ended_seconds``: when it ended, also when killed.
        was_in: whether ranks of it ever ran.
    """

    def __init__(self, storm: HostStorm, host: Host) -> None:
        self.storm, self.host = storm, host
        self.tasks: list[Task] = []
        self.signals: list[int] = []
        self.places: list[Place] = []
        self.told: list[Event] = []
        self.code: int | None = None
        self.is_over = self.is_asked = self.was_in = False
        self.began_seconds, self.ended_seconds = storm.loop.now_seconds, float("inf")
        self.stops = SimStops(storm.time, PATIENCE.grace_seconds)
        self.main_task = storm.loop.spawn(host.name, self._main, self)

    def heard(self, number: int) -> None:
        """Hear a signal, in the main thread."""
        self.stops._handle_signal(number, None)

    def end(self) -> None:
        """Be no more: what it served ends with it, and so do its threads and ranks."""
        if self.is_over:
            return
        self.is_over, self.ended_seconds = True, self.storm.loop.now_seconds
        for place in self.places:
            place.close()
        for rank in self.host.ranks:
            rank.signal(signal.SIGKILL)
        for task in self.tasks:
            if task is not self.storm.loop.current:
                self.storm.loop.kill(task)
        self.storm.loop.changed()

    def _main(self) -> None:
        try:
            self.code = self._supervise()
        finally:
            self.end()
        self.storm.watcher.ended(self)

    def _supervise(self) -> int:
        try:
            with self.stops.interrupting():
                handler = connect_module.connect(self._parameters())
        except RendezvousError:
            return PeerFailed.exit_code
        except StopInterrupt:
            return Preempted.exit_code
        spec = WorkerSpec(
            role="default",
            local_world_size=1,
            entrypoint="python",
            args=("train.py",),
            rdzv_handler=handler,
            max_restarts=RESTARTS,
            local_addr=self.host.name,
        )
        storm, held = self.storm, self.storm.repository
        wishes = WorkerOptions(
            notes=f"/nonexistent/{self.host.name}-{id(self)}",
            keeper=DaemonOptions(-1),
            is_warm=False,
        )
        emit = Emitter(storm.time, (self._hear,))
        progress = ProgressLog(lambda _: held.step)
        agent = ElasticAgent(spec, wishes, PATIENCE, progress, storm.time, emit)
        patience_seconds = JOIN_SECONDS if storm.plan.waits_for_comeback else 0.0
        connect = partial(connect_module.connect, self._parameters())
        agent.reconnect = connect_module.RendezvousReconnect(connect, patience_seconds)
        return agent.supervise(self.stops).code

    def _parameters(self) -> RendezvousParameters:
        plan = self.storm.plan
        conf = _CONF | {"is_host": str(self.host.serves).lower()}
        conf.pop("heartbeat_timeout")
        return RendezvousParameters(
            "sim", self.host.name, "run", plan.nodes_min, plan.nodes_max, self.host.name, **conf
        )

    def _hear(self, _record: Any, event: Event) -> None:
        self.told.append(event)
        self.storm.watcher.told(self, event)


class Host:
    """A machine.

    Attributes:
        skew_seconds: of its time of day.
        uptime_seconds: at the beginning; its monotonic clock counts from there.
        serves: whether the rendezvous is served here.
        slow_seconds: what each message takes longer on its link.
        thawed_seconds: until when it stood still last.
    """

    def __init__(self, storm: HostStorm, name: str, *, serves: bool) -> None:
        self.storm, self.name, self.serves = storm, name, serves
        self.is_up, self.is_cut = True, False
        self.slow_seconds = self.thawed_seconds = 0.0
        self.skew_seconds = storm.draw.choice((0.0, 0.0, 3600.0, -3600.0, 2.0))
        self.uptime_seconds = storm.draw.uniform(10.0, 1e6)
        self.processes: list[Process] = []
        self.ranks: list[Rank] = []

    @property
    def process(self) -> Process | None:
        """The agent that runs here now."""
        last = self.processes[-1] if self.processes else None
        return None if last is None or last.is_over else last

    @property
    def is_well(self) -> bool:
        """Whether it is there and reached."""
        return self.is_up and not self.is_cut

    def start(self) -> None:
        """Start an agent, unless one runs."""
        if self.is_up and self.process is None:
            self.processes.append(Process(self.storm, self))

    def die(self) -> None:
        """Lose power."""
        self.is_up = False
        if self.process:
            self.process.end()
        self.storm.loop.changed()

    def come_back(self) -> None:
        """Boot, and start an agent."""
        self.is_up, self.is_cut, self.slow_seconds = True, False, 0.0
        self.storm.loop.changed()
        self.start()

    def freeze(self, seconds: float) -> None:
        """Stand still, agent and ranks together."""
        self.thawed_seconds = self.storm.loop.now_seconds + seconds
        if self.process:
            for task in self.process.tasks:
                self.storm.loop.freeze(task, seconds)
