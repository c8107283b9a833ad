"""What one slot holds, said in shared memory: nobody listens, and nobody is woken.

One process writes, the rank. One reads, the keeper, and only once that process is gone::

    said    word | proof | message       word: 0 where nothing is whole, else the message's length
    notes   what the message names and mostly stays
    rows    of the ledger, one a line; each turn adds those that are new in this slot

The word is the first store of ``void`` and the last of ``say``, and between the two all others
are made, those to the files of the slot as well. A process that dies, however it dies, stops
between two of its stores: all before that one are in memory that outlives it, and the kernel
closes its socket after the last of its threads has stopped. The keeper looks once it hears of that.
So it finds either the word 0, or a message with all that it names. Nothing is taken on trust: the
proof is the SHA-256 of the message and of the digests of its notes, the head of the ledger proves
the rows, and where one of them does not fit the slot is void.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from resilient.errors import IntegrityError
from resilient.vault.keeper.handover import NONSENSE
from resilient.vault.keeper.notes import (
    BASES,
    CONFIG,
    Plain,
    Spot,
    message_of,
    note_of_bases,
    note_of_layout,
    spots_of,
    whole_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from resilient.format.ledger import Segment
    from resilient.vault.keeper.notes import Whole
    from resilient.vault.saving.persist import Job

    _Note = tuple[object, Callable[[Any], bytes]]
    _Wanted = Mapping[str, _Note]

SLOTS = 2
"""One is whole while the other is overwritten."""
_WORD_BYTES = 8
_HEAD_BYTES = _WORD_BYTES + hashlib.sha256().digest_size
_VOID = bytes(_WORD_BYTES)
_SPARE_BYTES = 64


class Slate:
    """Writes what a slot holds. One thread at a time.

    Args:
        reserve: gives so much memory by a name, zeros where it is new; what it gave before by that
            name may be gone then.
        context: of all events, as JSON.
    """

    def __init__(self, reserve: Callable[[str, int], memoryview], context: str) -> None:
        self._reserve = reserve
        self._context = context
        self._said = memoryview(b"")
        self._notes = _Notes(self._roomier)
        self._rows = _Rows(self._roomier)
        self._plain = Plain()

    def void(self) -> None:
        """Say that nothing is whole here.

        Crash: the slot holds what it held, or nothing.
        """
        if len(self._said):
            self._said[:_WORD_BYTES] = _VOID

    def say(self, job: Job) -> None:
        """Say that the slot holds all bytes of ``job``.

        Crash: the slot holds nothing until the last store, and then the job.

        Raises:
            ResilientError: there is no memory for that.
            ValueError: something of it cannot be said in JSON.
        """
        self.void()
        loose = self._plain.loose(job.about.config)
        wanted: dict[str, _Note] = {one.name: (one.tensors, note_of_layout) for one in job.files}
        wanted |= {BASES: (job.bases, note_of_bases), CONFIG: self._plain.note}
        spots = self._notes.put(wanted)
        rows_bytes = self._rows.put(job.segment) if job.segment else 0
        message = message_of(job, spots, loose, rows_bytes, self._context)
        end = _HEAD_BYTES + len(message)
        if len(self._said) < end:
            self._said = self._roomier("said", end)
        self._said[_HEAD_BYTES:end] = message
        self._said[_WORD_BYTES:_HEAD_BYTES] = _proof(message, self._notes.digests(wanted))
        self._said[:_WORD_BYTES] = len(message).to_bytes(_WORD_BYTES, "little")

    def _roomier(self, name: str, size_bytes: int) -> memoryview:
        """Return memory for what got longer, and will again; the slot is void."""
        return self._reserve(name, size_bytes + size_bytes // 2)


class _Put(NamedTuple):
    """A note that lies there: what it is of, its digest, and how much there is room for."""

    value: object
    spot: Spot
    digest: bytes
    room_bytes: int


class _Notes:
    """Puts down what is not what it was: where it was if it fits, else behind all others."""

    def __init__(self, reserve: Callable[[str, int], memoryview]) -> None:
        self._reserve = reserve
        self._memory = memoryview(b"")
        self._used = 0
        self._known: dict[str, _Put] = {}

    def put(self, wanted: _Wanted) -> dict[str, Spot]:
        """Return where the notes of these values lie, by name."""
        new = self._differing(wanted)
        behind = [self._behind(name, note) for name, note in new.items()]
        if self._used + sum(behind) > len(self._memory):
            self._known, self._used, self._memory = {}, 0, memoryview(b"")
            new = self._differing(wanted)
            self._memory = self._reserve("notes", sum(map(_room_bytes, new.values())))
        for name, note in new.items():
            self._put(name, wanted[name][0], note)
        return {name: self._known[name].spot for name in wanted}

    def digests(self, names: Iterable[str]) -> Iterator[bytes]:
        """Yield the SHA-256 of the notes of these names."""
        return (self._known[name].digest for name in names)

    def _put(self, name: str, value: object, note: bytes) -> None:
        start, room_bytes = self._used, self._behind(name, note)
        if room_bytes:
            self._used += room_bytes
        else:
            _, (start, _), _, room_bytes = self._known[name]
        end = start + len(note)
        self._memory[start:end] = note
        digest = hashlib.sha256(note).digest()
        self._known[name] = _Put(value, Spot(start, len(note)), digest, room_bytes)

    def _behind(self, name: str, note: bytes) -> int:
        """Return how many bytes a note takes behind all others: none if it fits where it was."""
        fits = name in self._known and len(note) <= self._known[name].room_bytes
        return 0 if fits else _room_bytes(note)

    def _differing(self, wanted: _Wanted) -> dict[str, bytes]:
        known = self._known
        return {
            name: note_of(value)
            for name, (value, note_of) in wanted.items()
            if name not in known or known[name].value != value
        }


class _Rows:
    """Adds the rows of a segment that are not there yet; begins again where another does."""

    def __init__(self, reserve: Callable[[str, int], memoryview]) -> None:
        self._reserve = reserve
        self._memory = memoryview(b"")
        self._used = self._count = 0
        self._last = ""
        self._of: tuple[Any, ...] = ()

    def put(self, segment: Segment) -> int:
        """Return how many bytes the rows of a segment take."""
        if not self._goes_on(segment):
            self._used = self._count = 0
        data = _lines(segment.rows[self._count :])
        if self._used + len(data) > len(self._memory):
            self._used = self._count = 0
            data = _lines(segment.rows)
            self._memory = memoryview(b"")
            self._memory = self._reserve("rows", len(data))
        end = self._used + len(data)
        self._memory[self._used : end] = data
        self._of, self._used, self._count = _beginning(segment), end, len(segment.rows)
        self._last = segment.rows[-1] if segment.rows else ""
        return end

    def _goes_on(self, segment: Segment) -> bool:
        """Say whether the rows that are there are the first of the segment's."""
        count = self._count
        return (
            self._of == _beginning(segment)
            and count <= len(segment.rows)
            and (not count or segment.rows[count - 1] == self._last)
        )


