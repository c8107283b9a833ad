"""Training step with canonical reduction: sampler, passes and checks of equal bits.

Canonical reduction adds gradients in one fixed order, so the result has the same bits at any world
size. All hosts that train together must compute the same bits. These bits must also be those of the
hosts that saved the checkpoint. Before the first step, every rank therefore computes the first
micro-batch with the operations of training. All ranks must get the same bits, and the computation
must leave parameters and buffers unchanged.

Each micro-batch has its own random stream, and the code between steps has another stream. A
micro-batch therefore draws the same numbers, whichever rank computes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from resilient.distributed.coordination import agree
from resilient.distributed.heartbeat import Phase
from resilient.distributed.launch_env import World
from resilient.errors import ConfigError
from resilient.state_dict.rng_state import RandomState
from resilient.strategies.canonical.checks import (
    ImmutabilityCheck,
    arithmetic_of,
    checksum_of,
    digest_of,
    refuse_changed,
    refuse_mixing,
    tensors_of,
)
from resilient.strategies.canonical.tree_reduce import plan_for
from resilient.train.arguments.derived import is_canonical, micro_batches
from resilient.train.data.ordering import Sampling
from resilient.train.data.sampler import (
    KeyedDataset,
    MicroBatch,
    ResumableSampler,
    seed_between_steps,
    seed_worker,
)
from resilient.train.events import ArithmeticMismatchFound

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from resilient.strategies.canonical.updates import ReplicaUpdates
    from resilient.train.arguments import TrainingArguments
    from resilient.train.data.sampler import BatchLayout, DataCursor
    from resilient.train.run import TrainingRun
    from resilient.train.session import Session
    from resilient.train.trainer import Trainer
    from resilient.train.trainer_hooks import TrainerHooks

_HINT = (
    "train on hosts of the same kind, with the same versions and threads_per_rank; or continue "
    "with bits that depend on the host: on_arithmetic_mismatch='continue'"
)


@dataclass(slots=True)
class ArithmeticFingerprint:
    """Arithmetic of a run at its start; a part of every checkpoint.

    Attributes:
        seed: Seed of the micro-batches' random numbers. The seed in a checkpoint overrides a new
            argument.
        digest: Digest of the arithmetic of the hosts that saved; empty before the first save.
        machine: Description of the hosts, for people.
    """

    seed: int
    digest: str = ""
    machine: str = ""

    def state_dict(self) -> dict[str, Any]:
        """Return all fields; the same on every rank."""
        return {"seed": self.seed, "digest": self.digest, "machine": self.machine}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore all fields."""
        self.seed = int(state_dict["seed"])
        self.digest = str(state_dict["digest"])
        self.machine = str(state_dict["machine"])

    def require_same(self, session: Session, topic: str) -> None:
        """Compare the arithmetic of this host with that of the other ranks and the last attempt.

        Collective, over the key-value store and not the collective backend.

        Raises:
            ConfigError: The arithmetic differs, and the arguments forbid continuing.
        """
        own_arithmetic, machine = (
            arithmetic_of(session.device, _dtype(session.args)),
            _machine(session),
        )
        require_same(session, topic, own_arithmetic, f"the same arithmetic ({machine} on rank 0)")
        if self.digest and self.digest != own_arithmetic:
            report_mismatch(
                session,
                f"this attempt computes other bits ({machine}) than the attempt that saved "
                f"({self.machine})",
            )
        self.digest, self.machine = own_arithmetic, machine


def require_same(session: Session, topic: str, digest: str, subject: str) -> None:
    """Compare a digest with the digests of the other ranks. Collective, over the key-value store.

    Args:
        session: Session of this rank.
        topic: Name of the agreement; used once.
        digest: Digest of this rank's result.
        subject: Description of the result that all ranks must share.

    Raises:
        ConfigError: The digests differ, and the arguments forbid continuing.
    """
    if session.world.size == 1:
        return
    comms = session.comms(f"canonical/{topic}")
    groups = agree(comms, "digest", digest, _by_digest, session.args.ddp_timeout)
    if len(groups) > 1:
        text = " and ".join(f"ranks {ranks}" for ranks in groups)
        report_mismatch(session, f"{text} do not compute {subject}")


def report_mismatch(session: Session, problem: str) -> None:
    """Raise, or report why equal bits are not guaranteed if the arguments allow continuing.

    Raises:
        ConfigError: The arguments forbid continuing.
    """
    if session.args.on_arithmetic_mismatch == "stop":
        raise ConfigError(
            f"reduction='canonical' cannot guarantee equal bits: {problem}", hint=_HINT
        )
    if session.world.is_coordinator:
        session.emit(ArithmeticMismatchFound(problem))


