"""An optimizer that steps only this rank's span of the parameters (ZeRO's first stage).

Each rank keeps the state of one span of the line, in blocks of fixed size. A block is stepped as
one tensor at any world size, so each kernel sees the same lengths whatever the number of ranks.

Source: Rajbhandari and others, ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models (2020), section 5.1: the state of the optimizer is partitioned, parameters are not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from resilient.errors import ConfigError
from resilient.state.pieces import Run
from resilient.strategies.canonical.exchange import flat
from resilient.strategies.canonical.layout import BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim import Optimizer

    from resilient.strategies.canonical.reducer import Reducer

_OF = "piece_of"


def cut_optimizer(model: nn.Module, optimizer: Optimizer, reducer: Reducer) -> dict[int, Run]:
    """Give an optimizer this rank's pieces in place of whole parameters.

    One that was cut before, for an earlier training of this process, keeps its pieces.

    Returns:
        The runs of all its parameters by their number, group by group.

    Raises:
        ConfigError: it holds a parameter that is not trained here, or has a state of whole ones.
    """
    names = {id(one): name for name, one in model.named_parameters()}
    numbers = {id(one): number for number, one in enumerate(reducer.parameters)}
    runs: dict[int, Run] = {}
    for nth, group in enumerate(optimizer.param_groups):
        whole, known = _whole(group["params"])
        strange = sum(id(one) not in numbers for one in whole)
        if strange:
            raise ConfigError(
                f"{strange} of the optimizer's {len(whole)} parameters are not trained here: with "
                "`shard_optimizer_state` give it the model's own that require gradients"
            )
        for one in whole:
            number = numbers[id(one)]
            segment = reducer.run_of(number)
            memory = flat(one.detach())[segment.start : segment.stop]
            pieces = known.get(id(one)) or [_piece(cut, one) for cut in torch.split(memory, BLOCK)]
            alone = reducer.ranks == 1
            shape = tuple(one.shape)
            run = Run(names[id(one)], nth, shape, segment.start, memory, tuple(pieces), alone)
            _cut_state(optimizer, one, run)
            runs[number] = run
        group["params"] = [
            piece for run in runs.values() if run.group == nth for piece in run.pieces
        ]
    return runs


def _cut_state(optimizer: Optimizer, parameter: nn.Parameter, run: Run) -> None:
    """Give pieces their part of a state that is there before the first step (Adagrad's sums)."""
    for kind, value in optimizer.state.pop(parameter, {}).items():
        is_cut = torch.is_tensor(value) and value.shape == parameter.shape
        values = run.cut(flat(value)[run.start :][: run.memory.numel()]) if is_cut else ()
        for nth, piece in enumerate(run.pieces):
            given = values[nth] if is_cut else value
            optimizer.state[piece][kind] = given.clone() if torch.is_tensor(given) else given


def _whole(
    held: Sequence[nn.Parameter],
) -> tuple[list[nn.Parameter], dict[int, list[nn.Parameter]]]:
    """Return the parameters of a group, and the pieces of those that were cut before."""
    known: dict[int, list[nn.Parameter]] = {}
    whole: dict[int, nn.Parameter] = {}
    for one in held:
        owner = getattr(one, _OF, one)
        whole.setdefault(id(owner), owner)
        if owner is not one:
            known.setdefault(id(owner), []).append(one)
    return list(whole.values()), known


def _piece(memory: torch.Tensor, parameter: nn.Parameter) -> nn.Parameter:
    """Return what the optimizer steps; a run without elements has one piece, which is empty."""
    piece = nn.Parameter(memory, requires_grad=True)
    setattr(piece, _OF, parameter)
    return piece
