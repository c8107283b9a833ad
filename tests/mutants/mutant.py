"""A deliberate defect."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """A deliberate defect that breaks a guarantee, and the tests that must detect it.

    Attributes:
        name: Description of the defect.
        file: File that the defect changes.
        old: Text that the defect replaces. It stands once in the file. If empty, nothing is
            changed, and the tests must pass.
        new: Replacement.
        tests: Arguments of pytest: paths, and optionally an expression after ``-k``.
        promise: Heading or promise (``P1`` to ``P10``) of docs/guarantees.md. Empty if that page
            names the tests.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    promise: str = ""
