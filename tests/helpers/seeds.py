"""Seeds of random tests. Each test prints its seed; the option ``--seed`` repeats it.

A seed follows from the name of the test unless ``--seed`` or the variable ``SEED`` gives another.
The streams of Python, NumPy and torch begin there too.
"""

from __future__ import annotations

import os
import random
import sys
import zlib
from random import Random

_draw = Random(0)


def seed_of(name: str) -> int:
    """Return the seed of a test by its name."""
    told = os.environ.get("SEED", "")
    return int(told) if told else zlib.crc32(name.encode())


def begin_streams(name: str) -> int:
    """Seed all streams for a test; return the seed."""
    seed = seed_of(name)
    _draw.seed(seed)
    random.seed(seed)
    for module, way in (("numpy", "random.seed"), ("torch", "manual_seed")):
        loaded = sys.modules.get(module)
        if loaded is not None:
            _attribute(loaded, way)(seed % 2**32)
    return seed


def draw() -> Random:
    """Return the stream of this test."""
    return _draw


def drawn_bytes(size: int) -> bytes:
    """Return random bytes from the stream of this test."""
    return _draw.randbytes(size)


def _attribute(found, way):
    for name in way.split("."):
        found = getattr(found, name)
    return found
