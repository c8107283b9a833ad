"""Losses that are no number, or far above those before (``rollback_on``)."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from resilient.errors import ConfigError
from resilient.train.data.stream_reading import is_stream
from resilient.train.measures.episodes import RECENT, Episodes, LossBroke, kind_of, spike_limit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.train.arguments import TrainingArguments


class LossBroken(Exception):
    """The step that was about to be made would spoil the weights.

    Attributes:
        reason: for a person.
        kind: ``nan``, ``inf`` or ``spike``.
        figure: ``loss`` or ``grad_norm``.
        numbers: the loss and its limit, of a spike.
    """

    def __init__(
        self, reason: str, kind: str, figure: str = "loss", numbers: tuple[float, ...] = ()
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind = kind
        self.figure = figure
        self.numbers = numbers

    def told(self, step: int) -> LossBroke:
        """Return the fact, of the step that is not made."""
        return LossBroke(self.kind, self.figure, step, *self.numbers)


class LossWatch:
    """Judges the loss of every step before its update; the same on all ranks, and saved.

    A spike is a loss above the median of recent ones by more than so many deviations (their
    median one, made comparable with a normal distribution's, and at least 1 % of the median).

    Args:
        args: ``rollback_on``, ``loss_spike_deviations``.
        device: where losses live.
        ranks: how many train together and know losses of their own.

    Attributes:
        episodes: what is told of numbers that were read anyway, also if no step is judged.
    """

    def __init__(self, args: TrainingArguments, device: torch.device, ranks: int) -> None:
        self.episodes = Episodes(args)
        self.is_on = args.rollback_on != "off"
        self._finds_spikes = args.rollback_on == "spike"
        self._ranks = ranks
        self._deviations = args.loss_spike_deviations
        self._recent: deque[float] = deque(maxlen=RECENT)
        # The sum of the step's losses, and how many ranks' gradients are no number.
        self._step = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, loss: torch.Tensor) -> None:
        """Add the loss of a micro-batch, already divided by the micro-batches of its step."""
        if self.is_on:
            self._step[0] += loss.detach()

    def forget(self) -> None:
        """Forget the losses of a step that is made anew."""
        if self.is_on:
            self._step.zero_()

    def judge(self, grad_norm: torch.Tensor | None) -> None:
        """Judge the step that is about to be made. Collective.

        Args:
            grad_norm: before clipping; None where too large gradients are expected (fp16).

        Raises:
            LossBroken: on all ranks alike.
        """
        if not self.is_on:
            return
        if grad_norm is not None:
            self._step[1] = (~torch.isfinite(grad_norm)).double()
        if self._ranks > 1:
            torch.distributed.all_reduce(self._step)
        total, bad = self._step.tolist()
        self.forget()
        loss = total / self._ranks
        if not math.isfinite(loss):
            raise LossBroken(f"the loss is {loss}", kind_of(loss))
        if bad:
            raise LossBroken("the gradients are no numbers", "nan", "grad_norm")
        limit = self.limit()
        if loss > limit:
            raise LossBroken(
                f"the loss is {loss:.4g}, and {limit:.4g} is the limit by those before",
                "spike",
                numbers=(loss, limit),
            )
        self._recent.append(loss)

    def limit(self) -> float:
        """Return the loss above which a step is a spike."""
        return spike_limit(self._recent, self._deviations) if self._finds_spikes else math.inf

    def state_dict(self) -> dict[str, Any]:
        """Return recent losses; the same on every rank."""
        return {"recent": list(self._recent)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back recent losses."""
        self._recent.clear()
        self._recent.extend(state_dict["recent"])


def watch_for(args: TrainingArguments, dataset: Any, device: torch.device, ranks: int) -> LossWatch:
    """Return what judges the losses of a training on ``dataset``.

    Raises:
        ConfigError: it is to go back, and in this data or without checkpoints it cannot.
    """
    if args.rollback_on != "off" and (is_stream(dataset) or args.save_strategy == "no"):
        raise ConfigError(
            f"`rollback_on`={args.rollback_on!r} needs checkpoints to go back to and a "
            "train_dataset with a length to leave a part of out: set `save_strategy`, give a "
            "map-style dataset, or write 'off'"
        )
    return LossWatch(args, device, ranks)
