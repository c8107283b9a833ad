"""How much memory of this host the keeper may have: what was asked for, and what there is."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from resilient.errors import ConfigError
from resilient.storage.machine import memory_left_bytes
from resilient.storage.shared import ROOT, free_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from resilient.agent.options import KeeperWishes

AUTO, NONE = 0, -1
LEAST_BYTES = 16 << 20
"""With less the machine is too small for a keeper by default."""
AUTO_SHARE = 2
"""By default a keeper takes at most one half of the memory that the machine has left."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)
_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)}
_UNITS |= {
    f"{letter}i{b}": 1024**power for power, letter in enumerate("kmgt", 1) for b in ("", "b")
}


def parse_host_bytes(text: str) -> int:
    """Return how many bytes a user asks for: ``auto``, ``none``, or a size such as ``8GiB``.

    Plain numbers are bytes, ``0`` is ``auto`` and ``-1`` is ``none``.

    Raises:
        ConfigError: it is none of these.
    """
    word = text.strip().lower()
    named = {"auto": AUTO, "0": AUTO, "none": NONE, "-1": NONE}.get(word)
    if named is not None:
        return named
    found = _SIZE.fullmatch(word)
    size_bytes = int(float(found[1]) * _UNITS.get(found[2], 0)) if found else 0
    if not size_bytes:
        raise ConfigError(
            f"--host-bytes-max {text!r} is neither auto nor none nor a size",
            hint="for example --host-bytes-max 8GiB",
        )
    return size_bytes


def grant(wishes: KeeperWishes, root: Path = ROOT) -> KeeperWishes:
    """Return the wishes with the memory that there is for them.

    Args:
        wishes: with what the user asked for.
        root: where shared memory lies.

    Returns:
        With a positive bound; or with none, and the reason if it was left to the machine.

    Raises:
        ConfigError: a size was asked for that this host has not.
    """
    if wishes.host_bytes_max < 0:
        return wishes
    shared_bytes, left_bytes, numbers = _look(root)
    is_auto = wishes.host_bytes_max == AUTO
    granted_bytes = wishes.host_bytes_max or min(shared_bytes, left_bytes // AUTO_SHARE)
    least_bytes = LEAST_BYTES if is_auto else granted_bytes
    if least_bytes <= granted_bytes <= min(shared_bytes, left_bytes):
        return replace(wishes, host_bytes_max=granted_bytes, is_auto=is_auto)
    if is_auto:
        reason = f"{numbers}, and less than {LEAST_BYTES} are not worth it"
        return replace(wishes, host_bytes_max=NONE, why_not=reason)
    raise ConfigError(
        f"--host-bytes-max: {granted_bytes} bytes are too many: {numbers}",
        hint="leave --host-bytes-max out, or give none to do without a keeper",
    )


def _look(root: Path) -> tuple[int, int, str]:
    """Return how much shared memory is free and how much memory is left, and the same in words."""
    if not root.is_dir():
        return 0, 0, f"there is no {root}"
    shared_bytes, left_bytes = free_bytes(root), memory_left_bytes()
    numbers = f"{root} has {shared_bytes} bytes free and the machine {left_bytes} bytes of memory"
    return shared_bytes, sys.maxsize if left_bytes is None else left_bytes, numbers