def _by_digest(shown: Sequence[str]) -> list[list[int]]:
    """Return the ranks in groups of equal digests."""
    return [
        [rank for rank, digest in enumerate(shown) if digest == text]
        for text in dict.fromkeys(shown)
    ]


def _dtype(args: TrainingArguments) -> torch.dtype:
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32


def _machine(session: Session) -> str:
    if session.device.type == "cuda":
        kind = torch.cuda.get_device_name(session.device)
    else:
        kind = torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__}, {kind}, {torch.get_num_threads()} threads"


class CanonicalSampler(ResumableSampler):
    """Sampler of the micro-batches of a range of leaves, for each step until the epoch's end.

    A leaf is one micro-batch of the tree in which gradients are added. A round of the data is a
    step and has one micro-batch for each leaf.

    Args:
        cursor: Start position.
        layout: Batch layout of an epoch; its ranks are the leaves.
        leaves: Leaves of this rank.
        sampling: Order of the samples.
    """

    def __init__(
        self,
        cursor: DataCursor,
        layout: BatchLayout,
        leaves: range,
        sampling: Sampling | None = None,
    ) -> None:
        super().__init__(cursor, layout, leaves.start, sampling)
        self.leaves = leaves

    def __iter__(self) -> Iterator[MicroBatch]:
        cursor, layout = self.cursor, self.layout
        seed, epoch, start = cursor.seed, cursor.epoch, cursor.samples
        for turn, batches in enumerate(self._rounds()):
            for leaf, indices in zip(self.leaves, batches, strict=True):
                place = start + turn * layout.round_samples + leaf * layout.batch
                yield MicroBatch(indices, (seed, epoch, place))

    def __len__(self) -> int:
        return super().__len__() * len(self.leaves)

    def _rounds(self) -> Iterator[list[list[int]]]:
        """Yield the indices of each leaf, for each step."""
        cursor, layout = self.cursor, self.layout
        if not self.leaves:
            return
        order, start = self.begin_order(), cursor.samples
        if type(self.sampling).batches is not Sampling.batches:
            # Batches that are not slices of the order: build the batches of each leaf separately.
            leaf_batches = [
                self.sampling.batches(order, cursor, layout, leaf) for leaf in self.leaves
            ]
            yield from map(list, zip(*leaf_batches, strict=True))
            return
        for turn in range(layout.rounds_after(start)):
            place = start + turn * layout.round_samples
            yield [layout.micro_batch(order, place, leaf) for leaf in self.leaves]


def micro_batch_owners(args: TrainingArguments, world: World) -> World:
    """Return the owners of a round's micro-batches: ranks, or leaves."""
    return World(0, micro_batches(args)) if is_canonical(args) else world


def sampler_for(
    args: TrainingArguments,
    world: World,
    cursor: DataCursor,
    layout: BatchLayout,
    sampling: Sampling | None = None,
) -> ResumableSampler:
    """Return the sampler of this rank's micro-batches."""
    if not is_canonical(args):
        return ResumableSampler(cursor, layout, world.rank, sampling)
    run = plan_for(micro_batches(args), world.size).runs[world.rank]
    return CanonicalSampler(cursor, layout, range(*run), sampling)


def check_first_micro_batch(trainer: Trainer, run: TrainingRun, seed: int) -> str:
    """Compute the first micro-batch of the next step and restore all state. Collective.

    Args:
        trainer: Trainer whose ``compute_loss`` is called.
        run: Run of the trainer.
        seed: Seed of the micro-batches' random numbers.

    Returns:
        A digest of the loss and all gradients; empty if there is no batch to compute.

    Raises:
        ConfigError: The pass changes a buffer or parameter, or a repetition gives other bits.
    """
    random_state = RandomState().state_dict()
    try:
        batch = _first_batch(trainer, run)
        if batch is None:
            return ""
        # Only accelerators have kernels whose order of addition depends on thread timing.
        times = 1 if trainer.session.device.type == "cpu" else 2
        digests = [_pass(trainer, run, batch, seed) for _ in range(times)]
    finally:
        RandomState().load_state_dict(random_state)
    if len(set(digests)) > 1:
        raise ConfigError(
            "the same micro-batch, computed twice by one rank, gives other gradients, so "
            "reduction='canonical' cannot guarantee equal bits: an operation of the model is not "
            "deterministic, although torch uses deterministic operations",
            hint="search for kernels, of your own or of a package, that add atomically",
        )
    return digests[0]


def _first_batch(trainer: Trainer, run: TrainingRun) -> Any:
    """Return the first micro-batch of the next step; None if it cannot be determined."""
    loader, sampler = run.loader, trainer.train_sampler
    if sampler is None or not run.rounds_left() or not isinstance(loader, DataLoader):
        return None
    if not isinstance(loader.dataset, KeyedDataset):
        return None
    one_rank_sampler = CanonicalSampler(run.cursor, run.layout, range(1), sampler.sampling)
    return loader.collate_fn(loader.dataset.__getitems__(next(iter(one_rank_sampler))))


