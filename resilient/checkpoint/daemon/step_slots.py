"""Step slot: crash-consistent copy of one training step of a rank, in shared memory.

The saver daemon, a process per host, saves the newest step after the ranks have ended. The rank
writes a slot, and the daemon reads the slot only after the end of the rank. A slot has three
parts::

    said    word | proof | message       word: the message's length, 0 if the slot is not complete
    notes   values that the message names and that rarely change
    rows    rows of the ledger, one per line; each write appends the rows that are new in this slot

``invalidate`` sets the word to 0 before all other memory writes. ``publish`` sets the word to the
message's length after all other writes, including writes to the files of the slot. A process that
dies in any way stops between two of its writes. All earlier writes remain in shared memory after
the process has died. The kernel closes the socket of the process after its last thread has stopped,
and the daemon reads only then. The daemon therefore finds either the word 0, or a message with all
data that the message names. The daemon verifies all of these data. The proof is the SHA-256 of the
message and of the digests of its notes. The rows of the ledger record the samples of each step, and
the hash of the last row (head) verifies them. If the proof or the head does not match, the daemon
ignores the slot.

The message is JSON, written at each step. A note has values that rarely change from step to step.
Examples are the layout of one file, plain configuration values, and the checkpoints whose stored
bytes a save may reference (dedup bases). The message gives the offset of each note, and the number
and length of the ledger's rows. The save job of a cached step has no streamed file, and no
checkpoint that retention must keep. The job has no topic (the name under which ranks agree in the
key-value store), because its save has not begun.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from json.encoder import encode_basestring_ascii as _quoted
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

from resilient.checkpoint.daemon.messages import PARSE_ERRORS
from resilient.errors import IntegrityError
from resilient.format.keys import CheckpointId, parse_checkpoint, parse_segment
from resilient.format.ledger import LedgerPosition, Segment, encode_segment
from resilient.format.manifest import Manifest, encode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from resilient.checkpoint.save.dedup import DedupBase
    from resilient.checkpoint.save.persist import SaveJob
    from resilient.format.manifest import TensorEntry

    _Note = tuple[object, Callable[[Any], bytes]]
    _NotesByName = Mapping[str, _Note]

BASES, CONFIG = "/bases", "/config"
"""Names of notes, which no file has."""
_COPIED_FIELDS = ("run_id", "created_at", "world", "software", "data", "metrics")
_PLAIN = frozenset({int, float, bool, type(None)})
# Faster than json.dumps, which creates an encoder for each call that refuses NaN.
_text = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


class NoteOffset(NamedTuple):
    """Place of a note in the notes of its slot."""

    start: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StoredStep:
    """Complete step of a slot.

    Attributes:
        checkpoint: Checkpoint that the step becomes after a commit.
        previous_folder: Folder of the checkpoint that the step's ledger continues; empty if the
            step begins a ledger.
        context: Context of its events.
        message: Message.
        layouts: Tensor layout of each file, as text.
        bases: Dedup bases, as text.
        config: Plain values of the configuration, which are not in the message, as text.
        segment: Ledger segment; None if another rank has it.
    """

    checkpoint: CheckpointId
    previous_folder: str
    context: Mapping[str, Any]
    message: Mapping[str, Any]
    layouts: tuple[bytes, ...]
    bases: bytes
    config: bytes
    segment: Segment | None

    def job(self, rank: int, topic: str) -> dict[str, Any]:
        """Return the job in the form of ``messages.encode_job``.

        Raises:
            IntegrityError: The message is not a manifest.
        """
        message = self.message
        parts = [
            {"name": name, "scope": scope, "document": document}
            for name, scope, document in message["parts"]
        ]
        tensors = [tensor for layout in self.layouts for tensor in json.loads(layout)]
        return {
            "checkpoint": self.checkpoint.folder,
            "about": encode(self._about()).decode(),
            "files": [[name, size_bytes] for name, size_bytes, *_ in message["files"]],
            "streamed": [],
            "slots": [],
            "receipt": {
                "rank": rank,
                "files": [],
                "tensors": tensors,
                "parts": parts,
                "parity": [],
            },
            "keep": [],
            "is_first": message["is_first"],
            "topic": topic,
            "began_seconds": message["began_seconds"],
            "stall_seconds": message["stall_seconds"],
            "bases": json.loads(self.bases),
            "copies_bytes_max": None,
            "segment": encode_segment(self.segment).decode() if self.segment else None,
            "token": message["token"],
            "spoiled": None,
        }

    def _about(self) -> Manifest:
        message = self.message["about"]
        fields = {name: message[name] for name in _COPIED_FIELDS}
        return Manifest(
            checkpoint=self.checkpoint,
            parent=None if message["parent"] is None else _parse_folder(message["parent"]),
            config={**json.loads(self.config), **message["config"]},
            files=(),
            tensors=(),
            parts=(),
            protects=tuple(map(_parse_folder, message["protects"])),
            **fields,
        )


class PlainConfigCache:
    """Cache of the plain values of a mapping, which rarely change from one call to the next.

    A value counts as unchanged if it is an equal text or the identical immutable object. Equality
    does not suffice for numbers, because 1, 1.0 and True are equal. All other values
    are not plain. They are written each time.

    Attributes:
        note: Note of the plain values; a new object each time a value changes.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._texts: tuple[list[bool], list[Any]] = ([], [])
        self._other_values: tuple[list[bool], list[Any]] = ([], [])
        self._names_not_plain: list[str] = []
        self.note: tuple[object, Callable[[Any], bytes]] = (self, lambda _: b"{}")

    def values_not_plain(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that are not plain; ``note`` covers all others."""
        if not self._is_unchanged(fields):
            self._names, values = [*fields], [*fields.values()]
            is_text = [type(value) is str for value in values]
            is_other = [type(value) in _PLAIN for value in values]
            self._texts = (is_text, [*compress(values, is_text)])
            self._other_values = (is_other, [*compress(values, is_other)])
            self._names_not_plain = [
                name
                for name, *is_plain in zip(fields, is_text, is_other, strict=True)
                if not any(is_plain)
            ]
            plain = {
                name: field for name, field in fields.items() if name not in self._names_not_plain
            }
            self.note = (object(), lambda _: _text(plain).encode())
        return {name: fields[name] for name in self._names_not_plain}

    def _is_unchanged(self, fields: Mapping[str, Any]) -> bool:
        values = [*fields.values()]
        (is_text, texts), (is_other, other_values) = self._texts, self._other_values
        return (
            [*fields] == self._names
            and [*compress(values, is_text)] == texts
            and all(map(is_, compress(values, is_other), other_values))
        )


def note_of_layout(tensors: Iterable[TensorEntry]) -> bytes:
    """Return the layout of tensors, in the form of a rank's receipt."""
    # Formatted by hand for speed: at nearly every step the layout of one file changes.
    return f"[{','.join(map(_tensor, tensors))}]".encode()


def _tensor(entry: TensorEntry) -> str:
    regions = ",".join(
        f'{{"region":{{"offsets":{[*at.region.offsets]},"lengths":{[*at.region.lengths]}}},'
        f'"file":{_quoted(at.file)},"start":{at.start},"size_bytes":{at.size_bytes},'
        f'"digest":{_quoted(at.digest)}}}'
        for at in entry.regions
    )
    return (
        f'{{"name":{_quoted(entry.name)},"part":{_quoted(entry.part)},"dtype":{_quoted(entry.dtype)},'
        f'"shape":{[*entry.shape]},"regions":[{regions}]}}'
    )


def note_of_bases(bases: Iterable[DedupBase]) -> bytes:
    """Return the dedup bases as a note."""
    return _text([base.to_json() for base in bases]).encode()


def message_of(
    job: SaveJob,
    note_offsets: Mapping[str, NoteOffset],
    config: Mapping[str, Any],
    rows_bytes: int,
    context: str,
) -> bytes:
    """Return the message of a step.

    Args:
        job: Job of the slot.
        note_offsets: Places of the job's notes: the layouts by file name, ``BASES`` and ``CONFIG``.
        config: Part of the job's configuration that is not in the ``CONFIG`` note.
        rows_bytes: Stored length of its ledger rows.
        context: Context of its events, as JSON.

    Raises:
        ValueError: A value has no JSON form.
    """
    description, segment = job.about, job.segment
    message = {
        "checkpoint": description.checkpoint.folder,
        "about": {
            "run_id": description.run_id,
            "parent": description.parent.folder if description.parent else None,
            "created_at": description.created_at,
            "world": dict(description.world),
            "config": config,
            "software": dict(description.software),
            "data": dict(description.data),
            "metrics": dict(description.metrics),
            "protects": [
                protected_checkpoint.folder for protected_checkpoint in description.protects
            ],
        },
        "files": [[file.name, len(file.data), *note_offsets[file.name]] for file in job.files],
        "parts": [[part.name, part.scope, part.document] for part in job.parts],
        "is_first": job.is_first,
        "token": job.token,
        "began_seconds": job.began_seconds,
        "stall_seconds": job.stall_seconds(),
        "bases": note_offsets[BASES],
        "config": note_offsets[CONFIG],
        "segment": _segment_to_json(segment, rows_bytes) if segment else None,
    }
    return f'{_text(message)[:-1]},"context":{context}}}'.encode()


def context_of(context: Mapping[str, Any]) -> str:
    """Return the context of events for ``message_of``; the context never changes."""
    return _text(dict(context))


def note_offsets_of(message: Mapping[str, Any]) -> list[NoteOffset]:
    """Return the places of the notes that a message names, in the order of ``message_of``."""
    layouts = [NoteOffset(start, size_bytes) for _, _, start, size_bytes in message["files"]]
    return [*layouts, NoteOffset(*message["bases"]), NoteOffset(*message["config"])]


def decode_step(
    message: Mapping[str, Any], notes: Sequence[bytes], rows_of: Callable[[int], bytes]
) -> StoredStep:
    """Return the complete step that a message and its notes describe.

    Args:
        message: Message.
        notes: Notes that the message names, in the order of ``note_offsets_of``.
        rows_of: Function that returns the given number of bytes of ledger rows.

    Raises:
        IntegrityError: The rows do not match the head of the ledger segment.
        ValueError: The message is not valid. Other errors of ``messages.PARSE_ERRORS`` are
            possible.
    """
    checkpoint = _parse_folder(message["checkpoint"])
    segment = _segment(message["segment"], checkpoint, rows_of) if message["segment"] else None
    previous_checkpoint = parse_segment(segment.previous) if segment and segment.previous else None
    *layouts, bases, config = notes
    previous_folder = previous_checkpoint.folder if previous_checkpoint else ""
    return StoredStep(
        checkpoint,
        previous_folder,
        message["context"],
        message,
        tuple(layouts),
        bases,
        config,
        segment,
    )


def _segment_to_json(segment: Segment, rows_bytes: int) -> dict[str, Any]:
    """Return a segment without its rows and its checkpoint."""
    return {
        "run_id": segment.run_id,
        "previous": segment.previous,
        "opens": segment.opens,
        "start": _place(segment.start),
        "stop": _place(segment.stop),
        "before": segment.before,
        "head": segment.head,
        "rows": [len(segment.rows), rows_bytes],
    }


def _segment(
    message: Mapping[str, Any], checkpoint: CheckpointId, rows_of: Callable[[int], bytes]
) -> Segment:
    count, size_bytes = message["rows"]
    rows = tuple(rows_of(size_bytes).decode("ascii").split("\n")[:-1])
    segment = Segment(
        message["run_id"],
        checkpoint,
        message["previous"],
        message["opens"],
        LedgerPosition(*message["start"]),
        LedgerPosition(*message["stop"]),
        message["before"],
        rows,
    ).closed()
    if (len(rows), segment.head) != (count, message["head"]):
        raise IntegrityError(f"the ledger of {checkpoint} does not end where its manifest says")
    return segment


def _parse_folder(folder: str) -> CheckpointId:
    checkpoint = parse_checkpoint(folder)
    if checkpoint is None:
        raise IntegrityError(f"{folder!r} is not a checkpoint")
    return checkpoint


def _place(place: LedgerPosition) -> list[int]:
    return [place.step, place.epoch, place.samples]


SLOTS = 2
"""Number of slots: one slot is complete while the other slot is overwritten."""
_WORD_BYTES = 8
_HEAD_BYTES = _WORD_BYTES + hashlib.sha256().digest_size
_EMPTY_WORD = bytes(_WORD_BYTES)
_SPARE_BYTES = 64


class StepSlot:
    """Writer of a slot. One thread at a time.

    Args:
        reserve: Function from name and size to memory, zeroed if new. A call may release earlier
            memory of the same name.
        context: Context of all events, as JSON.
    """

    def __init__(self, reserve: Callable[[str, int], memoryview], context: str) -> None:
        self._reserve = reserve
        self._context = context
        self._message = memoryview(b"")
        self._notes = _Notes(self._reserve_larger)
        self._rows = _Rows(self._reserve_larger)
        self._plain = PlainConfigCache()

    def invalidate(self) -> None:
        """Mark the slot as empty.

        Crash: the slot has its previous step, or is empty.
        """
        if len(self._message):
            self._message[:_WORD_BYTES] = _EMPTY_WORD

    def publish(self, job: SaveJob) -> None:
        """Mark the slot as complete with all bytes of ``job``.

        Crash: the slot is empty until the last store, and then has the job.

        Raises:
            ResilientError: There is not enough memory for the slot.
            ValueError: A value has no JSON form.
        """
        self.invalidate()
        other_config = self._plain.values_not_plain(job.about.config)
        notes_by_file: dict[str, _Note] = {
            file.name: (file.tensors, note_of_layout) for file in job.files
        }
        notes_by_file |= {BASES: (job.bases, note_of_bases), CONFIG: self._plain.note}
        note_offsets = self._notes.put(notes_by_file)
        rows_bytes = self._rows.put(job.segment) if job.segment else 0
        message = message_of(job, note_offsets, other_config, rows_bytes, self._context)
        end = _HEAD_BYTES + len(message)
        if len(self._message) < end:
            self._message = self._reserve_larger("said", end)
        self._message[_HEAD_BYTES:end] = message
        self._message[_WORD_BYTES:_HEAD_BYTES] = _proof(message, self._notes.digests(notes_by_file))
        self._message[:_WORD_BYTES] = len(message).to_bytes(_WORD_BYTES, "little")

    def _reserve_larger(self, name: str, size_bytes: int) -> memoryview:
        """Return more memory for a value that grew and will grow again; the slot is void."""
        return self._reserve(name, size_bytes + size_bytes // 2)


class _StoredNote(NamedTuple):
    """Stored note: its value, place and digest, and the reserved length."""

    value: object
    offset: NoteOffset
    digest: bytes
    reserved_bytes: int


class _Notes:
    """Writer of changed notes: at their old place if they fit, else behind all others."""

    def __init__(self, reserve: Callable[[str, int], memoryview]) -> None:
        self._reserve = reserve
        self._memory = memoryview(b"")
        self._used_bytes = 0
        self._stored_notes: dict[str, _StoredNote] = {}

    def put(self, notes_by_file: _NotesByName) -> dict[str, NoteOffset]:
        """Return the places of the notes of these values, by name."""
        changed_notes = self._changed_notes(notes_by_file)
        appended_bytes = [self._appended_bytes(name, note) for name, note in changed_notes.items()]
        if self._used_bytes + sum(appended_bytes) > len(self._memory):
            self._stored_notes, self._used_bytes, self._memory = {}, 0, memoryview(b"")
            changed_notes = self._changed_notes(notes_by_file)
            self._memory = self._reserve("notes", sum(map(_reserved_bytes, changed_notes.values())))
        for name, note in changed_notes.items():
            self._add(name, notes_by_file[name][0], note)
        return {name: self._stored_notes[name].offset for name in notes_by_file}

    def digests(self, names: Iterable[str]) -> Iterator[bytes]:
        """Yield the SHA-256 of the notes with these names."""
        return (self._stored_notes[name].digest for name in names)

    def _add(self, name: str, value: object, note: bytes) -> None:
        start, reserved_bytes = self._used_bytes, self._appended_bytes(name, note)
        if reserved_bytes:
            self._used_bytes += reserved_bytes
        else:
            _, (start, _), _, reserved_bytes = self._stored_notes[name]
        end = start + len(note)
        self._memory[start:end] = note
        digest = hashlib.sha256(note).digest()
        self._stored_notes[name] = _StoredNote(
            value, NoteOffset(start, len(note)), digest, reserved_bytes
        )

    def _appended_bytes(self, name: str, note: bytes) -> int:
        """Return how many bytes a note takes behind all others: 0 if it fits at its old place."""
        fits = name in self._stored_notes and len(note) <= self._stored_notes[name].reserved_bytes
        return 0 if fits else _reserved_bytes(note)

    def _changed_notes(self, notes_by_file: _NotesByName) -> dict[str, bytes]:
        stored_notes = self._stored_notes
        return {
            name: note_of(value)
            for name, (value, note_of) in notes_by_file.items()
            if name not in stored_notes or stored_notes[name].value != value
        }


class _Rows:
    """Writer of the rows of a segment that are not stored yet; restarts for another segment."""

    def __init__(self, reserve: Callable[[str, int], memoryview]) -> None:
        self._reserve = reserve
        self._memory = memoryview(b"")
        self._used_bytes = self._count = 0
        self._last = ""
        self._source: tuple[Any, ...] = ()

    def put(self, segment: Segment) -> int:
        """Store the rows of a segment and return their length in bytes."""
        if not self._continues(segment):
            self._used_bytes = self._count = 0
        data = _encoded_rows(segment.rows[self._count :])
        if self._used_bytes + len(data) > len(self._memory):
            self._used_bytes = self._count = 0
            data = _encoded_rows(segment.rows)
            self._memory = memoryview(b"")
            self._memory = self._reserve("rows", len(data))
        end = self._used_bytes + len(data)
        self._memory[self._used_bytes : end] = data
        self._source, self._used_bytes, self._count = (
            _segment_start(segment),
            end,
            len(segment.rows),
        )
        self._last = segment.rows[-1] if segment.rows else ""
        return end

    def _continues(self, segment: Segment) -> bool:
        """Return whether the stored rows are the first ones of the segment."""
        count = self._count
        return (
            self._source == _segment_start(segment)
            and count <= len(segment.rows)
            and (not count or segment.rows[count - 1] == self._last)
        )


def slot_memory_name(slot: int, name: str) -> str:
    """Return the name under which a slot's own memory is reserved; no file has this name."""
    return f"slate/{slot}/{name}"


def read_step_slot(memory_of: Callable[[str], memoryview]) -> StoredStep | None:
    """Return the complete step of a slot whose writer has ended; None if there is none.

    Crash: reads only.

    Args:
        memory_of: Function from a name to its reserved memory; empty if there is none.
    """
    try:
        return _read(*(_copies(memory_of(name)) for name in ("said", "notes", "rows")))
    except (*PARSE_ERRORS, RecursionError):
        return None


_Copy = Callable[[int, int], bytes]


def _copies(memory: memoryview) -> _Copy:
    """Return a function that copies bytes of shared memory, so that verified bytes are used."""

    def copy(start: int, stop: int) -> bytes:
        if not 0 <= start <= stop <= len(memory):
            raise IntegrityError(f"bytes {start} to {stop} do not exist")
        return bytes(memory[start:stop])

    return copy


def _read(message_at: _Copy, note_at: _Copy, row_at: _Copy) -> StoredStep:
    """Return the step in the message.

    Raises:
        IntegrityError: There is no message, or the message fails verification. Other errors of
            ``PARSE_ERRORS`` are possible.
    """
    size_bytes = int.from_bytes(message_at(0, _WORD_BYTES), "little")
    if not size_bytes:
        raise IntegrityError("the slot holds no record")
    proof = message_at(_WORD_BYTES, _HEAD_BYTES)
    message = message_at(_HEAD_BYTES, _HEAD_BYTES + size_bytes)
    fields = json.loads(message)
    notes = [note_at(slot.start, slot.start + slot.size_bytes) for slot in note_offsets_of(fields)]
    if _proof(message, (hashlib.sha256(note).digest() for note in notes)) != proof:
        raise IntegrityError("the slot holds another record")
    return decode_step(fields, notes, lambda size_bytes: row_at(0, size_bytes))


def _proof(message: bytes, digests: Iterable[bytes]) -> bytes:
    return hashlib.sha256(b"".join([*digests, message])).digest()


def _reserved_bytes(note: bytes) -> int:
    """Return the reserved length of a note, because the numbers in it get longer."""
    return len(note) + len(note) // 8 + _SPARE_BYTES


def _segment_start(segment: Segment) -> tuple[Any, ...]:
    return segment.previous, segment.opens, segment.start, segment.before


def _encoded_rows(rows: Sequence[str]) -> bytes:
    return "".join(f"{row}\n" for row in rows).encode("ascii")
