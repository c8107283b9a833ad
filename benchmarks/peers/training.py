"""Live state that all contenders save and load: a model and its AdamW, after one step."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch import nn

from resilient.state_dict.optimizer import NamedOptimizer
from resilient.state_dict.snapshot import Part

if TYPE_CHECKING:
    from collections.abc import Mapping

TENSOR_BYTES = 16 << 20
COLUMNS = 1024


class Model(nn.Module):
    """Model of 16 MiB matrices with a vector for each, as in a transformer; returns a loss."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        count = max(parameters * 4 // TENSOR_BYTES, 1)
        rows = max(parameters // count // COLUMNS, 1)
        matrices = {
            f"h{number}": nn.Parameter(torch.randn(rows, COLUMNS)) for number in range(count)
        }
        vectors = {f"b{number}": nn.Parameter(torch.randn(COLUMNS)) for number in range(count)}
        self.matrices, self.vectors = nn.ParameterDict(matrices), nn.ParameterDict(vectors)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a loss to which every parameter contributes."""
        weight = sum(parameter[:1].mean() for parameter in self.parameters())
        return {"loss": (inputs * weight - labels).square().mean()}


class Training:
    """Model and optimizer with the whole state of a training.

    Attributes:
        model: The model.
        optimizer: AdamW over all parameters, with both moments.
        size_bytes: Size of the tensors of both.
    """

    def __init__(self, parameters: int) -> None:
        torch.manual_seed(0)
        self.model = Model(parameters)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.size_bytes = sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return every tensor by name, for peers that save flat dictionaries."""
        state = self.optimizer.state_dict()["state"]
        moments = {
            f"optimizer.{number}.{kind}": tensor
            for number, kinds in state.items()
            for kind, tensor in kinds.items()
        }
        return {**self.model.state_dict(), **moments}

    def change(self) -> None:
        """Change every tensor, as a training step does."""
        with torch.no_grad():
            for tensor in self.tensors().values():
                tensor.add_(1)

    def nested(self) -> dict[str, object]:
        """Return the state as torch gives it: one dictionary for each of the two."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def parts(self) -> Mapping[str, Part]:
        """Return the state as parts of our checkpoints."""
        named = NamedOptimizer(self.model, self.optimizer)
        return {"model": Part(self.model), "optimizer": Part(named)}


def mega_parameters() -> int:
    """Return the number of parameters that ``MEGAPARAMS`` sets; 30 million by default."""
    return int(float(os.environ.get("MEGAPARAMS", "30")) * 1_000_000)
