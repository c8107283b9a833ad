"""Numbers of the ranks of one host, added up through shared memory and not over sockets.

Each rank has a page that it alone writes, and reads those of all others. A number of each rank and
turn is one record::

    turn | number | CRC-32 of both      in place of the one some turns before

A record that is being written, or of which another processor sees a part, does not fit its check
and is read again. Nobody is woken: to add eight bytes up by gloo wakes threads of every rank in the
midst of an optimizer's step, which costs more than to look.
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
_SAID = struct.Struct("<Qd")
_CHECK = struct.Struct("<I")
_RECORD_BYTES = _SAID.size + _CHECK.size
# A rank gives the number of a turn once it has read all of the turn before.
_TURNS = 4
_STRIDE_BYTES = PAGE_BYTES // _TURNS
_PAUSE_SECONDS_MIN, _PAUSE_SECONDS_MAX = 20e-6, 2e-3


class HostLocalSum:
    """Adds up one number of each rank, turn by turn.

    Args:
        pages: shared memory of each rank, by rank: zeros, of ``PAGE_BYTES``; one's own is written.
        rank: whose this is.
        within_seconds: how long a rank may be behind the others; as long as in torch's collectives
            by default.
    """

    def __init__(
        self, pages: Sequence[memoryview], rank: int, within_seconds: float = 1800.0
    ) -> None:
        self._pages = pages
        self._rank = rank
        self._within_seconds = within_seconds
        self._turn = 0

    def give(self, number: float) -> int:
        """Show the others this rank's number of the next turn, and return the turn.

        Crash: the others wait until they are ended, too.
        """
        self._turn += 1
        said = _SAID.pack(self._turn, number)
        start = _start(self._turn)
        record = said + _CHECK.pack(zlib.crc32(said))
        self._pages[self._rank][start : start + _RECORD_BYTES] = record
        return self._turn

    def total(self, turn: int) -> float:
        """Return the sum of a turn over ranks, in their order; by then each has given its number.

        Args:
            turn: the one given last.

        Raises:
            DeadlineExceeded: a rank has not given its own in time.
        """
        return reduce(add, (self._number(rank, turn) for rank in range(len(self._pages))))

    def _number(self, rank: int, turn: int) -> float:
        started_seconds, pause_seconds = time.monotonic(), _PAUSE_SECONDS_MIN
        while (number := _read(self._pages[rank], turn)) is None:
            if time.monotonic() - started_seconds > self._within_seconds:
                raise DeadlineExceeded(
                    f"rank {rank} has not given its loss within {self._within_seconds:g} s",
                    hint="look what that rank does: `py-spy dump`, or the stacks in the report",
                )
            # Asleep, as who waits for another is taken to be.
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _PAUSE_SECONDS_MAX)
        return number


def _start(turn: int) -> int:
    return turn % _TURNS * _STRIDE_BYTES


def _read(page: memoryview, turn: int) -> float | None:
    """Return the number of a turn; None while it is not there."""
    start = _start(turn)
    record = bytes(page[start : start + _RECORD_BYTES])
    there, number = _SAID.unpack_from(record)
    (check,) = _CHECK.unpack_from(record, _SAID.size)
    if there != turn or check != zlib.crc32(record[: _SAID.size]):
        return None
    return float(number)