def slate_name(slot: int, name: str) -> str:
    """Return what memory of a slot's slate is reserved as; no file of a slot is called so."""
    return f"slate/{slot}/{name}"


def read_slate(memory_of: Callable[[str], memoryview]) -> Whole | None:
    """Return what a slot holds whole, None for nothing; its writer is gone.

    Crash: reads only.

    Args:
        memory_of: gives what was reserved by a name, empty if nothing was.
    """
    try:
        return _read(*(_copies(memory_of(name)) for name in ("said", "notes", "rows")))
    except (*NONSENSE, RecursionError):
        return None


_Copy = Callable[[int, int], bytes]


def _copies(memory: memoryview) -> _Copy:
    """Return what copies bytes of shared memory, so that what is proved is what is read."""

    def copy(start: int, stop: int) -> bytes:
        if not 0 <= start <= stop <= len(memory):
            raise IntegrityError(f"there are no bytes {start} to {stop}")
        return bytes(memory[start:stop])

    return copy


def _read(said_at: _Copy, note_at: _Copy, row_at: _Copy) -> Whole:
    """Return what is said.

    Raises:
        IntegrityError: nothing is, or it does not prove itself; or whatever of ``NONSENSE``.
    """
    size_bytes = int.from_bytes(said_at(0, _WORD_BYTES), "little")
    if not size_bytes:
        raise IntegrityError("nothing is said")
    proof = said_at(_WORD_BYTES, _HEAD_BYTES)
    message = said_at(_HEAD_BYTES, _HEAD_BYTES + size_bytes)
    said = json.loads(message)
    notes = [note_at(one.start, one.start + one.size_bytes) for one in spots_of(said)]
    if _proof(message, (hashlib.sha256(one).digest() for one in notes)) != proof:
        raise IntegrityError("something else is said")
    return whole_of(said, notes, lambda size_bytes: row_at(0, size_bytes))


def _proof(message: bytes, digests: Iterable[bytes]) -> bytes:
    return hashlib.sha256(b"".join([*digests, message])).digest()


def _room_bytes(note: bytes) -> int:
    """Return how much is kept for a note: the numbers in it get longer."""
    return len(note) + len(note) // 8 + _SPARE_BYTES


def _beginning(segment: Segment) -> tuple[Any, ...]:
    return segment.previous, segment.opens, segment.start, segment.before


def _lines(rows: Sequence[str]) -> bytes:
    return "".join(f"{row}\n" for row in rows).encode("ascii")