def _pass(trainer: Trainer, run: TrainingRun, batch: Any, seed: int) -> str:
    checksums_before = {name: checksum_of(tensor) for name, tensor in tensors_of(run.model)}
    unchanged = ImmutabilityCheck.of(run.model)
    samples, count = trainer.get_batch_samples(iter([batch]), 1, trainer.session.device)
    seed_worker((seed, trainer.state.global_step, 0))
    for inputs in samples:
        loss = trainer.step_loss(run.model, trainer._prepare_inputs(_copied(inputs)), count)  # noqa: SLF001 - the field's name
        trainer.precision.backward(loss)
    unchanged.require_same(run.model)
    changed_names = [
        name
        for name, tensor in tensors_of(run.model)
        if checksum_of(tensor) != checksums_before[name]
    ]
    refuse_changed(run.model, changed_names)
    gradients = [parameter.grad for parameter in run.parameters if parameter.grad is not None]
    digest = digest_of([loss, *gradients])
    for parameter in run.all_parameters:
        parameter.grad = None
    return digest


def _copied(inputs: Any) -> Any:
    """Return a batch that may be changed: ``compute_loss`` may remove entries."""
    return dict(inputs) if isinstance(inputs, dict) else inputs


# Name of the checkpoint part with the arithmetic at the run's start.
REDUCTION = "reduction"


@dataclass(frozen=True, slots=True)
class CanonicalPasses:
    """Passes that compute the gradients of a step.

    Attributes:
        updates: Reduction of gradients.
        arithmetic: Arithmetic at the run's start.
        topic: Name of this training in the key-value store.
    """

    updates: ReplicaUpdates
    arithmetic: ArithmeticFingerprint
    topic: str

    def start(self, trainer: Trainer, run: TrainingRun) -> None:
        """Refuse anything that makes the bits depend on the rank, before training. Collective.

        Raises:
            ConfigError: A module mixes micro-batches, or hosts compute different bits.
        """
        refuse_mixing(run.model)
        self.arithmetic.require_same(trainer.session, f"{self.topic}/arithmetic")
        digest = check_first_micro_batch(trainer, run, self.arithmetic.seed)
        text = "the same gradients of the same micro-batch"
        require_same(trainer.session, f"{self.topic}/rehearsal", digest, text)

    def begin_step(self, step: int) -> None:
        """Seed the random numbers drawn before the passes of a step.

        Args:
            step: Number of finished steps.
        """
        self._seed(step, self._leaves)

    def make(self, trainer: Trainer, run: TrainingRun, batches: Iterator[Any]) -> None:
        """Compute the gradients of a step, the same on every rank. Collective.

        Raises:
            ConfigError: A forward pass changed a buffer or a parameter.
        """
        step, own_leaves = trainer.state.global_step, self.updates.reducer.leaves
        trainer.current_gradient_accumulation_steps = 1
        progress = trainer.session.progress
        with progress.during(Phase.LOADING):
            samples, count = trainer.get_batch_samples(
                batches, len(own_leaves), trainer.session.device
            )
        samples, count_arguments = iter(samples), () if count is None else (count,)
        for leaf in own_leaves:
            with progress.during(Phase.LOADING):
                inputs = next(samples)
            immutability_check = ImmutabilityCheck.of(run.model)
            self._seed(step, leaf)
            loss = trainer.training_step(run.model, inputs, *count_arguments)
            immutability_check.require_same(run.model)
            self.updates.reducer.take(leaf, loss)
            if run.counter.is_on:
                run.counter.add(inputs)
            if leaf + 1 < own_leaves.stop:
                trainer.callback_handler.fire("on_substep_end")
        progress.need_others()
        run.add_loss(torch.tensor(self.updates.finish(), dtype=torch.float64))
        run.cursor.advance(run.layout)
        seed_between_steps(self.arithmetic.seed, step, self._leaves)

    @property
    def _leaves(self) -> int:
        return self.updates.reducer.plan.leaves

    def _seed(self, step: int, place: int) -> None:
        seed_worker((self.arithmetic.seed, step, place))


def passes_for(hooks: TrainerHooks, topic: str) -> CanonicalPasses | None:
    """Return the passes of a step; None unless the reduction is canonical.

    Args:
        hooks: Trainer; its ``precision`` updates the bound model.
        topic: Name of this training in the key-value store.
    """
    if not is_canonical(hooks.args):
        return None
    updates: Any = hooks.precision
    return CanonicalPasses(updates, ArithmeticFingerprint(hooks.args.seed), topic)
