"""Agreement of all nodes on an attempt, and the environment of its workers.

torch counts restarts per agent. After the replacement of a node, two ranks of one world may
therefore have different counts. Here the agent of the first node chooses the attempt's name and
serves the attempt's key-value store. The agent publishes the name and the address through the
rendezvous. The store survives the end of any worker, because the agent serves it. The agent binds
the port when it chooses the port. Each attempt has a new store without stale keys.
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
    """Return the network interface that makes gloo reachable from ``host``.

    By default gloo uses the address of this host's own name. In many images the name has the
    loopback address, which no other node can reach.

    Returns:
        Name of the interface; empty if gloo needs none, or none is known.
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
        addresses = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return True
    return all(str(place[0]).startswith(("127.", "::1")) for *_, place in addresses)


def _interface_of(address: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{_REQUEST_BYTES}s", name.encode())
            with suppress(OSError):  # Skip interfaces without an IPv4 address.
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[_ADDRESS]) == address:
                    return name
    return ""


_AGREE_SECONDS = 60.0
_POLL_SECONDS = 0.02
_FIRST_NUMBER = 1


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of the worker group, the same on every node.

    Attributes:
        number: Number of the attempt, from 1.
        attempt: Name of the attempt, unique over all attempts of all jobs.
        cause: Reason for the attempt, one word.
        resume: Resume option passed to the workers.
        host: Address of the attempt's store.
        port: Port of the attempt's store.
        nodes: Number of nodes in the rendezvous; 0 if unknown.
    """

    number: int
    attempt: str
    cause: str
    resume: str
    host: str
    port: int
    nodes: int = 0


class AttemptRegistry:
    """Registry that names attempts and serves their stores on the first node."""

    def __init__(self, run_id: str, clock: Clock) -> None:
        self._run_id = run_id
        self._clock = clock
        self._server: dist.TCPStore | None = None

    def agree(self, group: Any, number: int, cause: str, resume: str) -> Attempt:
        """Return the attempt that the first node proposed, by its own arguments of this call.

        Args:
            group: Worker group of torch after its rendezvous (its attributes are typed as None).
            number: Number of the attempt.
            cause: Reason for the attempt.
            resume: Resume option for the workers.

        Raises:
            RendezvousTimeoutError: The first node published nothing in time.
            MemberSilent: The first node is gone, or its rendezvous had other nodes.
        """
        # A dynamic rendezvous has its own keys per round. A static rendezvous reuses its keys, but
        # its nodes restart together. A single node has a new store each time.
        is_static = group.spec.rdzv_handler.get_backend() == "static"
        key = f"resilient/life/{number if is_static else 0}"
        if group.group_rank == 0:
            self._server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            attempt = f"{self._run_id}-{number}-{secrets.token_hex(4)}"
            host = group.master_addr or "localhost"
            nodes = group.group_world_size
            proposal = Attempt(number, attempt, cause, resume, host, self._server.port, nodes)
            group.store.set(key, json.dumps(asdict(proposal)))
            return proposal
        self._server = None
        proposal = Attempt(**json.loads(self._wait(group.store, key)))
        if proposal.nodes != group.group_world_size:
            # A node fell silent during the rendezvous, and only some nodes noticed.
            own_nodes = group.group_world_size
            raise MemberSilent(
                f"the first node has joined {proposal.nodes} nodes, and this one {own_nodes}"
            )
        return proposal

    def close(self) -> None:
        """Stop the store of the attempt."""
        self._server = None

    def _wait(self, store: Any, key: str) -> bytes:
        if isinstance(store, RoundStore):
            return bytes(store.get(key))
        # Poll, because a signal cannot interrupt the store's own wait.
        deadline_seconds = self._clock.monotonic_seconds() + _AGREE_SECONDS
        while not store.check([key]):
            if self._clock.monotonic_seconds() > deadline_seconds:
                raise RendezvousTimeoutError(f"the first node published no `{key}`")
            self._clock.sleep(_POLL_SECONDS)
        value: bytes = store.get(key)
        return value


@dataclass(frozen=True, slots=True)
class HostEnv:
    """Settings of a host for its workers: daemon socket, and time from SIGTERM to SIGKILL."""

    keeper: str = ""
    grace_seconds: float = 0.0


def worker_environ(
    base: Mapping[str, str],
    group: Any,
    worker: Worker,
    attempt: Attempt,
    options: WorkerOptions,
    host: HostEnv,
) -> dict[str, str]:
    """Return the environment of one worker: variables of torchrun, and ours.

    Args:
        base: Environment of the agent.
        group: Worker group of torch.
        worker: Worker of torch.
        attempt: Attempt that all nodes agreed on.
        options: Options for the workers.
        host: Settings of this host.
    """
    spec = group.spec
    launch = LaunchEnv(
        world=World(worker.global_rank, worker.world_size, worker.local_rank),
        host=attempt.host,
        port=attempt.port,
        hosted=True,
        attempt=attempt.attempt,
        repo=options.repo,
        resume=attempt.resume,
        cause=attempt.cause,
        events=options.events,
        single_writer=options.single_writer,
        keeper=host.keeper,
        storage_options=options.storage_options,
        agent_pid=os.getpid(),
        grace_seconds=host.grace_seconds,
        notes=options.notes,
        require_signature=options.require_signature,
        strict_resume=options.strict_resume,
        every=options.every,
        until_step=options.until_step,
        start=options.start,
    )
    # One thread per rank, as torchrun does. Otherwise every rank would use all cores.
    threads = {"OMP_NUM_THREADS": "1"} if spec.local_world_size > 1 else {}
    gloo_interface = (
        interface_for_gloo(attempt.host, attempt.port) if group.group_world_size > 1 else ""
    )
    return {
        **threads,
        **({"GLOO_SOCKET_IFNAME": gloo_interface} if gloo_interface else {}),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        **base,
        "GROUP_RANK": str(group.group_rank),
        "GROUP_WORLD_SIZE": str(group.group_world_size),
        "ROLE_NAME": spec.role,
        "ROLE_RANK": str(worker.role_rank),
        "ROLE_WORLD_SIZE": str(worker.role_world_size),
        "LOCAL_WORLD_SIZE": str(spec.local_world_size),
        "TORCHELASTIC_RESTART_COUNT": str(attempt.number - _FIRST_NUMBER),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        **write_launch(launch),
    }
