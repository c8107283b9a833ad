"""Detection of NaN, infinite and spiking losses, and the check of each step for ``rollback_on``.

NaN, infinite values and spikes are reported for every value of ``rollback_on``. This detection uses
only values that other code reads in any case. These values are the logged mean losses and gradient
norms. When the sample ledger reads the losses of all steps, the detection uses these losses too. No
step waits for the detection. A loss that the log leaves out (``logging_nan_inf_filter``) is
detected before the next save. If ``rollback_on`` is not "off", the guard also checks the loss of
every step before its update.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from resilient.errors import ConfigError
from resilient.events import Event, Level
from resilient.train.data.streaming import is_stream

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from resilient.train.arguments import TrainingArguments

RECENT = 128
LOSSES_TO_LEARN = 16
_SIGMA = 1.4826  # standard deviation / median absolute deviation, for a normal distribution
_LEAST_SHARE = 0.01
_ENDS = "training is broken from here on, unless it recovers by itself"
_HINT = '`rollback_on`="nan" or "spike" goes back and skips the data'


@dataclass(frozen=True, slots=True)
class LossDivergenceDetected(Event):
    """The loss or the gradient norm stopped being a number, or the loss is a spike.

    Emitted once until the numbers are good again, for every value of ``rollback_on``.

    Attributes:
        kind: ``nan``, ``inf`` or ``spike``.
        figure: ``loss`` or ``grad_norm``.
        global_step: First step known to be affected.
        value: Loss of a spike; None for NaN and inf.
        limit: Loss above which a loss is a spike; None for NaN and inf.
    """

    level: ClassVar[Level] = Level.WARNING
    kind: str
    figure: str
    global_step: int
    value: float | None = None
    limit: float | None = None

    def message(self) -> str:
        """Format the fault, the step and the remedy."""
        if self.value is None or self.limit is None:
            return f"the {self.figure} is {self.kind} in step {self.global_step}: {_ENDS}; {_HINT}"
        return (
            f"the loss is a spike in step {self.global_step}: {self.value:.4g}, above the limit "
            f"of {self.limit:.4g} from earlier losses; {_HINT}"
        )


class BrokenLossEpisodes:
    """Detector of the start and end of a series of broken numbers; the same on all ranks.

    Args:
        args: ``loss_spike_deviations`` and ``fp16``. With ``fp16`` an infinite norm is not a fault:
            it only reduces the loss scale.

    Attributes:
        is_broken: Whether losses are NaN or infinite now.
    """

    def __init__(self, args: TrainingArguments) -> None:
        self._expects_infinite = args.fp16
        self._deviations = args.loss_spike_deviations
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._kind = self._kind_of_steps = ""
        self._was_read = False

    @property
    def is_broken(self) -> bool:
        """True if losses are NaN or infinite now; a spike does not count."""
        return {self._kind, self._kind_of_steps} & {"nan", "inf"} != set()

    def log(self, step: int, loss: float, grad_norm: float) -> list[LossDivergenceDetected]:
        """Return the events for the numbers logged after ``step``."""
        figures = {"loss": loss}
        if not self._expects_infinite:
            figures["grad_norm"] = grad_norm
        nonfinite_name = next(
            (name for name, figure in figures.items() if not math.isfinite(figure)), ""
        )
        limit = spike_limit(self._recent, self._deviations)
        if nonfinite_name:
            event = LossDivergenceDetected(kind_of(figures[nonfinite_name]), nonfinite_name, step)
        elif loss > limit:
            event = LossDivergenceDetected("spike", "loss", step, loss, limit)
        else:
            event = None
        if math.isfinite(loss):
            # Include spikes, so that a loss that stays high becomes the reference for later losses.
            self._recent.append(loss)
        # A mean may contain a step that was already reported and has passed.
        is_new = event is not None and self._is_new(event.kind)
        is_new = is_new and not (nonfinite_name == "loss" and self._was_read)
        self._was_read = False
        self._kind = event.kind if event else ""
        return [event] if event and is_new else []

    def read(self, last_step: int, losses: Sequence[float]) -> list[LossDivergenceDetected]:
        """Return the events for the losses of all steps up to ``last_step``."""
        first_step = last_step - len(losses) + 1
        nonfinite_losses = [
            (step, loss) for step, loss in enumerate(losses, first_step) if not math.isfinite(loss)
        ]
        if not losses:
            return []
        is_new = bool(nonfinite_losses) and self._is_new("nan")
        self._was_read |= bool(nonfinite_losses)
        self._kind_of_steps = "" if math.isfinite(losses[-1]) else kind_of(losses[-1])
        return (
            [
                LossDivergenceDetected(
                    kind_of(nonfinite_losses[0][1]), "loss", nonfinite_losses[0][0]
                )
            ]
            if is_new
            else []
        )

    def _is_new(self, kind: str) -> bool:
        return not self.is_broken and (kind != "spike" or self._kind != "spike")


def kind_of(value: float) -> str:
    """Return the kind of a non-finite value."""
    return "nan" if math.isnan(value) else "inf"


def spike_limit(recent: Iterable[float], deviations: float) -> float:
    """Return the loss above which a loss is a spike; infinite until enough losses are known."""
    recent = [*recent]
    if len(recent) < LOSSES_TO_LEARN:
        return math.inf
    median = statistics.median(recent)
    deviation = _SIGMA * statistics.median(abs(loss - median) for loss in recent)
    return median + deviations * max(deviation, _LEAST_SHARE * abs(median))


class LossDiverged(Exception):
    """The loss broke, so the next update would damage the weights.

    Attributes:
        reason: Description for people.
        kind: ``nan``, ``inf`` or ``spike``.
        figure: ``loss`` or ``grad_norm``.
        numbers: Loss and limit of a spike.
    """

    def __init__(
        self, reason: str, kind: str, figure: str = "loss", numbers: tuple[float, ...] = ()
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind = kind
        self.figure = figure
        self.numbers = numbers

    def as_event(self, step: int) -> LossDivergenceDetected:
        """Return the event for ``step``, whose update is skipped."""
        return LossDivergenceDetected(self.kind, self.figure, step, *self.numbers)


class LossGuard:
    """Check of every step's loss before its update; the same on all ranks, and saved.

    A spike is a loss far above the median of recent losses. The limit is a number of deviations.
    A deviation is the median absolute deviation, scaled as for a normal distribution, and at least
    1 % of the median.

    Args:
        args: ``rollback_on``, ``loss_spike_deviations``.
        device: Device of the losses.
        ranks: Number of ranks with separate losses.

    Attributes:
        episodes: Detector for numbers that other code reads, also used if ``rollback_on`` is off.
    """

    def __init__(self, args: TrainingArguments, device: torch.device, ranks: int) -> None:
        self.episodes = BrokenLossEpisodes(args)
        self.is_on = args.rollback_on != "off"
        self._finds_spikes = args.rollback_on == "spike"
        self._ranks = ranks
        self._deviations = args.loss_spike_deviations
        self._recent: deque[float] = deque(maxlen=RECENT)
        # Sum of the step's losses, and number of ranks with non-finite gradients.
        self._step = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, loss: torch.Tensor) -> None:
        """Add the loss of a micro-batch, already divided by the micro-batches of its step."""
        if self.is_on:
            self._step[0] += loss.detach()

    def forget(self) -> None:
        """Drop the losses of a step that is repeated."""
        if self.is_on:
            self._step.zero_()

    def judge(self, grad_norm: torch.Tensor | None) -> None:
        """Judge a step before its update. Collective.

        Args:
            grad_norm: Gradient norm before clipping; None if infinite gradients are expected
                (fp16).

        Raises:
            LossDiverged: The loss broke. All ranks raise it.
        """
        if not self.is_on:
            return
        if grad_norm is not None:
            self._step[1] = (~torch.isfinite(grad_norm)).double()
        if self._ranks > 1:
            torch.distributed.all_reduce(self._step)
        total, nonfinite_count = self._step.tolist()
        self.forget()
        loss = total / self._ranks
        if not math.isfinite(loss):
            raise LossDiverged(f"the loss is {loss}", kind_of(loss))
        if nonfinite_count:
            raise LossDiverged("the gradients are not finite", "nan", "grad_norm")
        limit = self.limit()
        if loss > limit:
            raise LossDiverged(
                f"the loss is {loss:.4g}, above the limit of {limit:.4g} from earlier losses",
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
        """Restore recent losses."""
        self._recent.clear()
        self._recent.extend(state_dict["recent"])


def loss_guard_for(
    args: TrainingArguments, dataset: Any, device: torch.device, ranks: int
) -> LossGuard:
    """Return the guard of the losses of a training on ``dataset``.

    Raises:
        ConfigError: Rollback is requested, but the data or missing checkpoints prevent it.
    """
    if args.rollback_on != "off" and (is_stream(dataset) or args.save_strategy == "no"):
        raise ConfigError(
            f"`rollback_on`={args.rollback_on!r} needs checkpoints to go back to, and a "
            "train_dataset with a length to skip a part of: set `save_strategy`, use a map-style "
            "dataset, or write 'off'"
        )
    return LossGuard(args, device, ranks)
