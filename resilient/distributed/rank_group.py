"""Group of all ranks that this process joins, and the key-value store that the ranks share.

A process joins the group once, at the first request of the trainer or of a checkpointer in a user's
loop.
"""

from __future__ import annotations

import atexit
import os
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from resilient.clock import SystemClock
from resilient.distributed.launch_env import World, read_launch
from resilient.distributed.start_identity import own_start
from resilient.distributed.torch_kv_store import TorchKVStore, connect, join_process_group
from resilient.errors import ConfigError, PeerFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from resilient.distributed.launch_env import LaunchEnv
    from resilient.distributed.start_identity import StartIdentity

_EXIT_BARRIER_SECONDS = 10.0
_SETTLE_SECONDS = 0.1


@dataclass(slots=True)
class RankGroup:
    """Rank group of this process. The process joins once and stays until it exits.

    Attributes:
        outputs: Output folder of each training, by the repository of its checkpoints.
        trained: Number of trainings that this process has begun.
    """

    world: World
    board: TorchKVStore | None
    launch: LaunchEnv
    trainings: Iterator[int] = field(default_factory=count)
    outputs: dict[str, str] = field(default_factory=dict)
    trained: int = 0

    @property
    def start(self) -> StartIdentity:
        """Identity of this start, with the number of the latest training in this process."""
        return replace(self.launch.start, training=self.trained)

    def begin_training(self) -> StartIdentity:
        """Count one more training of this process and return its identity."""
        self.trained += 1
        return self.start

    def next_topic(self) -> str:
        """Return a new topic name for one use of the key-value store, equal on all ranks."""
        return f"{self.launch.attempt}/{next(self.trainings)}"


@dataclass(frozen=True, slots=True)
class ProcessGroupSpec:
    """Backend of the ranks' collectives, if this package starts the process group.

    Attributes:
        name: ``gloo``, ``nccl``, ...
        timeout_seconds: Timeout of a collective.
    """

    name: str
    timeout_seconds: float


# A process has one default process group of torch, and therefore one rank group.
_own_group: list[RankGroup] = []


def join(backend: Callable[[World], ProcessGroupSpec] | None = None) -> RankGroup:
    """Join the other ranks, unless this process has already joined. Collective.

    Args:
        backend: Function that chooses the backend of the default process group. The group is
            started if the script has none. With None, only the script starts a process group.

    Raises:
        ConfigError: The launcher's variables are inconsistent, there is no rendezvous, or a process
            group of another size was created after this process joined.
        PeerFailed: The rendezvous store cannot be reached.
    """
    if not _own_group:
        launch = read_launch(os.environ)
        if not launch.start.id:
            launch = replace(launch, start=own_start(os.environ))
        _own_group.append(_join(launch, may_serve=backend is not None))
    rank_group = _own_group[0]
    if dist.is_initialized():
        _require_same_size(rank_group.world.size)
    elif backend is not None and rank_group.board is not None:
        _start_process_group(rank_group, rank_group.board, backend(rank_group.world))
    return rank_group


def _join(launch: LaunchEnv, *, may_serve: bool) -> RankGroup:
    if dist.is_initialized():
        return _adopt_process_group(launch)
    world = launch.world
    if world.size == 1:
        return RankGroup(world, None, launch)
    if not launch.host or not launch.port:
        raise ConfigError(f"WORLD_SIZE={world.size} needs MASTER_ADDR and MASTER_PORT")
    if not may_serve and not launch.hosted:
        # A store served at that port would take the port from the script's process group.
        raise ConfigError(
            f"{world.size} ranks have no rendezvous yet",
            hint="call torch.distributed.init_process_group() first, or start with torchrun",
        )
    return RankGroup(world, connect(world, launch.host, launch.port, hosted=launch.hosted), launch)


def _require_same_size(size: int) -> None:
    """Raise if the script created a process group of another size after this process joined."""
    if dist.get_world_size() != size:
        raise ConfigError(
            f"this process is one of {dist.get_world_size()} ranks, but was one of {size} when "
            "the first checkpointer was opened",
            hint="call torch.distributed.init_process_group() before the first checkpointer",
        )


def _start_process_group(
    rank_group: RankGroup, kv_store: TorchKVStore, backend: ProcessGroupSpec
) -> None:
    """Start the default process group on the group's key-value store. Collective."""
    attempt = rank_group.launch.attempt
    join_process_group(kv_store, rank_group.world, backend.name, attempt, backend.timeout_seconds)
    atexit.register(_leave_process_group)


def start_single_rank_group(backend: str) -> None:
    """Start a process group of one rank, for libraries that need a process group."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(_leave_process_group)


def _leave_process_group() -> None:
    """Let gloo's threads finish while the interpreter still runs.

    A worker thread of gloo frees the last collective's tensors shortly after the caller continues.
    The thread needs the interpreter for that, and otherwise aborts the process (torch 2.13; seen
    in 1 of 20 exits). ``destroy_process_group`` does not join these threads.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    SystemClock().sleep(_SETTLE_SECONDS)


def _adopt_process_group(launch: LaunchEnv) -> RankGroup:
    """Use the process group of the script, and open a key-value store beside it. Collective."""
    world = World(dist.get_rank(), dist.get_world_size(), launch.world.local_rank)
    if world.size == 1:
        return RankGroup(world, None, launch)
    # The script may end its process group earlier. The threads must finish in that case too.
    atexit.register(_leave_process_group)
    host = launch.host or "127.0.0.1"
    server = _serve(host) if world.is_coordinator else None
    on_gpu = dist.get_backend() == "nccl"
    port = torch.tensor([server.port if server else 0], device="cuda" if on_gpu else "cpu")
    dist.broadcast(port, src=0)
    return RankGroup(
        world,
        TorchKVStore(server) if server else connect(world, host, int(port), hosted=True),
        launch,
    )


def _serve(host: str) -> Any:
    return dist.TCPStore(host, 0, None, is_master=True, wait_for_workers=False)


def exit_barrier(rank_group: RankGroup, topic: str) -> None:
    """Wait until no rank needs the key-value store for this topic, if this rank may serve it.

    A rank that died delays the others by at most 10 s.
    """
    if rank_group.board is None:
        return
    keys = [f"farewell/{topic}/{rank}" for rank in range(rank_group.world.size)]
    # All saves are durable at this point, so a lost key-value store is no failure.
    with suppress(PeerFailed):
        rank_group.board.post(keys[rank_group.world.rank], b"1")
        if rank_group.world.is_coordinator:
            rank_group.board.wait(keys, _EXIT_BARRIER_SECONDS)
