"""Pure functions of the library that remember, for a harness that hands them the same bytes again.

A sweep shows the library the same manifests, records and names in thousands of states. What it
makes of them follows from the bytes alone, so its own answer is kept, by content. That is done
from outside and for the time of a sweep; the library itself remembers nothing. Errors are not kept.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import TYPE_CHECKING

from resilient.format import document, keys, manifest
from resilient.storage import store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ANSWERS_MAX = 1 << 14


def _shared(function: Callable) -> Callable:
    """Return a function that gives the same answer object again: it must be immutable."""
    return lru_cache(ANSWERS_MAX)(function)


def _copied(function: Callable) -> Callable:
    """Return a function that gives a new dict each time, with the same values."""
    answer = lru_cache(ANSWERS_MAX)(function)

    @wraps(function)
    def remembering(*args):
        return dict(answer(*args))

    return remembering


PURE = (
    (manifest, "decode", _shared),
    (document, "unseal", _copied),
    (keys, "parse_checkpoint", _shared),
    (keys, "split_checkpoint_key", _shared),
    (store, "is_key", _shared),
)
"""Of bytes or text to a value; who calls a function by another module's name is met too."""


@contextmanager
def remembering() -> Iterator[None]:
    """Let the library's pure functions remember until the end."""
    replaced = []
    for home, name, how in PURE:
        original = getattr(home, name)
        kept = how(original)
        for module in [one for key, one in sys.modules.items() if key.startswith("resilient.")]:
            if vars(module).get(name) is original:
                setattr(module, name, kept)
                replaced.append((module, name, original))
    try:
        yield
    finally:
        for module, name, original in replaced:
            setattr(module, name, original)
