"""Process-wide objects and settings: ranks, store, process group, torch's global options.

An uncaught error of this library ends the script with the exit code of the error. If
`resilient train` has started the script, its bootstrap code in the worker process sets the exit
code. Otherwise this module sets the exit code.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from resilient.checkpoint.daemon.messages import DaemonAddress
from resilient.checkpoint.promotion_policy import TieringOptions
from resilient.clock import SystemClock
from resilient.distributed.coordination import ControlGroup
from resilient.distributed.heartbeat import progress_reporter
from resilient.distributed.kv_store import InMemoryKVStore
from resilient.distributed.launch_env import (
    World,
    publish_event_file,
    publish_repository,
    read_agent_pid,
)
from resilient.distributed.rank_group import ProcessGroupSpec, join
from resilient.engine_factory import claimant_of, open_engine
from resilient.errors import ConfigError, Preempted, ResilientError
from resilient.events import say_error
from resilient.storage.open import local_path
from resilient.storage.urls import protocol_of
from resilient.strategies.parallelism_options import model_parallel_size
from resilient.train.arguments import TrainingArguments
from resilient.train.arguments.derived import (
    fsdp_options,
    is_auto,
    is_canonical,
    normalize_save_every,
)
from resilient.train.arguments.validation import check
from resilient.train.events import open_emitter
from resilient.train.preemption import StopCoordinator, StopDeadline

if TYPE_CHECKING:
    from types import TracebackType

    from torch import nn

    from resilient.checkpoint_engine import CheckpointEngine
    from resilient.clock import Clock
    from resilient.distributed.heartbeat import ProgressReporter
    from resilient.distributed.rank_group import RankGroup
    from resilient.events import Emitter


def end_with_exit_codes() -> None:
    """End this process with the exit code of an uncaught error of this library.

    Other errors are passed to the previous hook. Further calls have no effect.
    """
    previous_hook = sys.excepthook
    if getattr(previous_hook, "is_ours", False):
        return

    def report(
        kind: type[BaseException], error: BaseException, frames: TracebackType | None
    ) -> None:
        if isinstance(error, ResilientError):
            error.drop_hint_note()
        if not isinstance(error, Preempted):
            previous_hook(kind, error, frames)
        if not isinstance(error, ResilientError):
            return
        say_error(error)
        # Of all exceptions from a hook, only SystemExit sets the interpreter's exit code.
        raise SystemExit(error.exit_code)

    report.is_ours = True  # type: ignore[attr-defined]
    sys.excepthook = report


@dataclass(frozen=True, slots=True)
class Session:
    """Process-wide objects that the trainer uses."""

    rank_group: RankGroup
    device: torch.device
    clock: Clock
    emit: Emitter
    args: TrainingArguments
    events: Path
    progress: ProgressReporter
    interpreter_idle: threading.Event

    @property
    def world(self) -> World:
        """World as seen by this rank."""
        return self.rank_group.world

    @property
    def computes_together(self) -> bool:
        """True if a forward pass needs all ranks, so all ranks must run equally many passes."""
        is_sharded = self.args.parallelism in ("fsdp", "deepspeed")
        return self.world.size > 1 and (is_sharded or self._together > 1)

    @property
    def data_world(self) -> World:
        """World of the ranks with separate samples. Ranks that share a model share samples."""
        size, world = self._together, self.world
        return World(world.rank // size, max(1, world.size // size), world.local_rank)

    @property
    def _together(self) -> int:
        return model_parallel_size(self.args.parallelism_config)

    @property
    def repository(self) -> str:
        """URL of the repository: from the launcher, else the script, else the output folder."""
        return self.rank_group.launch.repo or self.args.repo or self.args.output_dir

    def checkpointer(self, emit: Emitter, topic: str, gate: StopCoordinator) -> CheckpointEngine:
        """Open the repository; the gate provides the remaining time.

        Raises:
            ConfigError: This process already trained another run there.
        """
        args, launch = self.args, self.rank_group.launch
        self._claim_repository()
        # Python delivers signals only in the main thread.
        is_main_thread = threading.current_thread() is threading.main_thread()
        publish_repository(launch, self.repository, saves_when_stopped=is_main_thread)
        engine = open_engine(
            self.repository,
            self.world,
            self.rank_group.board,
            retention=args.retention,
            within_seconds=args.save_within_seconds,
            single_writer=launch.single_writer,
            parity=args.save_parity,
            repair_on_restore=args.repair_on_restore,
            save_unchanged=args.save_unchanged,
            # The launcher chose the repository, so its access options take precedence.
            storage_options={**(args.storage_options or {}), **launch.storage_options},
            emit=emit,
            scope=topic,
            keeper=self._daemon_address(gate),
            near_url=args.near_repo,
            tiering=_tiering(args),
            require_signature=launch.require_signature,
        )
        engine.start, engine.claimant = self.rank_group.start, claimant_of(launch)
        return engine

    def checkpointer_alone(self, topic: str) -> CheckpointEngine:
        """Open the repository for this rank alone, which writes before the other ranks read."""
        args, launch = self.args, self.rank_group.launch
        self._claim_repository()
        engine = open_engine(
            self.repository,
            single_writer=launch.single_writer,
            parity=args.save_parity,
            storage_options={**(args.storage_options or {}), **launch.storage_options},
            emit=self.emit,
            scope=f"{topic}/alone",
        )
        engine.start, engine.claimant = self.rank_group.start, claimant_of(launch)
        return engine

    def comms(self, scope: str) -> ControlGroup:
        """Return a control group of all ranks; ``scope`` is new and the same on all ranks."""
        kv_store = self.rank_group.board
        return ControlGroup(
            kv_store.another() if kv_store else InMemoryKVStore(), self.world, scope
        )

    def _daemon_address(self, gate: StopCoordinator) -> DaemonAddress | None:
        """Return the address of this host's saver daemon, if the launcher has started one."""
        launch = self.rank_group.launch
        if not launch.keeper:
            return None
        file = f"rank-{self.world.rank}.jsonl"
        return DaemonAddress(
            launch.keeper,
            launch.host,
            events=str((self.events / file).absolute()),
            left_seconds=lambda: gate.left_seconds,
        )

    def _claim_repository(self) -> None:
        """Refuse a second training that would resume the finished first training and do nothing."""
        place = place_of(self.args.output_dir)
        first_output = self.rank_group.outputs.setdefault(place_of(self.repository), place)
        if first_output != place:
            raise ConfigError(
                f"cannot train into `{place}`: its repository `{self.repository}` already holds "
                f"this script's training into `{first_output}`, and would resume that one; use one "
                "repository for each training",
                hint="set `repo` of TrainingArguments for each, and start without --repo",
            )

    def next_topic(self) -> str:
        """Return a name for one training, the same on all ranks and new in this store."""
        return self.rank_group.next_topic()

    def stop_gate(self, topic: str) -> StopCoordinator:
        """Return the stop coordinator of one training."""
        launch = self.rank_group.launch
        is_supervised = launch.agent_pid > 0
        return StopCoordinator(
            self.world,
            self.rank_group.board,
            StopDeadline.under_agent(launch.grace_seconds, launch.notes)
            if is_supervised
            else StopDeadline(self.args.grace_seconds),
            self.clock,
            scope=f"stop/{topic}",
        )


