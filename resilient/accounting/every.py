"""How often to save, in the words of ``--every`` and ``save_every`` (pure)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from resilient.errors import ConfigError

_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(s|m|min|h)")
_STEPS = re.compile(r"(\d+) ?steps?")
_ACCEPTED = "use 500steps, 30s, 5m, 1h or auto"


@dataclass(frozen=True, slots=True)
class Every:
    """How often to save: one of the two, or neither, which leaves it to what saves cost.

    Attributes:
        steps: from one save to the next; 0 if that is said otherwise.
        seconds: of training from one save to the next; 0 if that is said otherwise.
    """

    steps: int = 0
    seconds: float = 0.0

    @property
    def is_auto(self) -> bool:
        """Whether the interval follows from what saves cost and how often runs fail."""
        return not self.steps and not self.seconds


def parse_every(text: str, where: str) -> Every:
    """Return what ``text`` says: ``500steps``, ``30s``, ``5m``, ``1h`` or ``auto``.

    Args:
        text: in any case.
        where: the option or the argument that it was given to, for an error.

    Raises:
        ConfigError: it is none of them, or nothing (0).
    """
    word = text.strip().lower()
    if word == "auto":
        return Every()
    if (found := _STEPS.fullmatch(word)) and int(found[1]) > 0:
        return Every(steps=int(found[1]))
    if (found := _TIME.fullmatch(word)) and float(found[1]) > 0:
        return Every(seconds=float(found[1]) * _UNITS[found[2]])
    raise ConfigError(f"{where} {text!r} is not accepted: {_ACCEPTED}")
