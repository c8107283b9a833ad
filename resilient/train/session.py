"""What one process holds for as long as it lives: its place, its board, its process group."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from resilient.clock import SystemClock
from resilient.errors import ConfigError
from resilient.opening import claimant_of, open_checkpointer
from resilient.storage.open import local_path
from resilient.storage.urls import protocol_of
from resilient.strategies.meshes import together_size
from resilient.train.arguments.checks import check
from resilient.train.arguments.distribution import fsdp_options
from resilient.train.arguments.every import is_auto, settle_every
from resilient.train.edge import end_with_exit_codes
from resilient.train.reporting import open_emitter
from resilient.train.stop import Grace, StopGate
from resilient.vault.keeper.guest import KeeperAddress
from resilient.vault.saving.tiering import Tiering
from resilient.world.comms import Comms
from resilient.world.gang import Backend, join
from resilient.world.launch import read_launch, tell_events, tell_repository
from resilient.world.memory import MemoryBoard
from resilient.world.pulse import own_pulse
from resilient.world.world import World

if TYPE_CHECKING:
    from resilient.checkpointer import Checkpointer
    from resilient.clock import Clock
    from resilient.events import Emitter
    from resilient.train.arguments import TrainingArguments
    from resilient.world.gang import Gang
    from resilient.world.pulse import Pulse


@dataclass(frozen=True, slots=True)
class Session:
    """What the trainer asks of the world around it."""

    gang: Gang
    device: torch.device
    clock: Clock
    emit: Emitter
    args: TrainingArguments
    events: Path
    pulse: Pulse
    lull: threading.Event

    @property
    def world(self) -> World:
        """Who this rank is."""
        return self.gang.world

    @property
    def computes_together(self) -> bool:
        """Whether a forward pass needs all ranks, so that each must make as many as the others."""
        together = self.args.parallelism in ("fsdp", "deepspeed")
        return self.world.size > 1 and (together or self._together > 1)

    @property
    def data_world(self) -> World:
        """Who this rank is among those with samples of their own; what holds one model shares."""
        size, world = self._together, self.world
        return World(world.rank // size, max(1, world.size // size), world.local_rank)

    @property
    def _together(self) -> int:
        return together_size(self.args.parallelism_config)

    @property
    def repository(self) -> str:
        """The launcher's, else the script's, else the output folder."""
        return self.gang.launch.repo or self.args.repo or self.args.output_dir

    def checkpointer(self, emit: Emitter, topic: str, gate: StopGate) -> Checkpointer:
        """Open the repository; the gate knows how much time is left.

        Raises:
            ConfigError: this process trained something else there.
        """
        args, launch = self.args, self.gang.launch
        self._claim_repository()
        # Signals are heard in the main thread only.
        hears = threading.current_thread() is threading.main_thread()
        tell_repository(launch, self.repository, saves_when_stopped=hears)
        opened = open_checkpointer(
            self.repository,
            self.world,
            self.gang.board,
            retention=args.retention,
            within_seconds=args.save_within_seconds,
            single_writer=launch.single_writer,
            parity=args.save_parity,
            repair_on_restore=args.repair_on_restore,
            save_unchanged=args.save_unchanged,
            # Whoever launches names the place, and so knows better how to get there.
            storage_options={**(args.storage_options or {}), **launch.storage_options},
            emit=emit,
            scope=topic,
            keeper=self._keeper(gate),
            near_url=args.near_repo,
            tiering=_tiering(args),
            require_signature=launch.require_signature,
        )
        opened.start, opened.claimant = self.gang.start, claimant_of(launch)
        return opened

    def checkpointer_alone(self, topic: str) -> Checkpointer:
        """Open the repository for this rank alone, which writes there before the others look."""
        args, launch = self.args, self.gang.launch
        self._claim_repository()
        opened = open_checkpointer(
            self.repository,
            single_writer=launch.single_writer,
            parity=args.save_parity,
            storage_options={**(args.storage_options or {}), **launch.storage_options},
            emit=self.emit,
            scope=f"{topic}/alone",
        )
        opened.start, opened.claimant = self.gang.start, claimant_of(launch)
        return opened

    def comms(self, scope: str) -> Comms:
        """Return a way to agree with the other ranks; ``scope`` is new and the same on all."""
        board = self.gang.board
        return Comms(board.another() if board else MemoryBoard(), self.world, scope)

    def _keeper(self, gate: StopGate) -> KeeperAddress | None:
        """Return where this host's keeper is, if the launcher has started one."""
        launch = self.gang.launch
        if not launch.keeper:
            return None
        file = f"rank-{self.world.rank}.jsonl"
        return KeeperAddress(
            launch.keeper,
            launch.host,
            events=str((self.events / file).absolute()),
            left_seconds=lambda: gate.left_seconds,
        )

    def _claim_repository(self) -> None:
        """Refuse a second training that would go on from the end of the first, and do nothing."""
        mine = place_of(self.args.output_dir)
        first = self.gang.outputs.setdefault(place_of(self.repository), mine)
        if first != mine:
            raise ConfigError(
                f"cannot train into `{mine}`: its repository `{self.repository}` holds this "
                f"script's training into `{first}`, which it would take for its own and resume; "
                "give each training a repository of its own",
                hint="set `repo` of TrainingArguments for each, and start without --repo",
            )

    def next_topic(self) -> str:
        """Return a name for one training, the same on all ranks and new on this board."""
        return self.gang.next_topic()

    def stop_gate(self, topic: str) -> StopGate:
        """Return the gate of one training."""
        launch = self.gang.launch
        is_supervised = launch.agent_pid > 0
        return StopGate(
            self.world,
            self.gang.board,
            Grace.under_agent(launch.grace_seconds, launch.notes)
            if is_supervised
            else Grace(self.args.grace_seconds),
            self.clock,
            scope=f"stop/{topic}",
        )