def place_of(url: str) -> str:
    """Return a canonical spelling of a path or URL, for comparison."""
    return str(local_path(url).resolve()) if protocol_of(url) == "file" else url.rstrip("/")


def choose_device(world: World, *, use_cpu: bool) -> torch.device:
    """Return the GPU of this rank, or the CPU."""
    if use_cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)
    return device


def open_session(args: TrainingArguments) -> Session:
    """Join the other ranks, unless this process has already joined, and open the event files.

    Collective.

    Raises:
        ConfigError: The launcher's variables are invalid, or contradict the arguments.
        PeerFailed: The rendezvous store cannot be reached.
    """
    # Do this before other variables are read, so that an invalid variable also ends the process
    # with the right exit code.
    if not read_agent_pid(os.environ):
        end_with_exit_codes()
    # Publish the heartbeat before joining, so that a rank that waits for a missing peer is not
    # blamed as stuck.
    progress = progress_reporter()
    rank_group = join(partial(_backend, args))
    _heed(args, rank_group.launch.every)
    clock = SystemClock()
    output = Path(args.output_dir)
    events = Path(rank_group.launch.events) if rank_group.launch.events else output / "events"
    publish_event_file(rank_group.launch, events)
    return Session(
        rank_group=rank_group,
        device=choose_device(rank_group.world, use_cpu=args.use_cpu),
        clock=clock,
        emit=open_emitter(clock, rank_group.world, output, events, args.get_process_log_level()),
        args=args,
        events=events,
        progress=progress,
        interpreter_idle=threading.Event(),
    )


