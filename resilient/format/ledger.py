"""Encoding of the sample ledger, the record of the samples that a run trained on or skipped.

A record of the ledger is one row, a JSON list. The records form a hash chain. The hash of a record
is its link: a SHA-256 over the previous link, the generation and the row. The generation is the
number of the attempt that wrote the record. A link therefore depends on every record since the run
began.

The ledger is stored in segments. A segment has the records between one checkpoint and the next. The
division into segments does not change the links::

    link 0 = sha256(run and place where the ledger begins)
    link 1 = sha256(link 0, generation, row 1)    link 2 = sha256(link 1, generation, row 2)    ...

Kinds of rows::

    ["step", first, last, epoch, start, stop, rounds, batch, seats, ranks, updates, loss]
    ["skip", epoch, start, stop, reason]
    ["order", epoch, size, seed, kind, digest]
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from resilient.errors import IntegrityError
from resilient.format.digest import root_digest
from resilient.format.document import canonical, check_ledger, seal, unseal
from resilient.format.keys import CheckpointId, parse_segment, segment_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

FORMAT = "resilient-ledger"
VERSION = 1
CHECK_LENGTH = 16
"""Characters of each link that a segment keeps, to identify the first changed record."""
_POSITION_FIELDS = ("step", "epoch", "samples")


@dataclass(frozen=True, slots=True)
class LedgerPosition:
    """Progress of a run: the last step, and the samples used in its epoch."""

    step: int = 0
    epoch: int = 0
    samples: int = 0


@dataclass(frozen=True, slots=True)
class LedgerHead:
    """Ledger entry of a manifest, which reveals any change of a segment.

    Attributes:
        segment: Key of the checkpoint's segment.
        head: Link after the last record of the segment.
        records: Number of records since the ledger began.
        place: Position after the last record.
    """

    segment: str
    head: str
    records: int
    place: LedgerPosition

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able value."""
        place = self.place
        return {
            "segment": self.segment,
            "head": self.head,
            "records": self.records,
            "place": [place.step, place.epoch, place.samples],
        }

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> LedgerHead | None:
        """Parse the ledger entry of a manifest's data, None if there is none.

        Raises:
            IntegrityError: The entry is malformed.
        """
        if "ledger" not in data:
            return None
        try:
            value = data["ledger"]
            return LedgerHead(
                str(value["segment"]),
                str(value["head"]),
                int(value["records"]),
                LedgerPosition(*(int(number) for number in value["place"])),
            )
        except (KeyError, TypeError, ValueError) as error:
            problem = f"the ledger entry of the manifest is invalid: {error}"
            raise IntegrityError(problem) from error


@dataclass(frozen=True, slots=True)
class Segment:
    """The records of one generation between one checkpoint and the next.

    Attributes:
        run_id: Id of the run.
        checkpoint: Checkpoint whose save wrote the segment.
        previous: Key of the previous segment; empty for the first segment.
        opens: Head of the previous segment; empty for the first segment.
        start: Position before its first record.
        stop: Position after its last record.
        before: Number of records in all previous segments.
        rows: The records, each as canonical JSON.
        checks: Beginning of each record's link, as stored.
        head: Link after the last record, as stored.
    """

    run_id: str
    checkpoint: CheckpointId
    previous: str
    opens: str
    start: LedgerPosition
    stop: LedgerPosition
    before: int
    rows: tuple[str, ...]
    checks: tuple[str, ...] = ()
    head: str = ""

    @property
    def key(self) -> str:
        """Key of the segment."""
        return segment_key(self.checkpoint)

    @property
    def anchor(self) -> LedgerHead:
        """The manifest's entry for this segment."""
        return LedgerHead(self.key, self.head, self.before + len(self.rows), self.stop)

    @property
    def opening(self) -> str:
        """Link before its first record."""
        return self.opens or first_link(self.run_id, self.start)

    @property
    def links(self) -> list[str]:
        """Link of each record, computed again."""
        return list(extend_chain(self.opening, self.checkpoint.generation, self.rows))

    def closed(self) -> Segment:
        """Return a copy with its links filled in."""
        links = self.links
        checks = tuple(link[:CHECK_LENGTH] for link in links)
        return replace(self, checks=checks, head=links[-1] if links else self.opening)


