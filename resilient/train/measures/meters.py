"""Sums of the loss since the last log and since the start, on the device; no wait per step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from resilient.world.sums import NearSums


@dataclass(frozen=True, slots=True)
class _Begun:
    """The loss of one step while ranks add it up.

    Attributes:
        losses: of this rank; they are known by being the same list.
        read: returns the sum, when all ranks have given theirs.
    """

    losses: list[Any]
    read: Callable[[], float]


class Meters:
    """What this rank has measured and not yet logged; each rank saves its own.

    Sums are float64, so their value hardly depends on how often they are read.

    Args:
        device: where losses live.
        ranks: how many ranks train together.
        filters: whether a loss that is no number counts as the mean of those before it since the
            last log (``logging_nan_inf_filter``). Only what is logged is filtered.
    """

    def __init__(self, device: torch.device, ranks: int, *, filters: bool = False) -> None:
        self._ranks = ranks
        self._filters = filters
        # On the CPU a number of Python, which adds up to the same bits sooner.
        self._is_number = device.type == "cpu"
        self._recent: Any = self._nothing(device)
        self._logged = torch.zeros((), dtype=torch.float64, device=device)
        self._grad_norm = torch.zeros((), device=device)
        self.recent_steps = 0
        self.logged_steps = 0
        self.learning_rate = 0.0
        self._step_losses: list[Any] = []
        self._begun: dict[int, _Begun] = {}

    def add_loss(self, loss: torch.Tensor) -> None:
        """Add the loss of a micro-batch, already divided by the micro-batches of its step."""
        if self._is_number:
            value = loss.item()
            self._step_losses.append(value)
            if self._filters and not math.isfinite(value):
                value = self._recent / (1 + self.recent_steps)
            self._recent += value
            return
        self._step_losses.append(loss.detach())
        self._recent += self._filtered(loss) if self._filters else loss

    def _filtered(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss, or the field's stand-in for one that is NaN or infinite.

        Where it lies on an accelerator nobody waits to know what it is.
        """
        stand_in = self._recent / (1 + self.recent_steps)
        return torch.where(torch.isfinite(loss), loss.double(), stand_in)

    def _nothing(self, device: torch.device) -> Any:
        return 0.0 if self._is_number else torch.zeros((), dtype=torch.float64, device=device)

    def mark(self) -> torch.Tensor:
        """Return what ``rewind`` needs to forget losses that are added from now on."""
        return self._recent_sum().clone()

    def rewind(self, mark: torch.Tensor) -> None:
        """Forget the losses that were added since ``mark``."""
        self._recent = mark.item() if self._is_number else mark.clone()
        self._step_losses.clear()

    def _recent_sum(self) -> torch.Tensor:
        """Return the sum since the last log, shape ()."""
        return torch.full_like(self._logged, self._recent) if self._is_number else self._recent

    def end_step(self, grad_norm: torch.Tensor, learning_rate: float | torch.Tensor) -> None:
        """Count a step; ``grad_norm`` (scalar, before clipping) is kept, not read.

        A learning rate that is a tensor changes in place, so it is read.
        """
        self._grad_norm = grad_norm
        self.learning_rate = float(learning_rate)
        self.recent_steps += 1

    def take_step(self) -> list[Any]:
        """Return the losses of the step's micro-batches; those on a device are not read yet."""
        losses, self._step_losses = self._step_losses, []
        return losses

    def begin_mean(self, near: NearSums | None = None) -> None:
        """Begin to add the loss of this step over ranks, beside what follows. Collective.

        No more is added to the step. ``means`` waits for the sum; when it has it, every rank was
        here.

        Args:
            near: adds numbers of all ranks, where they are on one host; the same on all of them.
        """
        if self._ranks == 1:
            return
        losses = self._step_losses
        total = self._sums([losses])
        if near is not None and self._is_number:
            read = partial(near.total, near.give(total.item()))
        else:
            read = partial(_reduced, total, dist.all_reduce(total, async_op=True))
        self._begun[id(losses)] = _Begun(losses, read)

    def means(self, steps: list[list[Any]]) -> list[float]:
        """Return the loss of each step over all ranks, from what ``take_step`` gave. Collective."""
        if self._ranks == 1 and self._is_number:
            return [float(sum(losses)) for losses in steps]
        begun, self._begun = self._begun, {}
        rest = [losses for losses in steps if id(losses) not in begun]
        totals = iter(self._add_up(rest) if rest else ())
        found = [
            begun[id(losses)].read() if id(losses) in begun else next(totals) for losses in steps
        ]
        return [one / self._ranks for one in found]

    def _add_up(self, steps: list[list[Any]]) -> list[float]:
        many = self._sums(steps)
        if self._ranks > 1:
            dist.all_reduce(many)
        added: list[float] = many.tolist()
        return added

    def _sums(self, steps: list[list[Any]]) -> torch.Tensor:
        """Return the loss of each step on this rank, shape (steps,)."""
        sums, device = [sum(losses) for losses in steps], self._logged.device
        if self._is_number:
            return torch.tensor(sums).double()
        return torch.stack([torch.as_tensor(one, device=device).double() for one in sums])

    def take(self) -> dict[str, float]:
        """Return the means since the last log and start anew. Collective."""
        loss = self._mean(self._recent_sum(), self.recent_steps)
        self._logged += self._recent
        self.logged_steps += self.recent_steps
        self._recent = self._nothing(self._logged.device)
        self.recent_steps = 0
        return {
            "loss": loss,
            "grad_norm": float(self._grad_norm),
            "learning_rate": self.learning_rate,
        }

    def training_loss(self) -> float:
        """Return the mean loss of all steps of the run, of all its lives. Collective."""
        return self._mean(self._logged + self._recent, self.logged_steps + self.recent_steps)

    def _mean(self, total: torch.Tensor, steps: int) -> float:
        """Return the mean per step over all ranks; a rank that is new has no steps to weigh."""
        pair = torch.stack([total, torch.full_like(total, steps)])
        if self._ranks > 1:
            dist.all_reduce(pair)
        summed, count = pair.tolist()
        return summed / count if count else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of this rank."""
        return {
            "recent": self._recent_sum(),
            "logged": self._logged,
            "grad_norm": self._grad_norm,
            "recent_steps": self.recent_steps,
            "logged_steps": self.logged_steps,
            "learning_rate": self.learning_rate,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back the sums."""
        self.rewind(state_dict["recent"].to(self._logged))
        self._logged.copy_(state_dict["logged"])
        self._grad_norm = state_dict["grad_norm"].to(self._logged.device).clone()
        self.recent_steps = state_dict["recent_steps"]
        self.logged_steps = state_dict["logged_steps"]
        self.learning_rate = state_dict["learning_rate"]


def _reduced(total: torch.Tensor, work: Any) -> float:
    """Return the sum of all ranks, shape (1,), once ``work`` has added it up."""
    work.wait()
    return float(total)