def _heed(args: TrainingArguments, interval: str) -> None:
    """Let the launcher's save interval override the script's.

    Raises:
        ConfigError: Other arguments contradict it.
    """
    if interval:
        args.save_every = interval
        normalize_save_every(args)
        check(args)


def _backend(args: TrainingArguments, world: World) -> ProcessGroupSpec:
    """Return the process group's backend and timeout, and bind this process to its GPU."""
    device = choose_device(world, use_cpu=args.use_cpu)
    if args.ddp_backend == "nccl" and device.type != "cuda":
        raise ConfigError(
            "`ddp_backend`='nccl' needs a GPU for each rank, but this rank trains on the CPU",
            hint="omit it, or write gloo",
        )
    return ProcessGroupSpec(args.ddp_backend or _backend_for(args, device), args.ddp_timeout)


def _backend_for(args: TrainingArguments, device: torch.device) -> str:
    if device.type != "cuda":
        return "gloo"
    # The norms of gradients that are offloaded to host memory are reduced on the host.
    offloads = args.parallelism == "fsdp" and fsdp_options(args).cpu_offload
    return "cpu:gloo,cuda:nccl" if offloads else "nccl"


def _tiering(args: TrainingArguments) -> TieringOptions:
    """Return the tiering options; if saves are planned by cost, promotions are planned too."""
    steps, seconds = args.durable_every, args.durable_every_seconds
    is_planned = is_auto(args) and steps is None and seconds is None
    return TieringOptions(steps, args.near_total_limit, seconds, is_planned)


# Variables of CUDA and other libraries, as in Transformers. Kernels are launched one by one.
_DETERMINISTIC = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "FLASH_ATTENTION_DETERMINISTIC": "1",
}
# The first generation of NVIDIA GPUs with TF32 (Ampere).
_TF32_SINCE = (8, 0)


def own_arguments(args: Any) -> TrainingArguments:
    """Return a trainer's arguments, or the defaults for None.

    Raises:
        ConfigError: The object is from another library, or a value cannot be saved.
    """
    if args is None:
        return TrainingArguments()
    if not isinstance(args, TrainingArguments):
        kind = type(args)
        raise ConfigError(
            f"`args` is a {kind.__module__}.{kind.__qualname__}, not resilient.TrainingArguments",
            hint="from resilient import TrainingArguments",
        )
    # A field may have changed since the object was created.
    args.to_dict()
    return args


def configure_process(args: TrainingArguments, device: torch.device) -> None:
    """Set torch's process-wide options.

    Raises:
        ConfigError: The device does not support TF32.
    """
    threads = args.threads_per_rank or (1 if is_canonical(args) else None)
    if threads is not None:
        torch.set_num_threads(threads)
    if args.full_determinism or (is_canonical(args) and device.type != "cpu"):
        compute_deterministically()
    if args.tf32 is not None:
        allow_tf32(device, is_allowed=args.tf32)


def compute_deterministically(*, warn_only: bool = False) -> None:
    """Restrict torch to deterministic algorithms.

    Args:
        warn_only: Whether an operation without such an algorithm only warns; else it raises.
    """
    os.environ.update(_DETERMINISTIC)
    torch.use_deterministic_algorithms(True, warn_only=warn_only)  # noqa: FBT003 - torch's signature
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def allow_tf32(device: torch.device, *, is_allowed: bool) -> None:
    """Set whether float32 matrix products use TF32.

    Raises:
        ConfigError: TF32 is requested and the device does not support it.
    """
    has_tf32 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _TF32_SINCE
    if is_allowed and not has_tf32:
        raise ConfigError(
            "`tf32`=True needs an NVIDIA GPU of the Ampere generation or newer, but this run "
            f"trains on `{device}`: omit it"
        )
    if has_tf32:
        backends: Any = torch.backends  # missing in torch's stubs
        backends.fp32_precision = "tf32" if is_allowed else "ieee"


def place_model(args: TrainingArguments, model: nn.Module, device: torch.device) -> nn.Module:
    """Return the model on the device, unless a subclass of the arguments places models itself."""
    return model if args.place_model_on_device is False else model.to(device)


def configure_model(args: TrainingArguments, model: nn.Module) -> None:
    """Set whether a Transformers model caches keys and values, which training does not use."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "use_cache"):
        config.use_cache = args.use_cache
