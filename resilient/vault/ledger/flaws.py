"""What is wrong with a ledger, as a value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Flaw:
    """Why the ledger proves nothing.

    Attributes:
        key: of the object that is not what it should be.
        record: number of the record in its segment, from 1; 0: the segment as a whole.
        problem: what is wrong.
    """

    key: str
    record: int
    problem: str
