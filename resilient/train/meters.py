"""Loss sums on the device, and counters of tokens and floating-point operations.

No step waits until a loss sum is read from the device. The counters cover all ranks, and all
restarts of the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from resilient.train.events import TokensNotCounted
from resilient.train.model.loss import base_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from resilient.distributed.host_sum import HostLocalSum
    from resilient.events import Emitter
    from resilient.train.state import TrainerState


@dataclass(frozen=True, slots=True)
class _Begun:
    """Loss of one step while it is reduced over ranks.

    Attributes:
        losses: Losses of this rank; the identity of the list identifies the step.
        read: Function that waits for all ranks and returns the sum.
    """

    losses: list[Any]
    read: Callable[[], float]


class Meters:
    """Measurements of this rank that are not logged yet; each rank saves its own object.

    Sums are float64, so their value hardly depends on how often they are read.

    Args:
        device: Device of the losses.
        ranks: Number of ranks that train together.
        filters: Replace a non-finite loss by the mean of the losses since the last log
            (``logging_nan_inf_filter``). Only logged values are filtered.
    """

    def __init__(self, device: torch.device, ranks: int, *, filters: bool = False) -> None:
        self._ranks = ranks
        self._filters = filters
        # On the CPU a Python number, which gives the same bits faster.
        self._is_number = device.type == "cpu"
        self._recent: Any = self._zero(device)
        self._logged_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._grad_norm = torch.zeros((), device=device)
        self.recent_steps = 0
        self.logged_steps = 0
        self.learning_rate = 0.0
        self._step_losses: list[Any] = []
        self._pending_reads: dict[int, _Begun] = {}

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
        """Return the loss; replace a NaN or infinite loss as Transformers does.

        On an accelerator this does not wait for the loss value.
        """
        stand_in = self._recent / (1 + self.recent_steps)
        return torch.where(torch.isfinite(loss), loss.double(), stand_in)

    def _zero(self, device: torch.device) -> Any:
        return 0.0 if self._is_number else torch.zeros((), dtype=torch.float64, device=device)

    def mark(self) -> torch.Tensor:
        """Return a mark of the current losses, for ``rewind``."""
        return self._recent_sum().clone()

    def rewind(self, mark: torch.Tensor) -> None:
        """Drop the losses added since the mark was taken."""
        self._recent = mark.item() if self._is_number else mark.clone()
        self._step_losses.clear()

    def _recent_sum(self) -> torch.Tensor:
        """Return the sum since the last log, shape ()."""
        return torch.full_like(self._logged_sum, self._recent) if self._is_number else self._recent

    def end_step(self, grad_norm: torch.Tensor, learning_rate: float | torch.Tensor) -> None:
        """Count a step; ``grad_norm`` (scalar, before clipping) is kept, not read.

        A tensor learning rate changes in place, so it is read now.
        """
        self._grad_norm = grad_norm
        self.learning_rate = float(learning_rate)
        self.recent_steps += 1

    def take_step(self) -> list[Any]:
        """Return the losses of the step's micro-batches; device values are not read yet."""
        losses, self._step_losses = self._step_losses, []
        return losses

    def begin_mean(self, host_sum: HostLocalSum | None = None) -> None:
        """Start the reduction of this step's loss over ranks in the background. Collective.

        Nothing more may be added to the step. ``means`` waits for the sum. When ``means`` returns,
        every rank has called this method.

        Args:
            host_sum: Sum over all ranks of one host; the same object on all of these ranks.
        """
        if self._ranks == 1:
            return
        losses = self._step_losses
        total = self._sums([losses])
        if host_sum is not None and self._is_number:
            read_sum = partial(host_sum.total, host_sum.give(total.item()))
        else:
            read_sum = partial(_reduced, total, dist.all_reduce(total, async_op=True))
        self._pending_reads[id(losses)] = _Begun(losses, read_sum)

    def means(self, steps: list[list[Any]]) -> list[float]:
        """Return each step's loss over all ranks, from ``take_step``'s results. Collective."""
        if self._ranks == 1 and self._is_number:
            return [float(sum(losses)) for losses in steps]
        pending_reads, self._pending_reads = self._pending_reads, {}
        unread_steps = [losses for losses in steps if id(losses) not in pending_reads]
        totals = iter(self._add_up(unread_steps) if unread_steps else ())
        means = [
            pending_reads[id(losses)].read() if id(losses) in pending_reads else next(totals)
            for losses in steps
        ]
        return [total / self._ranks for total in means]

    def _add_up(self, steps: list[list[Any]]) -> list[float]:
        sums = self._sums(steps)
        if self._ranks > 1:
            dist.all_reduce(sums)
        added: list[float] = sums.tolist()
        return added

    def _sums(self, steps: list[list[Any]]) -> torch.Tensor:
        """Return the loss of each step on this rank, shape (steps,)."""
        sums, device = [sum(losses) for losses in steps], self._logged_sum.device
        if self._is_number:
            return torch.tensor(sums).double()
        return torch.stack([torch.as_tensor(value, device=device).double() for value in sums])

    def take(self) -> dict[str, float]:
        """Return the means since the last log and reset them. Collective."""
        loss = self._mean(self._recent_sum(), self.recent_steps)
        self._logged_sum += self._recent
        self.logged_steps += self.recent_steps
        self._recent = self._zero(self._logged_sum.device)
        self.recent_steps = 0
        return {
            "loss": loss,
            "grad_norm": float(self._grad_norm),
            "learning_rate": self.learning_rate,
        }

    def training_loss(self) -> float:
        """Return the mean loss of all steps of the run, over all attempts. Collective."""
        return self._mean(self._logged_sum + self._recent, self.logged_steps + self.recent_steps)

    def _mean(self, total: torch.Tensor, steps: int) -> float:
        """Return the mean per step over all ranks. A rank without steps has no weight."""
        pair = torch.stack([total, torch.full_like(total, steps)])
        if self._ranks > 1:
            dist.all_reduce(pair)
        summed, count = pair.tolist()
        return summed / count if count else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of this rank."""
        return {
            "recent": self._recent_sum(),
            "logged": self._logged_sum,
            "grad_norm": self._grad_norm,
            "recent_steps": self.recent_steps,
            "logged_steps": self.logged_steps,
            "learning_rate": self.learning_rate,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the sums."""
        self.rewind(state_dict["recent"].to(self._logged_sum))
        self._logged_sum.copy_(state_dict["logged"])
        self._grad_norm = state_dict["grad_norm"].to(self._logged_sum.device).clone()
        self.recent_steps = state_dict["recent_steps"]
        self.logged_steps = state_dict["logged_steps"]
        self.learning_rate = state_dict["learning_rate"]


