"""Search for a batch size that fits into memory.

If a rank runs out of memory in a step, all ranks restore the state from before the step. All ranks
then repeat the step with a smaller batch.

In DDP, ranks communicate during forward and backward passes. If a pass fails on one rank, the other
ranks wait for this rank in a collective. During this search, a rank communicates only after all its
passes of the step. Then the ranks exchange whether a pass failed. The ranks average the gradients
only if no rank failed.
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

# Allocator messages in lower case; torch has one class for accelerators, none for the CPU.
_SAYINGS = (
    *("out of memory", "can't allocate memory", "not enough memory", "allocation failed"),
    "cudnn_status_not_supported",
)
_BUCKET_BYTES = 25 << 20


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is an out-of-memory error that a smaller batch may avoid."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    error_text = str(error).lower()
    return isinstance(error, RuntimeError) and any(message in error_text for message in _SAYINGS)


@dataclass(frozen=True, slots=True)
class AutoBatchSize:
    """Runner of a step's passes: all ranks complete the passes, or all ranks restore their state.

    Attributes:
        model: This rank's replica, without wrappers that synchronize it.
        device: Device of the reductions.
        ranks: Number of ranks.
    """

    model: nn.Module
    device: torch.device
    ranks: int = 1

    def attempt(self, run: TrainingRun, passes: Callable[[], None]) -> bool:
        """Run forward and backward passes of a step; False if a rank ran out of memory. Collective.

        If the result is False, all state is restored, and the caller can reduce the batch.

        Raises:
            RuntimeError: On this rank, even a single sample does not fit into memory.
            PeerFailed: On another rank, even a single sample does not fit.
        """
        if self.ranks > 1:
            # Each step begins with rank 0's buffers, as in DDP's forward pass.
            run.strategy.align(run.model)
        saved_state = _StateBefore.of(run, self.model)
        is_least, is_mine, problem = run.layout.batch == 1, False, None
        try:
            passes()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            is_mine = True
            # A stored error would keep the tensors of its frames alive.
            problem = error if is_least else None
        has_failed, trained_parameters = self._agree(run.parameters, failed=is_mine)
        if not has_failed:
            average_gradients(trained_parameters, self.ranks)
            return True
        if problem is not None:
            problem.add_note("a batch of one sample does not fit either")
            raise problem
        if is_least:
            raise PeerFailed("another rank ran out of memory with a batch of one sample")
        saved_state.restore(run, self.model)
        empty_cache(self.device, collect=True)
        return False

    def _agree(
        self, parameters: Sequence[nn.Parameter], *, failed: bool
    ) -> tuple[bool, list[nn.Parameter]]:
        """Return whether a rank failed, and the parameters that have a gradient. Collective."""
        if self.ranks == 1:
            return failed, []
        flags = [failed, *(parameter.grad is not None for parameter in parameters)]
        flag_tensor = torch.tensor(flags, dtype=torch.int32, device=self.device)
        dist.all_reduce(flag_tensor, dist.ReduceOp.MAX)
        any_failed, *gradient_flags = flag_tensor.tolist()
        return bool(any_failed), [
            parameter
            for parameter, has_gradient in zip(parameters, gradient_flags, strict=True)
            if has_gradient
        ]


@dataclass(frozen=True, slots=True)
class _StateBefore:
    """Copy of the state that passes change, made before the passes."""

    random: dict[str, Any]
    buffers: list[torch.Tensor]
    samples: int
    loss: torch.Tensor
    counts: tuple[int, int]

    @staticmethod
    def of(run: TrainingRun, model: nn.Module) -> _StateBefore:
        buffers = [buffer.clone() for buffer in model.buffers()]
        random = RandomState().state_dict()
        return _StateBefore(
            random, buffers, run.cursor.samples, run.meters.mark(), run.counter.mark()
        )

    def restore(self, run: TrainingRun, model: nn.Module) -> None:
        for buffer, old in zip(model.buffers(), self.buffers, strict=True):
            buffer.copy_(old)
        run.optimizer.zero_grad(set_to_none=True)
        for parameter in run.all_parameters:
            parameter.grad = None
        run.cursor.samples = self.samples
        run.loss_guard.forget()
        run.meters.rewind(self.loss)
        run.counter.rewind(self.counts)
        # Last, so that the next try draws the same samples and dropout masks as this one.
        RandomState().load_state_dict(self.random)


def average_gradients(parameters: Sequence[nn.Parameter], ranks: int) -> None:
    """Average gradients over ranks; a missing gradient counts as zero. Collective."""
    bucket: list[torch.Tensor] = []
    size = 0
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        if bucket and (size + gradient.nbytes > _BUCKET_BYTES or gradient.dtype != bucket[0].dtype):
            _average(bucket, ranks)
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        _average(bucket, ranks)


def _average(gradients: list[torch.Tensor], ranks: int) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    # Divide first, as DDP does, so that sums stay in the range of low precision.
    flat.div_(ranks)
    dist.all_reduce(flat)
    parts = torch.split(flat, [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def batch_size_search_for(
    args: TrainingArguments, strategy: Strategy, model: nn.Module, session: Session
) -> AutoBatchSize | None:
    """Return the search for the batch size; None if no search is requested.

    Raises:
        ConfigError: Ranks communicate in each pass, so a rank must not fail in a pass.
    """
    if not args.auto_find_batch_size:
        return None
    if strategy.name not in ("single", "ddp"):
        raise ConfigError(
            f"`auto_find_batch_size` needs one process or replicas, but {strategy.name} is "
            "neither: its ranks compute each pass together, and a rank without memory would leave "
            "the others waiting; find the batch size with a short run, or halve it by hand"
        )
    if args.ddp_comm_hook != "no":
        raise ConfigError(
            "`auto_find_batch_size` averages gradients itself, so "
            f"`ddp_comm_hook`={args.ddp_comm_hook!r} would have no effect: use one of them"
        )
    return AutoBatchSize(strategy.unwrap(model), session.device, session.world.size)
