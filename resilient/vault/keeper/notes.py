"""What a slot holds, as JSON: a message that is said at each step, and notes that are not.

A note is what mostly stays from step to step: where the tensors of one file lie, which checkpoints
may be referred to, what of the run's configuration is plain. The message names each by its place.
The rows of the ledger are named by number and length; the head of the segment proves them.

The job of a held step streams nothing, keeps nothing from rotation and has no topic yet: a save
that nobody has begun.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import compress
from json.encoder import encode_basestring_ascii as _quoted
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

from resilient.errors import IntegrityError
from resilient.format.ledger import Place, Segment, encode_segment
from resilient.format.manifest import Manifest, encode
from resilient.format.names import CheckpointId, parse_checkpoint, parse_segment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from resilient.format.manifest import TensorEntry
    from resilient.vault.reuse.refer import Base
    from resilient.vault.saving.persist import Job

BASES, CONFIG = "/bases", "/config"
"""Names of notes, as no file is called."""
_AS_SAID = ("run_id", "created_at", "world", "software", "data", "metrics")
_PLAIN = frozenset({int, float, bool, type(None)})
# Faster than json.dumps, which makes an encoder each time that it is asked to refuse NaN.
_text = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


class Spot(NamedTuple):
    """Where a note lies among those of its slot."""

    start: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Whole:
    """A step that a slot holds whole.

    Attributes:
        checkpoint: what it becomes if it lands.
        after: the folder of the checkpoint that its ledger goes on from; empty if it begins one.
        context: of its events.
        said: the message.
        layouts: where the tensors of each file lie, as text.
        bases: which checkpoints may be referred to, as text.
        config: what of the configuration the message does not say, as text.
        segment: of the ledger; None where another rank keeps it.
    """

    checkpoint: CheckpointId
    after: str
    context: Mapping[str, Any]
    said: Mapping[str, Any]
    layouts: tuple[bytes, ...]
    bases: bytes
    config: bytes
    segment: Segment | None

    def job(self, rank: int, topic: str) -> dict[str, Any]:
        """Return the job as ``handover.to_json`` does.

        Raises:
            IntegrityError: what was said is no manifest.
        """
        said = self.said
        parts = [
            {"name": name, "scope": scope, "document": document}
            for name, scope, document in said["parts"]
        ]
        tensors = [tensor for layout in self.layouts for tensor in json.loads(layout)]
        return {
            "checkpoint": self.checkpoint.folder,
            "about": encode(self._about()).decode(),
            "files": [[name, size_bytes] for name, size_bytes, *_ in said["files"]],
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
            "is_first": said["is_first"],
            "topic": topic,
            "began_seconds": said["began_seconds"],
            "stall_seconds": said["stall_seconds"],
            "bases": json.loads(self.bases),
            "copies_bytes_max": None,
            "segment": encode_segment(self.segment).decode() if self.segment else None,
            "token": said["token"],
            "spoiled": None,
        }

    def _about(self) -> Manifest:
        said = self.said["about"]
        known = {name: said[name] for name in _AS_SAID}
        return Manifest(
            checkpoint=self.checkpoint,
            parent=None if said["parent"] is None else _named(said["parent"]),
            config={**json.loads(self.config), **said["config"]},
            files=(),
            tensors=(),
            parts=(),
            protects=tuple(map(_named, said["protects"])),
            **known,
        )


class Plain:
    """The plain values of a mapping, which are mostly the same each time it is made.

    Only what cannot change is known again: texts that are equal, and whatever else is the very
    object, for 1, 1.0 and True are equal. The rest is ``loose``, and said each time.

    Attributes:
        note: of what is plain, under an object of its own each time it changes.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._texts: tuple[list[bool], list[Any]] = ([], [])
        self._others: tuple[list[bool], list[Any]] = ([], [])
        self._loose: list[str] = []
        self.note: tuple[object, Callable[[Any], bytes]] = (self, lambda _: b"{}")

    def loose(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is not plain; ``note`` is of all else."""
        if not self._knows(fields):
            self._names, values = [*fields], [*fields.values()]
            is_text = [type(one) is str for one in values]
            is_other = [type(one) in _PLAIN for one in values]
            self._texts = (is_text, [*compress(values, is_text)])
            self._others = (is_other, [*compress(values, is_other)])
            self._loose = [
                name
                for name, *is_plain in zip(fields, is_text, is_other, strict=True)
                if not any(is_plain)
            ]
            plain = {name: one for name, one in fields.items() if name not in self._loose}
            self.note = (object(), lambda _: _text(plain).encode())
        return {name: fields[name] for name in self._loose}

    def _knows(self, fields: Mapping[str, Any]) -> bool:
        values = [*fields.values()]
        (is_text, texts), (is_other, others) = self._texts, self._others
        return (
            [*fields] == self._names
            and [*compress(values, is_text)] == texts
            and all(map(is_, compress(values, is_other), others))
        )


def note_of_layout(tensors: Iterable[TensorEntry]) -> bytes:
    """Return where tensors lie, as the receipt of a rank says it."""
    # By hand: at nearly every step one of the files is laid out otherwise.
    return f"[{','.join(map(_tensor, tensors))}]".encode()


def _tensor(one: TensorEntry) -> str:
    regions = ",".join(
        f'{{"region":{{"offsets":{[*at.region.offsets]},"lengths":{[*at.region.lengths]}}},'
        f'"file":{_quoted(at.file)},"start":{at.start},"size_bytes":{at.size_bytes},'
        f'"digest":{_quoted(at.digest)}}}'
        for at in one.regions
    )
    return (
        f'{{"name":{_quoted(one.name)},"part":{_quoted(one.part)},"dtype":{_quoted(one.dtype)},'
        f'"shape":{[*one.shape]},"regions":[{regions}]}}'
    )


def note_of_bases(bases: Iterable[Base]) -> bytes:
    """Return which checkpoints may be referred to."""
    return _text([one.to_json() for one in bases]).encode()


def message_of(
    job: Job, spots: Mapping[str, Spot], config: Mapping[str, Any], rows_bytes: int, context: str
) -> bytes:
    """Return what is said at a step.

    Args:
        job: what the slot holds.
        spots: its notes: the layouts by name of the file, ``BASES`` and ``CONFIG``.
        config: what of its configuration is not in that note.
        rows_bytes: length of the rows of its ledger, as they lie there.
        context: of its events, as JSON.

    Raises:
        ValueError: something of it cannot be said in JSON.
    """
    about, segment = job.about, job.segment
    said = {
        "checkpoint": about.checkpoint.folder,
        "about": {
            "run_id": about.run_id,
            "parent": about.parent.folder if about.parent else None,
            "created_at": about.created_at,
            "world": dict(about.world),
            "config": config,
            "software": dict(about.software),
            "data": dict(about.data),
            "metrics": dict(about.metrics),
            "protects": [one.folder for one in about.protects],
        },
        "files": [[one.name, len(one.data), *spots[one.name]] for one in job.files],
        "parts": [[one.name, one.scope, one.document] for one in job.parts],
        "is_first": job.is_first,
        "token": job.token,
        "began_seconds": job.began_seconds,
        "stall_seconds": job.stall_seconds(),
        "bases": spots[BASES],
        "config": spots[CONFIG],
        "segment": _said_of(segment, rows_bytes) if segment else None,
    }
    return f'{_text(said)[:-1]},"context":{context}}}'.encode()


def context_of(context: Mapping[str, Any]) -> str:
    """Return the context of events for ``message_of``: it is the same all the time."""
    return _text(dict(context))


def spots_of(said: Mapping[str, Any]) -> list[Spot]:
    """Return where the notes lie that a message names, in the order of ``message_of``."""
    layouts = [Spot(start, size_bytes) for _, _, start, size_bytes in said["files"]]
    return [*layouts, Spot(*said["bases"]), Spot(*said["config"])]


def whole_of(
    said: Mapping[str, Any], notes: Sequence[bytes], rows_of: Callable[[int], bytes]
) -> Whole:
    """Return the step that a message and its notes say.

    Args:
        said: the message.
        notes: that it names, in the order of ``spots_of``.
        rows_of: gives so many bytes of the ledger's rows.

    Raises:
        IntegrityError: these are not the rows of its ledger.
        ValueError: it says nothing; or whatever else of ``handover.NONSENSE``.
    """
    checkpoint = _named(said["checkpoint"])
    segment = _segment(said["segment"], checkpoint, rows_of) if said["segment"] else None
    before = parse_segment(segment.previous) if segment and segment.previous else None
    *layouts, bases, config = notes
    after = before.folder if before else ""
    return Whole(checkpoint, after, said["context"], said, tuple(layouts), bases, config, segment)


def _said_of(segment: Segment, rows_bytes: int) -> dict[str, Any]:
    """Return a segment but for its rows and its checkpoint."""
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
    said: Mapping[str, Any], checkpoint: CheckpointId, rows_of: Callable[[int], bytes]
) -> Segment:
    count, size_bytes = said["rows"]
    rows = tuple(rows_of(size_bytes).decode("ascii").split("\n")[:-1])
    segment = Segment(
        said["run_id"],
        checkpoint,
        said["previous"],
        said["opens"],
        Place(*said["start"]),
        Place(*said["stop"]),
        said["before"],
        rows,
    ).closed()
    if (len(rows), segment.head) != (count, said["head"]):
        raise IntegrityError(f"the ledger of {checkpoint} does not end where its manifest says")
    return segment


def _named(folder: str) -> CheckpointId:
    checkpoint = parse_checkpoint(folder)
    if checkpoint is None:
        raise IntegrityError(f"{folder!r} is no checkpoint")
    return checkpoint


def _place(place: Place) -> list[int]:
    return [place.step, place.epoch, place.samples]
