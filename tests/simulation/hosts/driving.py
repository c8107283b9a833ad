"""Puts virtual time, threads and processes where the agent and torch take the real ones."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server import api as server
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    api,
    c10d_rendezvous_backend,
    dynamic_rendezvous,
    registry,
    utils,
)

from resilient.elastic import agent, attempt_monitor, worker_errors
from resilient.elastic.hang_detection import LearnedDeadlines, RankStatus, find_hang, host_status_of
from resilient.elastic.outcome import Evidence
from resilient.elastic.rendezvous import attempt, connect, membership, remote_hangs, roster
from resilient.elastic.worker_errors import WorkerError
from tests.simulation.hosts.network import SILENCE_SECONDS, Client, Place, Prefixed
from tests.simulation.hosts.ranks import SimGroup

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resilient.elastic.hang_detection import Hang
    from tests.simulation.hosts.storm import HostStorm

_TICK_SECONDS = 0.5
_SHARING = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class SimHealth:
    """The signs of simulated ranks, judged by the library's rules."""

    def __init__(self, storm: HostStorm, rule: Any, clock: Any) -> None:
        self.host_status: Any = None
        self._storm, self._rule, self._clock = storm, rule, clock
        self._ranks: dict[int, int] = {}
        self._last = -1

    def begin(self, ranks: Any) -> None:
        self.host_status, self._last = None, -1
        self._ranks = dict(ranks)

    def look(self, pids: Any, running: Any, _is_over_elsewhere: Any) -> Hang | None:
        here = [self._storm.ranks[pid] for pid in pids.values()]
        self._last = max((one.step for one in here), default=-1)
        now_seconds = self._clock.monotonic_seconds()
        vitals = [RankStatus(one.rank, one.signs, one.state) for one in here if one.rank in running]
        self.host_status = host_status_of(vitals, LearnedDeadlines(), self._rule, now_seconds)
        return find_hang(vitals, LearnedDeadlines(), self._rule, now_seconds)

    def count_hang(self) -> None:
        """Learn nothing."""

    def stacks(self, _pids: Any) -> list[Any]:
        return []

    def evidence(self) -> Evidence:
        return Evidence(oom_kills=0)

    def last_step(self) -> int:
        return self._last


def _connect(storm: HostStorm, parameters: Any) -> Any:
    """Return torch's handler over its own backend and a simulated store."""
    process = storm.loop.process
    host = process.host
    if host.serves and (storm.place is None or storm.place.is_gone):
        storm.place = Place(storm.loop, host)
        process.places.append(storm.place)
    is_there = storm.loop.wait(
        lambda: (
            storm.place is not None
            and not storm.place.is_gone
            and storm.network.is_open(host, storm.place.host)
        ),
        SILENCE_SECONDS,
    )
    if not is_there or storm.place is None:
        raise RendezvousConnectionError("nobody serves the rendezvous")
    client: Any = Client(storm.network, host, storm.place)
    backend = c10d_rendezvous_backend.C10dRendezvousBackend(client, parameters.run_id)
    handler = dynamic_rendezvous.create_handler(client, backend, parameters)
    storm.handlers.append(handler)
    return handler


class _Server:
    """A store that ends when nobody holds it, as torch's does."""

    def __init__(self, port: int, place: Place) -> None:
        self.port, self._place = port, place

    def __del__(self) -> None:
        """Close it."""
        self._place.close()


def _board(storm: HostStorm) -> Any:
    """Return what serves the store of a life."""
    process = storm.loop.process
    place = Place(storm.loop, process.host)
    process.places.append(place)
    storm.pids += 1
    storm.boards[process.host.name, storm.pids] = place
    return _Server(storm.pids, place)


def _answering(storm: HostStorm, addresses: Any) -> tuple[list[str], list[str]]:
    found = sorted(set(addresses))
    well = {host.name for host in storm.hosts if host.is_well}
    return [one for one in found if one in well], [one for one in found if one not in well]


def _delay(storm: HostStorm, seconds: Any) -> None:
    storm.loop.sleep(storm.draw.uniform(*seconds) if isinstance(seconds, tuple) else seconds)


def _replacements(storm: HostStorm) -> list[tuple[Any, str, Any]]:
    """Return what is put where."""
    threads, time, day = storm.threads, storm.time, storm.day
    dist = SimpleNamespace(PrefixStore=Prefixed)
    boards = SimpleNamespace(TCPStore=lambda *_, **__: _board(storm))
    tokens = SimpleNamespace(token_hex=lambda _: f"{storm.draw.randrange(1 << 32):08x}")
    nothing = lambda *_, **__: None  # noqa: E731 - in the place of logs
    return [
        (dynamic_rendezvous, "time", time),
        (dynamic_rendezvous, "datetime", day),
        (dynamic_rendezvous, "threading", threads),
        (dynamic_rendezvous, "dist", dist),
        (dynamic_rendezvous, "_delay", lambda seconds: _delay(storm, seconds)),
        (dynamic_rendezvous, "get_method_name", lambda depth=2: ""),
        (dynamic_rendezvous, "construct_and_record_rdzv_event", nothing),
        (
            dynamic_rendezvous.DynamicRendezvousHandler,
            "_node_desc_generator",
            dynamic_rendezvous._NodeDescGenerator(),
        ),
        (c10d_rendezvous_backend, "construct_and_record_rdzv_event", nothing),
        (utils, "Thread", threads.Thread),
        (utils, "Event", threads.Event),
        (api, "get_free_port", lambda: 0),
        (registry, "get_rendezvous_handler", lambda told: _connect(storm, told)),
        (server, "record", nothing),
        (server, "_get_fq_hostname", lambda: "host"),
        (connect, "datetime", day),
        (connect, "use_local_clock", _with_clock(storm)),
        (remote_hangs, "threading", threads),
        (membership, "threading", threads),
        (connect, "time", time),
        (connect, "time", time),
        (attempt, "dist", boards),
        (attempt, "secrets", tokens),
        (attempt, "interface_for_gloo", lambda *_: ""),
        (roster, "is_served_here", lambda _: storm.loop.process.host.serves),
        (roster, "probe_hosts", lambda addresses: _answering(storm, addresses)),
        (worker_errors, "read_error", lambda path: storm.words.get(str(path), WorkerError())),
        (attempt_monitor, "write_stop_request", nothing),
        (attempt_monitor, "exited_without_save", lambda _: ""),
        (attempt_monitor, "_TICK_SECONDS", _TICK_SECONDS),
        (agent, "HealthMonitor", lambda _notes, rule, clock, _emit: SimHealth(storm, rule, clock)),
        (agent, "WorkerGroup", lambda commands, clock, _: SimGroup(storm, commands, clock)),
    ]


def _with_clock(storm: HostStorm) -> Any:
    judge = connect.use_local_clock

    def judged(handler: Any) -> Any:
        backend = judge(handler)._state_holder._backend
        if isinstance(backend, connect.SkewTolerantBackend):
            backend._seconds = storm.time.monotonic
        return handler

    return judged


@contextmanager
def driven(storm: HostStorm) -> Iterator[None]:
    """Have the agent's code and torch's run in the storm's loop inside."""
    with ExitStack() as undone:
        before = os.environ.get(_SHARING)
        os.environ[_SHARING] = "1"
        undone.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.WARNING)
        for place, name, stand_in in _replacements(storm):
            undone.callback(setattr, place, name, getattr(place, name))
            setattr(place, name, stand_in)
        try:
            yield
        finally:
            if before is None:
                del os.environ[_SHARING]
            else:
                os.environ[_SHARING] = before
