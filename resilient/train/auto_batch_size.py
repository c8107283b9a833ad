"""A batch that fits into memory: a step that runs out of it leaves no trace, on any rank.

Ranks that compute together cannot know that one of them fails in the middle of a pass, and would
wait for it in a collective. So here no rank talks to another until all have made all passes of the
step: then they ask who failed, and only if nobody did, gradients are averaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from resilient.errors import ConfigError, PeerFailed
from resilient.state_dict.rng_state import RandomState
from resilient.train.memory import empty_cache

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from resilient.strategies.base import Strategy
    from resilient.train.arguments import TrainingArguments
    from resilient.train.run import TrainingRun
    from resilient.train.session import Session

# What allocators say, in lower case; torch has one class for accelerators, none for the CPU.
_SAYINGS = (
    *("out of memory", "can't allocate memory", "not enough memory", "allocation failed"),
    "cudnn_status_not_supported",
)
_BUCKET_BYTES = 25 << 20


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an error is one of memory that a smaller batch may not have."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = str(error).lower()
    return isinstance(error, RuntimeError) and any(one in said for one in _SAYINGS)


@dataclass(frozen=True, slots=True)
class AutoBatchSize:
    """Makes the passes of a step, or none of them.

    Attributes:
        model: this rank's replica, without what joins it to others.
        device: where ranks meet.
        ranks: how many they are.
    """

    model: nn.Module
    device: torch.device
    ranks: int = 1

    def attempt(self, run: TrainingRun, passes: Callable[[], None]) -> bool:
        """Make forward and backward passes of a step; False if a rank had not the memory.

        Then everything is as it was before, and the batch can be cut. Collective.

        Raises:
            RuntimeError: this rank cannot even train on single samples.
            PeerFailed: another one cannot.
        """
        if self.ranks > 1:
            # Buffers begin each step as rank 0's, as DDP's forward pass would have it.
            run.strategy.align(run.model)
        before = _Before.of(run, self.model)
        is_least, is_mine, problem = run.deal.batch == 1, False, None
        try:
            passes()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            is_mine = True
            # An error that is kept keeps the tensors that are too many, by its frames.
            problem = error if is_least else None
        failed, trained = self._agree(run.parameters, failed=is_mine)
        if not failed:
            average_gradients(trained, self.ranks)
            return True
        if problem is not None:
            problem.add_note("a batch of one sample does not fit either")
            raise problem
        if is_least:
            raise PeerFailed("another rank ran out of memory with a batch of one sample")
        before.bring_back(run, self.model)
        empty_cache(self.device, collect=True)
        return False

    def _agree(
        self, parameters: Sequence[nn.Parameter], *, failed: bool
    ) -> tuple[bool, list[nn.Parameter]]:
        """Return whether a rank failed, and which parameters have gradients on any. Collective."""
        if self.ranks == 1:
            return failed, []
        flags = [failed, *(one.grad is not None for one in parameters)]
        shown = torch.tensor(flags, dtype=torch.int32, device=self.device)
        dist.all_reduce(shown, dist.ReduceOp.MAX)
        any_failed, *trained = shown.tolist()
        return bool(any_failed), [one for one, has in zip(parameters, trained, strict=True) if has]


@dataclass(frozen=True, slots=True)
class _Before:
    """What passes change, as it was."""

    random: dict[str, Any]
    buffers: list[torch.Tensor]
    samples: int
    loss: torch.Tensor
    counts: tuple[int, int]

    @staticmethod
    def of(run: TrainingRun, model: nn.Module) -> _Before:
        buffers = [one.clone() for one in model.buffers()]
        random = RandomState().state_dict()
        return _Before(random, buffers, run.cursor.samples, run.meters.mark(), run.counter.mark())

    def bring_back(self, run: TrainingRun, model: nn.Module) -> None:
        for one, old in zip(model.buffers(), self.buffers, strict=True):
            one.copy_(old)
        run.optimizer.zero_grad(set_to_none=True)
        run.cursor.samples = self.samples
        run.watch.forget()
        run.meters.rewind(self.loss)
        run.counter.rewind(self.counts)
        # Last: samples and dropout of the next attempt are drawn as those of this one were.
        RandomState().load_state_dict(self.random)


def average_gradients(parameters: Sequence[nn.Parameter], ranks: int) -> None:
    """Average gradients over ranks; one that a rank has not counts as zero there. Collective."""
    bucket: list[torch.Tensor] = []
    size = 0
    for one in parameters:
        if one.grad is None:
            one.grad = torch.zeros_like(one)
        gradient = one.grad
        if bucket and (size + gradient.nbytes > _BUCKET_BYTES or gradient.dtype != bucket[0].dtype):
            _average(bucket, ranks)
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        _average(bucket, ranks)


def _average(gradients: list[torch.Tensor], ranks: int) -> None:
    flat = torch.cat([one.reshape(-1) for one in gradients])
    # Divided first, as DDP does, so that sums do not leave the range of low precision.
    flat.div_(ranks)
    dist.all_reduce(flat)
    parts = torch.split(flat, [one.numel() for one in gradients])
    for one, part in zip(gradients, parts, strict=True):
        one.copy_(part.view_as(one))


def fitting_for(
    args: TrainingArguments, strategy: Strategy, model: nn.Module, session: Session
) -> AutoBatchSize | None:
    """Return what finds the batch size, None if nobody asked for it.

    Raises:
        ConfigError: ranks compute together in each pass, so that none may drop out of one.
    """
    if not args.auto_find_batch_size:
        return None
    if strategy.name not in ("single", "ddp"):
        raise ConfigError(
            f"`auto_find_batch_size` needs one process or replicas, and {strategy.name} is neither"
            ": its ranks compute each pass together, and one that runs out of memory leaves the "
            "others waiting; find the batch size with one short run, or halve it by hand"
        )
    if args.ddp_comm_hook != "no":
        raise ConfigError(
            f"`auto_find_batch_size` averages gradients by itself, and `ddp_comm_hook`="
            f"{args.ddp_comm_hook!r} would be left out: use one of them"
        )
    return AutoBatchSize(strategy.unwrap(model), session.device, session.world.size)
