"""Agreement of all nodes on an attempt; worker environment.

Which network interface leads to the other nodes.

What all nodes of one life must agree on, and what each worker is told.

Torch counts restarts per agent, so after a node was replaced two ranks of one world may hold
different counts. Here the first node's agent names the life, serves its store, and publishes
both through the rendezvous. The store belongs to the agent: it outlives any worker, its port
is taken the moment it is chosen, and a new one per life leaves no stale keys.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import struct
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

from resilient.distributed.kv_store import address_toward
from resilient.distributed.launch_env import LaunchEnv, World, write_launch
from resilient.elastic.rendezvous.connect import MemberSilent, RoundStore

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.elastic.agent.server.api import Worker

    from resilient.clock import Clock
    from resilient.elastic.options import WorkerOptions

_SIOCGIFADDR = 0x8915  # netdevice(7)
_REQUEST_BYTES = 40
_ADDRESS = slice(20, 24)


def interface_for_gloo(host: str, port: int) -> str:
    """Return the interface that gloo must be told of to be reached from ``host``'s side.

    By itself gloo takes the address that this host's own name leads to. In many images that is
    the loopback, where no other node reaches it.

    Returns:
        Its name; empty where gloo finds the way by itself, or none is known.
    """
    if not _is_loopback(socket.gethostname()):
        return ""
    try:
        address = address_toward(host, port)
    except OSError:
        return ""
    return "" if address.startswith("127.") else _interface_of(address)


def _is_loopback(name: str) -> bool:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return True
    return all(str(place[0]).startswith(("127.", "::1")) for *_, place in found)


def _interface_of(address: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{_REQUEST_BYTES}s", name.encode())
            with suppress(OSError):  # one without an IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[_ADDRESS]) == address:
                    return name
    return ""


_AGREE_SECONDS = 60.0
_POLL_SECONDS = 0.02
_LIVES_BEFORE = 1


@dataclass(frozen=True, slots=True)
class Attempt:
    """One life of the worker group, the same on every node.

    Attributes:
        number: 1 for the first.
        attempt: its name; unique among all lives of all jobs.
        cause: why it began, as one word.
        resume: what its workers are told about resuming.
        host: address of its store.
        port: port of its store.
        nodes: how many have met for it; 0 where nobody says.
    """

    number: int
    attempt: str
    cause: str
    resume: str
    host: str
    port: int
    nodes: int = 0


class AttemptRegistry:
    """Names lives and serves their stores on the first node, learns them on the others."""

    def __init__(self, run_id: str, clock: Clock) -> None:
        self._run_id = run_id
        self._clock = clock
        self._server: dist.TCPStore | None = None

    def agree(self, group: Any, number: int, cause: str, resume: str) -> Attempt:
        """Return the life that the first node proposes; the other arguments are its proposal.

        Args:
            group: torch's worker group after its rendezvous (its attributes are typed as None).
            number: of the life.
            cause: why it begins.
            resume: what the workers shall be told.

        Raises:
            RendezvousTimeoutError: the first node published nothing in time.
            MemberSilent: it is gone, or has met others than this node has.
        """
        # A dynamic rendezvous has keys of its own per round; the static one has not, but its
        # nodes restart in step. One node has a new store each time.
        is_static = group.spec.rdzv_handler.get_backend() == "static"
        key = f"resilient/life/{number if is_static else 0}"
        if group.group_rank == 0:
            self._server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            attempt = f"{self._run_id}-{number}-{secrets.token_hex(4)}"
            host = group.master_addr or "localhost"
            nodes = group.group_world_size
            life = Attempt(number, attempt, cause, resume, host, self._server.port, nodes)
            group.store.set(key, json.dumps(asdict(life)))
            return life
        self._server = None
        life = Attempt(**json.loads(self._wait(group.store, key)))
        if life.nodes != group.group_world_size:
            # One fell silent in the moment in which all met, and only some have seen it.
            here = group.group_world_size
            raise MemberSilent(f"the first node has met {life.nodes} nodes, and this one {here}")
        return life

    def close(self) -> None:
        """Stop to serve."""
        self._server = None

    def _wait(self, store: Any, key: str) -> bytes:
        if isinstance(store, RoundStore):
            return bytes(store.get(key))
        # Polled, because a signal cannot interrupt the store's own wait.
        deadline_seconds = self._clock.monotonic_seconds() + _AGREE_SECONDS
        while not store.check([key]):
            if self._clock.monotonic_seconds() > deadline_seconds:
                raise RendezvousTimeoutError(f"the first node published no `{key}`")
            self._clock.sleep(_POLL_SECONDS)
        value: bytes = store.get(key)
        return value


@dataclass(frozen=True, slots=True)
class HostEnv:
    """What a host gives its workers: its keeper's socket, and the time from SIGTERM to SIGKILL."""

    keeper: str = ""
    grace_seconds: float = 0.0


def worker_environ(
    base: Mapping[str, str],
    group: Any,
    worker: Worker,
    life: Attempt,
    wishes: WorkerOptions,
    host: HostEnv,
) -> dict[str, str]:
    """Return the environment of one worker: torchrun's variables, and ours.

    Args:
        base: the agent's own environment.
        group: torch's worker group.
        worker: torch's worker.
        life: what all nodes agreed on.
        wishes: what the user wants the workers to be told.
        host: what this host gives its workers.
    """
    spec = group.spec
    launch = LaunchEnv(
        world=World(worker.global_rank, worker.world_size, worker.local_rank),
        host=life.host,
        port=life.port,
        hosted=True,
        attempt=life.attempt,
        repo=wishes.repo,
        resume=life.resume,
        cause=life.cause,
        events=wishes.events,
        single_writer=wishes.single_writer,
        keeper=host.keeper,
        storage_options=wishes.storage_options,
        agent_pid=os.getpid(),
        grace_seconds=host.grace_seconds,
        notes=wishes.notes,
        require_signature=wishes.require_signature,
        strict_resume=wishes.strict_resume,
        every=wishes.every,
        until_step=wishes.until_step,
        start=wishes.start,
    )
    # As torchrun does: every rank would take all cores otherwise.
    threads = {"OMP_NUM_THREADS": "1"} if spec.local_world_size > 1 else {}
    way = interface_for_gloo(life.host, life.port) if group.group_world_size > 1 else ""
    return {
        **threads,
        **({"GLOO_SOCKET_IFNAME": way} if way else {}),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        **base,
        "GROUP_RANK": str(group.group_rank),
        "GROUP_WORLD_SIZE": str(group.group_world_size),
        "ROLE_NAME": spec.role,
        "ROLE_RANK": str(worker.role_rank),
        "ROLE_WORLD_SIZE": str(worker.role_world_size),
        "LOCAL_WORLD_SIZE": str(spec.local_world_size),
        "TORCHELASTIC_RESTART_COUNT": str(life.number - _LIVES_BEFORE),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        **write_launch(launch),
    }
