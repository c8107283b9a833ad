"""Episodes of broken numbers: told whatever follows from them, by values that are read anyway.

Looked at are the mean losses and the norms of a log, and the losses of all steps when the ledger
reads them. So no step waits for it, and a loss that the log leaves out (``logging_nan_inf_filter``)
is seen at the next save at the latest, before that is made.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from resilient.events import Event, Level

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from resilient.train.arguments import TrainingArguments

RECENT = 128
LOSSES_TO_LEARN = 16
_SIGMA = 1.4826  # a normal distribution's deviation by its median one
_LEAST_SHARE = 0.01
_ENDS = "what training makes from here on is broken too, unless it comes back by itself"
_HINT = '`rollback_on`="nan" or "spike" goes back and leaves the data out'


@dataclass(frozen=True, slots=True)
class LossBroke(Event):
    """The loss, or the norm of the gradients, is no number any more, or the loss a spike.

    Told once until the numbers are good again, and whatever ``rollback_on`` says.

    Attributes:
        kind: ``nan``, ``inf`` or ``spike``.
        figure: ``loss`` or ``grad_norm``.
        global_step: the first step that is known to be so.
        value: of a spike; None for what is no number.
        limit: above which a loss is a spike; None for what is no number.
    """

    level: ClassVar[Level] = Level.WARNING
    kind: str
    figure: str
    global_step: int
    value: float | None = None
    limit: float | None = None

    def line(self) -> str:
        """Say what broke, where, and what could be done."""
        if self.value is None or self.limit is None:
            return f"the {self.figure} is {self.kind} in step {self.global_step}: {_ENDS}; {_HINT}"
        return (
            f"the loss is a spike in step {self.global_step}: {self.value:.4g}, and "
            f"{self.limit:.4g} is the limit by those before; {_HINT}"
        )


class Episodes:
    """Finds where numbers break and where they are good again; the same on all ranks.

    Args:
        args: ``loss_spike_deviations``; with ``fp16`` infinite norms lead to a smaller scale.

    Attributes:
        is_broken: whether losses are no numbers now.
    """

    def __init__(self, args: TrainingArguments) -> None:
        self._expects_infinite = args.fp16
        self._deviations = args.loss_spike_deviations
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._kind = self._kind_of_steps = ""
        self._was_read = False

    @property
    def is_broken(self) -> bool:
        """Whether numbers are none now; a spike passes."""
        return {self._kind, self._kind_of_steps} & {"nan", "inf"} != set()

    def log(self, step: int, loss: float, grad_norm: float) -> list[LossBroke]:
        """Return what is to be told of the numbers that are logged after ``step``."""
        figures = {"loss": loss}
        if not self._expects_infinite:
            figures["grad_norm"] = grad_norm
        broken = next((name for name, one in figures.items() if not math.isfinite(one)), "")
        limit = spike_limit(self._recent, self._deviations)
        if broken:
            found = LossBroke(kind_of(figures[broken]), broken, step)
        elif loss > limit:
            found = LossBroke("spike", "loss", step, loss, limit)
        else:
            found = None
        if math.isfinite(loss):
            # Also a spike: a loss that stays is what later ones are judged by.
            self._recent.append(loss)
        # A mean may have a step in it that was told of and has passed.
        is_new = found is not None and self._is_new(found.kind)
        is_new = is_new and not (broken == "loss" and self._was_read)
        self._was_read = False
        self._kind = found.kind if found else ""
        return [found] if found and is_new else []

    def read(self, last_step: int, losses: Sequence[float]) -> list[LossBroke]:
        """Return what is to be told of the losses of all steps up to ``last_step``."""
        first = last_step - len(losses) + 1
        broken = [(step, one) for step, one in enumerate(losses, first) if not math.isfinite(one)]
        if not losses:
            return []
        is_new = bool(broken) and self._is_new("nan")
        self._was_read |= bool(broken)
        self._kind_of_steps = "" if math.isfinite(losses[-1]) else kind_of(losses[-1])
        return [LossBroke(kind_of(broken[0][1]), "loss", broken[0][0])] if is_new else []

    def _is_new(self, kind: str) -> bool:
        return not self.is_broken and (kind != "spike" or self._kind != "spike")


def kind_of(value: float) -> str:
    """Return the name of what is no number."""
    return "nan" if math.isnan(value) else "inf"


def spike_limit(recent: Iterable[float], deviations: float) -> float:
    """Return the loss above which one is a spike, by those before; infinite until it is known."""
    recent = [*recent]
    if len(recent) < LOSSES_TO_LEARN:
        return math.inf
    median = statistics.median(recent)
    deviation = _SIGMA * statistics.median(abs(one - median) for one in recent)
    return median + deviations * max(deviation, _LEAST_SHARE * abs(median))
