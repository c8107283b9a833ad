"""One deliberate defect."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One deliberate defect: in ``file``, ``old`` becomes ``new``; ``tests`` must notice.

    Without an ``old`` nothing is broken, and the tests must pass.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
