"""Optimizer steps over reduced gradients, replicated or sharded (ZeRO 1).

Parameters and gradients are cut into blocks of fixed size. The norm of all gradients is computed
from the norms of the blocks, in the order of the parameters. These norms and their order are the
same for any number of ranks.

A sharded optimizer updates only this rank's span of the parameters, which consists of whole blocks.
Each rank keeps the optimizer state of its span. The optimizer updates each block as one tensor.
Each kernel therefore sees tensors of the same lengths for any number of ranks.

Source: Rajbhandari and others, ZeRO: Memory Optimizations Toward Training Trillion Parameter Models
(2020), section 5.1. ZeRO 1 partitions the optimizer state, but not the parameters.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

from resilient.errors import ConfigError
from resilient.state_dict.optimizer import ParameterSlice
from resilient.strategies.canonical.tree_reduce import BLOCK, flat

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch.optim import Optimizer

    from resilient.strategies.base import OptimizerStepper
    from resilient.strategies.canonical.reducer import GradientReducer


class ReplicaUpdates:
    """Steps of the whole model on every rank, with the whole mean gradient.

    Args:
        inner: Stepper of a single process.
        reducer: Reducer of the gradients.
    """

    def __init__(self, inner: OptimizerStepper, reducer: GradientReducer) -> None:
        self.scaler = inner.scaler
        self.reducer = reducer
        self._inner = inner
        parameters = reducer.parameters
        blocks = (-(-parameter.numel() // BLOCK) for parameter in parameters)
        self._places = (0, *accumulate(blocks))
        wide = any(parameter.dtype == torch.float64 for parameter in parameters)
        self._dtype = torch.float64 if wide else torch.float32

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for a forward pass."""
        return self._inner.autocast()

    def backward(self, loss: torch.Tensor) -> None:
        """Back-propagate the loss of a micro-batch."""
        self._inner.backward(loss)

    def finish(self) -> float:
        """Reduce the gradients over all ranks, and return the mean loss. Collective."""
        return self.reducer.finish()

    def clip(
        self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], max_norm: float
    ) -> torch.Tensor:
        """Clip gradients to ``max_norm`` and return their total norm before clipping.

        The norm is a scalar tensor. ``max_norm`` 0 measures without clipping. Collective.
        """
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        norm: torch.Tensor = torch.linalg.vector_norm(self._block_norms())
        if max_norm > 0:
            clip_grads_with_norm_(self._stepped(parameters), max_norm, norm, foreach=True)
        return norm

    def step(self, optimizer: Optimizer) -> bool:
        """Step the optimizer; return False if the step was skipped after an fp16 overflow."""
        return self._inner.step(optimizer)

    def zero_grad(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        """Free the gradients of the last step."""
        self._inner.zero_grad(optimizer, parameters)

    def _stepped(self, parameters: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """Return the tensors that the optimizer steps for some parameters."""
        return parameters

    def _block_norms(self) -> torch.Tensor:
        """Return the norm of each block of all gradients; 0 for a missing gradient."""
        grads = (
            (0, None if parameter.grad is None else flat(parameter.grad))
            for parameter in self._parameters
        )
        return self._norms(list(enumerate(grads)))

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return self.reducer.parameters

    def _norms(
        self, gradients: Sequence[tuple[int, tuple[int, torch.Tensor | None]]]
    ) -> torch.Tensor:
        """Return the norms of blocks, given as (parameter number, (first element, gradients))."""
        norms = torch.zeros(self._places[-1], dtype=self._dtype, device=self._parameters[0].device)
        blocks: list[torch.Tensor] = []
        places: list[int] = []
        for number, (start, gradient) in gradients:
            if gradient is not None and gradient.numel():
                cut = torch.split(gradient, BLOCK)
                first = self._places[number] + start // BLOCK
                blocks += cut
                places += range(first, first + len(cut))
        if blocks:
            block_norms = torch._foreach_norm(blocks, 2, dtype=self._dtype)  # noqa: SLF001 - as torch's
            norms[torch.tensor(places)] = torch.stack(block_norms)
        return norms


class ShardUpdates(ReplicaUpdates):
    """Optimizer steps of this rank's runs; each rank sends its updated parameters to all ranks.

    Args:
        inner: Stepper of a single process.
        reducer: Reducer of the gradients.
        runs: Tensors that the optimizer steps here, by the number of their parameter.
    """

    def __init__(
        self, inner: OptimizerStepper, reducer: GradientReducer, runs: Mapping[int, ParameterSlice]
    ) -> None:
        super().__init__(inner, reducer)
        self._runs = runs
        self._gradients: list[torch.Tensor | None] = []

    def finish(self) -> float:
        """Reduce the gradients over all ranks, and return the mean loss. Collective."""
        loss, self._gradients = self.reducer.finish_own()
        for number, run in self._runs.items():
            gradient = self._gradients[number]
            parts = [None] * len(run.pieces) if gradient is None else run.cut(gradient)
            for piece, part in zip(run.pieces, parts, strict=True):
                piece.grad = part
        return loss

    def step(self, optimizer: Optimizer) -> bool:
        """Step this rank's pieces, and send them to the other ranks. Collective."""
        stepped = super().step(optimizer)
        self.reducer.send_own()
        return stepped

    def _stepped(self, parameters: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        del parameters
        return [piece for run in self._runs.values() for piece in run.pieces]

    def _block_norms(self) -> torch.Tensor:
        """Return the norm of each block; one rank contributes each norm and all others zeros."""
        norms = self._norms(
            [(nth, (run.start, self._gradients[nth])) for nth, run in self._runs.items()]
        )
        if self.reducer.ranks > 1:
            dist.all_reduce(norms)
        return norms


_OF = "piece_of"


def cut_optimizer(
    model: nn.Module, optimizer: Optimizer, reducer: GradientReducer
) -> dict[int, ParameterSlice]:
    """Replace an optimizer's parameters by this rank's pieces of these parameters.

    If an earlier training of this process has cut a parameter, the parameter keeps its pieces.

    Returns:
        The runs of all its parameters by their number, group by group.

    Raises:
        ConfigError: The optimizer has a parameter that is not trained here, or state of whole
            parameters.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    numbers = {id(parameter): number for number, parameter in enumerate(reducer.parameters)}
    runs: dict[int, ParameterSlice] = {}
    for nth, group in enumerate(optimizer.param_groups):
        parameters, pieces_by_owner = _whole(group["params"])
        untrained_count = sum(id(parameter) not in numbers for parameter in parameters)
        if untrained_count:
            raise ConfigError(
                f"{untrained_count} of the optimizer's {len(parameters)} parameters are not "
                "trained here: with `shard_optimizer_state` pass only parameters of the model that "
                "require gradients"
            )
        for parameter in parameters:
            number = numbers[id(parameter)]
            segment = reducer.run_of(number)
            memory = flat(parameter.detach())[segment.start : segment.stop]
            pieces = pieces_by_owner.get(id(parameter)) or [
                _piece(cut, parameter) for cut in torch.split(memory, BLOCK)
            ]
            is_single_rank = reducer.ranks == 1
            shape = tuple(parameter.shape)
            run = ParameterSlice(
                names[id(parameter)],
                nth,
                shape,
                segment.start,
                memory,
                tuple(pieces),
                is_single_rank,
            )
            _cut_state(optimizer, parameter, run)
            runs[number] = run
        group["params"] = [
            piece for run in runs.values() if run.group == nth for piece in run.pieces
        ]
    return runs


def _cut_state(optimizer: Optimizer, parameter: nn.Parameter, run: ParameterSlice) -> None:
    """Cut a state that exists before the first step (Adagrad's sums) into the pieces."""
    for kind, value in optimizer.state.pop(parameter, {}).items():
        is_cut = torch.is_tensor(value) and value.shape == parameter.shape
        values = run.cut(flat(value)[run.start :][: run.memory.numel()]) if is_cut else ()
        for nth, piece in enumerate(run.pieces):
            value_at_rank = values[nth] if is_cut else value
            optimizer.state[piece][kind] = (
                value_at_rank.clone() if torch.is_tensor(value_at_rank) else value_at_rank
            )


def _whole(
    parameters: Sequence[nn.Parameter],
) -> tuple[list[nn.Parameter], dict[int, list[nn.Parameter]]]:
    """Return the parameters of a group, and the pieces of parameters that were cut earlier."""
    pieces_by_owner: dict[int, list[nn.Parameter]] = {}
    owners: dict[int, nn.Parameter] = {}
    for parameter in parameters:
        owner = getattr(parameter, _OF, parameter)
        owners.setdefault(id(owner), owner)
        if owner is not parameter:
            pieces_by_owner.setdefault(id(owner), []).append(parameter)
    return list(owners.values()), pieces_by_owner


def _piece(memory: torch.Tensor, parameter: nn.Parameter) -> nn.Parameter:
    """Return the tensors that the optimizer steps; an empty run has one empty piece."""
    piece = nn.Parameter(memory, requires_grad=True)
    setattr(piece, _OF, parameter)
    return piece