def first_link(run_id: str, start: LedgerPosition) -> str:
    """Return the link before the first record of a ledger."""
    document = {"format": FORMAT, "run_id": run_id, "start": _position_to_json(start)}
    return root_digest(canonical(document))


def extend_chain(link: str, generation: int, rows: Iterable[str]) -> Iterator[str]:
    """Yield the link of each row of a generation, starting after ``link``."""
    for row in rows:
        link = root_digest(f"{link}\n{generation}\n{row}\n".encode())
        yield link


def _position_to_json(place: LedgerPosition) -> dict[str, int]:
    return {name: getattr(place, name) for name in _POSITION_FIELDS}


def step_row(place: LedgerPosition, step: Sequence[Any], loss: float) -> str:
    """Return the record of optimizer steps.

    Args:
        place: Position before the steps.
        step: Last step, epoch, start, stop, rounds, batch, seats, ranks, updates.
        loss: Mean over the steps and ranks.
    """
    last, epoch, start, stop, rounds, batch, owners, ranks, updates = step
    text = repr(loss) if math.isfinite(loss) else f'"{loss}"'
    return (
        f'["step",{place.step + 1},{last},{epoch},{start},{stop},{rounds},{batch},{owners},'
        f"{ranks},{updates},{text}]"
    )


def row_of(*values: Any) -> str:
    """Return a record of any other kind."""
    return canonical(list(values)).decode().rstrip("\n")


def encode_segment(segment: Segment) -> bytes:
    """Return the bytes of a closed segment."""
    return seal(
        {
            "format": FORMAT,
            "version": VERSION,
            "run_id": segment.run_id,
            "generation": segment.checkpoint.generation,
            "step": segment.checkpoint.step,
            "previous": segment.previous,
            "opens": segment.opens,
            "start": _position_to_json(segment.start),
            "stop": _position_to_json(segment.stop),
            "before": segment.before,
            "records": [json.loads(row) for row in segment.rows],
            "checks": list(segment.checks),
            "head": segment.head,
        }
    )


def decode_segment(data: bytes, key: str, *, is_sealed: bool = True) -> Segment:
    """Return the segment in ``data``; only an audit verifies its chain.

    Args:
        data: Bytes of the segment.
        key: Key of the segment.
        is_sealed: Whether the seal must match. An audit passes False to name the changed record.

    Raises:
        IntegrityError: The bytes are damaged, are not a segment, or belong under another key.
    """
    fields = unseal(data, key) if is_sealed else _parse(data, key)
    if (fields.get("format"), fields.get("version")) != (FORMAT, VERSION):
        raise IntegrityError(f"`{key}`: this release cannot read the ledger segment", key=key)
    try:
        check_ledger(fields)
        checkpoint = CheckpointId(fields["generation"], fields["step"])
        start, stop = (
            LedgerPosition(*(fields[end][name] for name in _POSITION_FIELDS))
            for end in ("start", "stop")
        )
        rows = tuple(row_of(*row) for row in fields["records"])
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(f"`{key}`: contradicts itself ({error})", key=key) from error
    segment = Segment(
        fields["run_id"],
        checkpoint,
        fields["previous"],
        fields["opens"],
        start,
        stop,
        fields["before"],
        rows,
        tuple(fields["checks"]),
        fields["head"],
    )
    if parse_segment(key) != checkpoint:
        raise IntegrityError(f"`{key}` holds the segment of {checkpoint}", key=key)
    return segment


def _parse(data: bytes, key: str) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"`{key}`: not readable as JSON ({error})", key=key) from error
    if not isinstance(fields, dict):
        raise IntegrityError(f"`{key}`: not a segment of a ledger", key=key)
    return fields
