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
    text = os.environ.get("SEED", "")
    return int(text) if text else zlib.crc32(name.encode())


def begin_streams(name: str) -> int:
    """Seed all streams for a test; return the seed."""
    seed = seed_of(name)
    _draw.seed(seed)
    random.seed(seed)
    for module, function_path in (("numpy", "random.seed"), ("torch", "manual_seed")):
        module_loaded = sys.modules.get(module)
        if module_loaded is not None:
            _attribute(module_loaded, function_path)(seed % 2**32)
    return seed


def draw() -> Random:
    """Return the stream of this test."""
    return _draw


def drawn_bytes(size: int) -> bytes:
    """Return random bytes from the stream of this test."""
    return _draw.randbytes(size)


def _attribute(value, function_path):
    for name in function_path.split("."):
        value = getattr(value, name)
    return value
