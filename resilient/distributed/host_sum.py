"""Sums of numbers over the ranks of one host, through shared memory instead of sockets.

Each rank writes its own page and reads the pages of all other ranks. Each sum is one turn. For each
turn, a rank writes its number as one record::

    turn | number | CRC-32 of turn and number      overwrites the record 4 turns before

If another processor sees only a part of a record, the CRC does not match and the record is read
again. Readers poll, so no thread is woken. A sum of eight bytes by gloo wakes threads of every rank
in the middle of an optimizer step, which costs more than polling.
"""

from __future__ import annotations

import struct
import time
import zlib
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

from resilient.errors import DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE_BYTES = 4096
_PAYLOAD = struct.Struct("<Qd")
_CHECK = struct.Struct("<I")
_RECORD_BYTES = _PAYLOAD.size + _CHECK.size
# A rank writes its number for a turn only after it has read all numbers of the previous turn.
_TURNS = 4
_STRIDE_BYTES = PAGE_BYTES // _TURNS
_PAUSE_SECONDS_MIN, _PAUSE_SECONDS_MAX = 20e-6, 2e-3


class HostLocalSum:
    """Repeated sum of one number per rank; each sum is a turn.

    Args:
        pages: Shared memory by rank, one page of ``PAGE_BYTES`` zeros each. This rank writes only
            its own page.
        rank: This rank.
        within_seconds: Maximum delay of a rank behind the others; by default the timeout of torch's
            collectives.
    """

    def __init__(
        self, pages: Sequence[memoryview], rank: int, within_seconds: float = 1800.0
    ) -> None:
        self._pages = pages
        self._rank = rank
        self._within_seconds = within_seconds
        self._turn = 0

    def give(self, number: float) -> int:
        """Publish this rank's number for the next turn, and return the turn.

        Crash: the other ranks wait until they are killed or time out.
        """
        self._turn += 1
        message = _PAYLOAD.pack(self._turn, number)
        start = _start(self._turn)
        record = message + _CHECK.pack(zlib.crc32(message))
        self._pages[self._rank][start : start + _RECORD_BYTES] = record
        return self._turn

    def total(self, turn: int) -> float:
        """Wait for the numbers of all ranks; return their sum, added in the order of ranks.

        Args:
            turn: Turn that the last call of :meth:`give` returned.

        Raises:
            DeadlineExceeded: A rank has not published its number in time.
        """
        return reduce(add, (self._number(rank, turn) for rank in range(len(self._pages))))

    def _number(self, rank: int, turn: int) -> float:
        started_seconds, pause_seconds = time.monotonic(), _PAUSE_SECONDS_MIN
        while (number := _read(self._pages[rank], turn)) is None:
            if time.monotonic() - started_seconds > self._within_seconds:
                raise DeadlineExceeded(
                    f"rank {rank} did not report its loss within {self._within_seconds:g} s",
                    hint="find out what that rank does: `py-spy dump`, or the stacks in the report",
                )
            # Sleep between two reads: hang detection expects a rank that waits to be asleep.
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _PAUSE_SECONDS_MAX)
        return number


def _start(turn: int) -> int:
    return turn % _TURNS * _STRIDE_BYTES


def _read(page: memoryview, turn: int) -> float | None:
    """Return the number of a turn; None if the record is not complete yet."""
    start = _start(turn)
    record = bytes(page[start : start + _RECORD_BYTES])
    record_turn, number = _PAYLOAD.unpack_from(record)
    (check,) = _CHECK.unpack_from(record, _PAYLOAD.size)
    if record_turn != turn or check != zlib.crc32(record[: _PAYLOAD.size]):
        return None
    return float(number)