def place_of(url: str) -> str:
    """Return one spelling of a path or URL, to compare it with another."""
    return str(local_path(url).resolve()) if protocol_of(url) == "file" else url.rstrip("/")


def choose_device(world: World, *, use_cpu: bool) -> torch.device:
    """Return the GPU of this rank, or the CPU."""
    if use_cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)
    return device


def open_session(args: TrainingArguments) -> Session:
    """Join the other ranks, unless this process already has, and open the event files.

    Collective.

    Raises:
        ConfigError: the launcher's variables make no sense, or contradict the arguments.
        PeerFailed: the rendezvous store cannot be reached.
    """
    if not read_launch(os.environ).agent_pid:
        end_with_exit_codes()
    # Shown before the others are met: who waits for a rank that never comes is not the one stuck.
    pulse = own_pulse()
    gang = join(partial(_backend, args))
    _heed(args, gang.launch.every)
    clock = SystemClock()
    output = Path(args.output_dir)
    events = Path(gang.launch.events) if gang.launch.events else output / "events"
    tell_events(gang.launch, events)
    return Session(
        gang=gang,
        device=choose_device(gang.world, use_cpu=args.use_cpu),
        clock=clock,
        emit=open_emitter(clock, gang.world, output, events, args.get_process_log_level()),
        args=args,
        events=events,
        pulse=pulse,
        lull=threading.Event(),
    )


def _heed(args: TrainingArguments, every: str) -> None:
    """Let the launcher's word on when to save win over the script's.

    Raises:
        ConfigError: other arguments contradict it.
    """
    if every:
        args.save_every = every
        settle_every(args)
        check(args)


def _backend(args: TrainingArguments, world: World) -> Backend:
    """Return how the ranks compute together, and bind this process to its GPU."""
    device = choose_device(world, use_cpu=args.use_cpu)
    if args.ddp_backend == "nccl" and device.type != "cuda":
        raise ConfigError(
            "`ddp_backend`='nccl' needs a GPU for each rank, and this one trains on the CPU",
            hint="leave it out, or write gloo",
        )
    return Backend(args.ddp_backend or _backend_for(args, device), args.ddp_timeout)


def _backend_for(args: TrainingArguments, device: torch.device) -> str:
    if device.type != "cuda":
        return "gloo"
    # Norms of gradients that are in host memory are added up there.
    offloads = args.parallelism == "fsdp" and fsdp_options(args).cpu_offload
    return "cpu:gloo,cuda:nccl" if offloads else "nccl"


def _tiering(args: TrainingArguments) -> Tiering:
    """Return how saves go on from the near tier; who plans saves by their cost plans that too."""
    said, seconds = args.durable_every, args.durable_every_seconds
    is_planned = is_auto(args) and said is None and seconds is None
    return Tiering(said, args.near_total_limit, seconds, is_planned)
