"""How often to save, in the words of ``--every`` and ``save_every`` (pure)."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from resilient.errors import ConfigError

_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(s|m|min|h)")
_STEPS = re.compile(r"(\d+) ?steps?")
_MEMORY = "memory="
_ACCEPTED = "use 500steps, 30s, 5m, 1h or auto, and with it or alone memory=1step"


@dataclass(frozen=True, slots=True)
class Every:
    """How often to save: one of the two, or neither, which leaves it to what saves cost.

    Attributes:
        steps: from one save to the next; 0 if that is said otherwise.
        seconds: of training from one save to the next; 0 if that is said otherwise.
        memory_steps: from one step that memory holds to the next; 0 for none.
        says_saves: whether it says anything of saves, and not of memory alone.
    """

    steps: int = 0
    seconds: float = 0.0
    memory_steps: int = 0
    says_saves: bool = True

    @property
    def is_auto(self) -> bool:
        """Whether the interval follows from what saves cost and how often runs fail."""
        return self.says_saves and not self.steps and not self.seconds


# Training asks at each step.
@lru_cache
def parse_every(text: str, where: str) -> Every:
    """Return what ``text`` says: ``500steps``, ``30s``, ``5m``, ``1h`` or ``auto``.

    Behind a comma, or alone, ``memory=1step`` says how often memory holds a step between saves.

    Args:
        text: in any case.
        where: the option or the argument that it was given to, for an error.

    Raises:
        ConfigError: it is none of them, or nothing (0).
    """
    words = [word.strip() for word in text.lower().split(",")]
    held = [word.removeprefix(_MEMORY) for word in words if word.startswith(_MEMORY)]
    saves = [word for word in words if not word.startswith(_MEMORY)]
    if len(held) > 1 or len(saves) > 1:
        raise _refuse(text, where)
    every = _parse_one(saves[0]) if saves else Every(says_saves=False)
    memory = _parse_one(held[0]) if held else Every()
    if every is None or memory is None or (held and not memory.steps):
        raise _refuse(text, where)
    return replace(every, memory_steps=memory.steps)


def _parse_one(word: str) -> Every | None:
    if word == "auto":
        return Every()
    if (found := _STEPS.fullmatch(word)) and int(found[1]) > 0:
        return Every(steps=int(found[1]))
    if (found := _TIME.fullmatch(word)) and float(found[1]) > 0:
        return Every(seconds=float(found[1]) * _UNITS[found[2]])
    return None


def _refuse(text: str, where: str) -> ConfigError:
    return ConfigError(f"{where} {text!r} is not accepted: {_ACCEPTED}")
