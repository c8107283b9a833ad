"""Plain values out of what a pickle of another tool holds, and whose they are (pure)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from resilient.comparison.trees import plain_leaves
from resilient.comparison.values import GROUPS, TRAINER
from resilient.layouts.pickled import Made, Name, TensorRef
from resilient.layouts.values import Unreadable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resilient.layouts.archives import Archive

LEAVES_MAX, DEPTH_MAX = 200_000, 32
"""Plain values of one file, and how deep they may lie."""
_SHOWN_TEXT_MAX = 200
_KEPT = ("_last_lr", "_step_count")
"""Of a schedule, though private."""


def place_of(path: str) -> tuple[str, str]:
    """Return the section and the name of a value by its path; no section: it is not shown."""
    _, found, rest = path.rpartition("param_groups.")
    if found:
        return ("", "") if ".params" in f".{rest}" else (GROUPS, rest)
    # Numbers of one parameter are state, which tensors are compared for.
    is_state = re.search(r"(?:^|\.)state\.", path)
    return ("", "") if is_state else (TRAINER, path)


def known(value: Any, archive: Archive | None = None) -> Iterator[tuple[str, Any]]:
    """Yield plain values with their paths out of what a pickle holds."""
    for path, one in plain_leaves(_plain(value, archive, [LEAVES_MAX])):
        if is_shown(path):
            yield path, one


def is_shown(path: str) -> bool:
    """Say whether a value is one that is told by its name: what is private to a class is not."""
    return bool(path) and (not path.startswith("_") or path in _KEPT)


def _plain(value: Any, archive: Archive | None, left: list[int], depth: int = 0) -> Any:
    """Return a value of a pickle with what it would have called made plain, as far as it goes.

    Args:
        value: what the pickle holds; it may be in it many times, and is walked each time.
        archive: where tensors are.
        left: how many values may still be walked; counted down.
        depth: of lists and dicts around it.

    Raises:
        Unreadable: there are more values than any configuration has.
    """
    left[0] -= 1
    if left[0] < 0:
        raise Unreadable(f"more than {LEAVES_MAX} values")
    if depth > DEPTH_MAX:
        return "..."
    if isinstance(value, Made) and isinstance(value.state, dict):
        value = value.state
    if isinstance(value, dict):
        return {str(key): _plain(one, archive, left, depth + 1) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, archive, left, depth + 1) for one in value]
    if isinstance(value, TensorRef):
        # Tensors are compared as such; a number that is kept as one is a number.
        return archive.number(value) if archive and not value.shape else {}
    return _leaf(value)


def _leaf(value: Any) -> Any:
    """Return a value without others in it; of a class, the one argument that it was made of."""
    if isinstance(value, Made):
        args = value.args if isinstance(value.args, tuple) else ()
        return args[0] if len(args) == 1 and isinstance(args[0], str | int) else value.kind
    if isinstance(value, bytes):
        return value[:_SHOWN_TEXT_MAX].hex()
    return value.dotted if isinstance(value, Name) else value