def _reduced(total: torch.Tensor, work: Any) -> float:
    """Return the sum of all ranks, shape (1,), after waiting for ``work``."""
    work.wait()
    return float(total)


# Operations are reduced over ranks in two halves, because their number exceeds 64 bits.
_HALF_BITS = 32


@dataclass(slots=True)
class UsageCounter:
    """Counter of this rank, which adds the counts of all ranks to the state.

    The counter is empty when a checkpoint is made, because ``settle`` is called before. Counts are
    whole numbers, so they do not depend on when ``settle`` runs.

    Attributes:
        state: Has ``num_input_tokens_seen`` and ``total_flos``.
        device: Device of the reduction.
        ranks: Number of ranks in the reduction.
        copies: Number of ranks that train on the same samples.
        tokens_of: Function from a batch to its token count; None if tokens are not counted.
        flos_of: Function from a batch to its number of operations; None if unknown.
    """

    state: TrainerState
    device: torch.device
    ranks: int = 1
    copies: int = 1
    tokens_of: Callable[[Any], int] | None = None
    flos_of: Callable[[Any], int] | None = None
    is_on: bool = field(init=False)
    _tokens: int = 0
    _flos: int = 0

    def __post_init__(self) -> None:
        self.is_on = self.tokens_of is not None or self.flos_of is not None

    def add(self, inputs: Any) -> None:
        """Count a trained micro-batch."""
        if self.tokens_of is not None:
            self._tokens += self.tokens_of(inputs)
        if self.flos_of is not None:
            self._flos += int(self.flos_of(inputs))

    def mark(self) -> tuple[int, int]:
        """Return a mark of the current counts, for ``rewind``."""
        return self._tokens, self._flos

    def rewind(self, mark: tuple[int, int]) -> None:
        """Drop the counts since ``mark``."""
        self._tokens, self._flos = mark

    def end_step(self) -> None:
        """Add the step's tokens to the state, if they are requested. Collective."""
        if self.tokens_of is not None:
            self.settle()

    def settle(self) -> None:
        """Add the counts since the last call to the state. Collective, if anything is counted."""
        if not self.is_on:
            return
        tokens, flos = self._tokens, self._flos
        self._tokens = self._flos = 0
        if self.ranks > 1:
            high, low = divmod(flos, 1 << _HALF_BITS)
            counts = torch.tensor([tokens, high, low], device=self.device)
            dist.all_reduce(counts)
            tokens, high, low = (count // self.copies for count in counts.tolist())
            flos = (high << _HALF_BITS) + low
        self.state.num_input_tokens_seen += tokens
        self.state.total_flos += flos


class TokenCount:
    """Token count of a batch's main input, with or without padding.

    Args:
        model: Model whose ``main_input_name`` names the main input; ``input_ids`` by default.
        padding: Padding token, used if there is no ``attention_mask``; None: unknown.
        emit: Receives one event about batches that cannot be counted.
        skips_padding: Whether padding does not count.
    """

    def __init__(
        self, model: nn.Module, padding: int | None, emit: Emitter, *, skips_padding: bool
    ) -> None:
        self._name = main_input_name(model)
        self._padding = padding
        self._emit = emit
        self._skips_padding = skips_padding
        self._is_reported = False

    def __call__(self, inputs: Any) -> int:
        """Return the number of tokens; 0 without the main input."""
        main = inputs.get(self._name) if isinstance(inputs, Mapping) else None
        if main is None:
            self._report_uncounted(
                f"it holds no `{self._name}`; `main_input_name` of the model names another"
            )
            return 0
        if not self._skips_padding:
            return int(main.numel())
        if "attention_mask" in inputs:
            return int(inputs["attention_mask"].sum())
        if self._padding is not None:
            return int((main != self._padding).sum())
        self._report_uncounted("the padding is unknown, so all tokens are counted")
        return int(main.numel())

    def _report_uncounted(self, why: str) -> None:
        if not self._is_reported:
            self._is_reported = True
            self._emit(TokensNotCounted(why))


def main_input_name(model: nn.Module) -> str:
    """Return the name of a model's main input in a batch."""
    return str(getattr(base_of(model), "main_input_name", "input_ids"))


def transformer_flos(model: nn.Module, parameters: int, inputs: Any) -> int:
    """Return ``6 * tokens * parameters``: approximate forward and backward of a transformer.

    0 if the batch lacks the main input.
    """
    main = inputs.get(main_input_name(model)) if isinstance(inputs, Mapping) else None
    return 0 if main is None else 6 * int(main.numel()) * parameters
