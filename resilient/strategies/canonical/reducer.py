"""Sum of the gradients of all micro-batches of a step, and their mean on every rank.

Each rank first adds the gradients of its own micro-batches. Then the ranks exchange these sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import add
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from resilient.errors import ConfigError
from resilient.strategies.canonical.tree_reduce import (
    Node,
    TreeAccumulator,
    TreeReduce,
    add_gradients,
    flat,
    line_of,
    plan_for,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from resilient.strategies.canonical.tree_reduce import TensorSlice

Gradients = list[torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class DtypeGroup:
    """Parameters of one dtype, which are summed together.

    Attributes:
        numbers: Indices of these parameters among all parameters.
        exchange: Reduction over ranks.
    """

    numbers: tuple[int, ...]
    exchange: TreeReduce

    def of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the flat tensors of this group from one tensor per parameter."""
        return [flat(tensors[number]) for number in self.numbers]


class GradientReducer:
    """Reduction of gradients over the micro-batches of all ranks.

    Args:
        parameters: Trained parameters, the same list on every rank.
        leaves: Micro-batches of a step.
        rank: This rank.
        ranks: Number of ranks.
        window_bytes: Bytes that are exchanged at once.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        leaves: int,
        rank: int,
        ranks: int,
        window_bytes: int,
    ) -> None:
        self.parameters = list(parameters)
        self.plan = plan_for(leaves, ranks)
        self.rank, self.ranks = rank, ranks
        by_dtype: dict[torch.dtype, list[int]] = {}
        for number, parameter in enumerate(self.parameters):
            by_dtype.setdefault(parameter.dtype, []).append(number)
        self.lanes = [self._lane(numbers, window_bytes) for numbers in by_dtype.values()]
        self._begin()

    @property
    def leaves(self) -> range:
        """The micro-batches of this rank."""
        return range(*self.plan.runs[self.rank])

    def _lane(self, numbers: list[int], window_bytes: int) -> DtypeGroup:
        parameters = [self.parameters[number] for number in numbers]
        line = line_of([gradient.numel() for gradient in parameters], self.ranks)
        example_tensor = parameters[0].detach()
        return DtypeGroup(
            tuple(numbers), TreeReduce(line, self.plan, self.rank, example_tensor, window_bytes)
        )

    def _begin(self) -> None:
        self._joining: TreeAccumulator[Gradients] = TreeAccumulator(self.plan.leaves, add_gradients)
        self._losses: list[torch.Tensor] = []

    def take(self, leaf: int, loss: torch.Tensor) -> None:
        """Move the gradients of a micro-batch from the parameters into the sum; record its loss.

        Raises:
            ConfigError: A gradient is sparse.
        """
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise ConfigError(
                    f"a gradient of shape {tuple(parameter.shape)} is sparse, but "
                    "reduction='canonical' adds dense gradients: set sparse=False where the "
                    "embedding is created"
                )
        self._joining.take(
            Node(leaf, leaf + 1), [_dense(parameter) for parameter in self.parameters]
        )
        self._losses.append(loss.detach().double())
        for parameter in self.parameters:
            parameter.grad = None

    def finish(self) -> float:
        """Store the mean gradient in every parameter, and return the mean loss. Collective.

        A parameter that no micro-batch used has no gradient.
        """
        partials, loss, used = self._exchange_partial_sums()
        gradients = partials[0] if self.ranks == 1 else self._reduce(partials, used)
        self._scale_alone(gradients)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        return loss

    def finish_own(self) -> tuple[float, Gradients]:
        """Return the mean loss, and this rank's slice of each mean gradient. Collective.

        The parameters have no gradients afterwards. The next call overwrites the returned memory.
        """
        partials, loss, used = self._exchange_partial_sums()
        if self.ranks == 1:
            self._scale_alone(partials[0])
            return loss, [None if partial is None else flat(partial) for partial in partials[0]]
        full_gradients = [self._filled(partial) for partial in partials]
        for lane in self.lanes:
            self._sum_up_own(lane, [lane.of(gradient) for gradient in full_gradients])
        own_gradients = [
            gradient if is_used else None
            for gradient, is_used in zip(self._own_runs, used, strict=True)
        ]
        return loss, own_gradients

    def send_own(self) -> None:
        """Send each rank's updated parameter elements to all other ranks. Collective."""
        for lane in self.lanes if self.ranks > 1 else ():
            full_parameters = lane.of([parameter.detach() for parameter in self.parameters])
            for window in lane.exchange.windows:
                lane.exchange.tell(
                    lane.exchange.mine(full_parameters, window), full_parameters, window
                )

    def run_of(self, number: int) -> TensorSlice:
        """Return this rank's slice of the parameter with index ``number``."""
        for lane in self.lanes:
            if number in lane.numbers:
                run = lane.exchange.line.run(lane.numbers.index(number), self.rank)
                return run._replace(tensor=number)
        raise IndexError(number)

    def _scale_alone(self, gradients: Gradients) -> None:
        """Convert sums to means if this is the only rank."""
        present_gradients = [gradient for gradient in gradients if gradient is not None]
        if self.ranks == 1 and present_gradients:
            torch._foreach_mul_(present_gradients, 1 / self.plan.leaves)

    def _exchange_partial_sums(self) -> tuple[list[Gradients], float, list[bool]]:
        """Return this rank's partial sums, the mean loss, and the used parameters.

        Collective. For each loss, one rank contributes the value and all others contribute 0. The
        order of the ranks therefore does not change the sum.
        """
        partials, losses = self._joining.values(), self._losses
        self._begin()
        leaves, device = self.plan.leaves, self.parameters[0].device
        has_gradient = [
            any(partial[number] is not None for partial in partials)
            for number in range(len(self.parameters))
        ]
        sums = torch.zeros(leaves + len(has_gradient), dtype=torch.float64)
        sums[leaves:] = torch.tensor(has_gradient)
        sums = sums.to(device)
        if losses:
            sums[self.leaves.start : self.leaves.stop] = torch.stack(losses)
        if self.ranks > 1:
            dist.all_reduce(sums)
        counts = sums.tolist()
        accumulator: TreeAccumulator[float] = TreeAccumulator(leaves, add)
        for leaf in range(leaves):
            accumulator.take(Node(leaf, leaf + 1), counts[leaf])
        return partials, accumulator.root() / leaves, [count > 0 for count in counts[leaves:]]

    def _reduce(self, partials: Sequence[Gradients], used: Sequence[bool]) -> Gradients:
        """Return the mean of all ranks' gradients, in the memory of ``partials[0]``. Collective."""
        full_gradients = [self._filled(partial) for partial in partials]
        room = full_gradients[0] if full_gradients else self._filled([None] * len(self.parameters))
        for lane in self.lanes:
            # Windows do not overlap, so overwritten memory has already been sent.
            exchange, target_tensors = lane.exchange, lane.of(room)
            flat_gradients = [lane.of(gradient) for gradient in full_gradients]
            for window in exchange.windows:
                exchange.tell(exchange.sum_up(flat_gradients, window), target_tensors, window)
        return [gradient if is_used else None for gradient, is_used in zip(room, used, strict=True)]

    def _filled(self, gradients: Gradients) -> list[torch.Tensor]:
        """Return gradients with zeros where one is missing."""
        return [
            torch.zeros_like(parameter) if gradient is None else gradient
            for parameter, gradient in zip(self.parameters, gradients, strict=True)
        ]

    def _sum_up_own(self, lane: DtypeGroup, partials: Sequence[Sequence[torch.Tensor]]) -> None:
        """Write this rank's slices of one group's mean gradients to ``_own_runs``. Collective."""
        exchange, own_runs = lane.exchange, lane.of(self._own_runs)
        for window in exchange.windows:
            own_sum, place = exchange.sum_up(partials, window), 0
            for segment in exchange.line.segments(*window.spans[self.rank]):
                count, first = (
                    segment.stop - segment.start,
                    exchange.line.run(segment.tensor, self.rank).start,
                )
                own_runs[segment.tensor][segment.start - first : segment.stop - first] = own_sum[
                    place : place + count
                ]
                place += count

    @cached_property
    def _own_runs(self) -> list[torch.Tensor]:
        """Memory for this rank's runs of all gradients."""
        runs = [self.run_of(number) for number in range(len(self.parameters))]
        return [
            torch.empty(run.stop - run.start, dtype=parameter.dtype, device=parameter.device)
            for parameter, run in zip(self.parameters, runs, strict=True)
        ]


def _dense(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return a parameter's gradient, in memory with the strides of the parameter."""
    gradient = parameter.grad
    if gradient is None or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)
