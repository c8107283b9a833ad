"""The proof that a run trained on each sample exactly once, in all of its lives.

It begins at a manifest, which names the head of the chain, and goes back segment by segment to
where the ledger begins; then forward through the records. What other lives put and nobody goes on
from is read as well: those steps were trained and lost.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from resilient.errors import IncompatibleCheckpoint, IntegrityError, KeyNotFound
from resilient.format.ledger import (
    CHECK_LENGTH,
    Anchor,
    Place,
    Segment,
)
from resilient.vault.ledger.coverage import Coverage, Epoch, Gap
from resilient.vault.ledger.flaws import Flaw
from resilient.vault.ledger.lives import flaws_of_lives
from resilient.vault.ledger.orders import expected_digest
from resilient.vault.ledger.segments import list_segments, read_altered, read_segment
from resilient.vault.registry.catalog import read_manifest
from resilient.vault.registry.generations import list_numbers, read_generation
from resilient.vault.registry.signing import check_signature

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from resilient.format.manifest import Manifest
    from resilient.format.names import CheckpointId
    from resilient.format.signature import Signing
    from resilient.storage.store import Store

    Expected = Callable[[str, int, int, int], str]


@dataclass(frozen=True, slots=True)
class Abandoned:
    """Steps that a life trained, saved, and that no later one goes on from."""

    checkpoint: CheckpointId
    first: int
    last: int


@dataclass(slots=True)
class Audit:
    """What a ledger proves of a run, up to one checkpoint.

    Attributes:
        checkpoint: where the chain was picked up.
        run_id: of the run.
        began: where the ledger begins: not at step 0 in a run that is older than ledgers.
        place: where it ends.
        segments: how many it has.
        records: how many they hold.
        lives: generations whose work is part of the result, rising.
        claimed: how many lives have a record.
        ranks: numbers of ranks that shared the data, one after the other.
        epochs: what became of their samples.
        left_out: samples that were left out on purpose, by reason.
        idle: steps that changed nothing.
        abandoned: what was trained, saved and lost.
        flaws: why it is no proof; empty if it is one. The first comes first in the chain.
    """

    checkpoint: CheckpointId
    run_id: str = ""
    began: Place = field(default_factory=Place)
    place: Place = field(default_factory=Place)
    segments: int = 0
    records: int = 0
    lives: tuple[int, ...] = ()
    claimed: int = 0
    ranks: tuple[int, ...] = ()
    epochs: tuple[Epoch, ...] = ()
    left_out: dict[str, int] = field(default_factory=dict)
    idle: int = 0
    abandoned: tuple[Abandoned, ...] = ()
    flaws: list[Flaw] = field(default_factory=list)

    @property
    def is_proven(self) -> bool:
        """Whether every sample of every epoch was trained once, or its absence is accounted for."""
        return not self.flaws


def audit(
    store: Store,
    line: Sequence[CheckpointId],
    signing: Signing | None = None,
    expected: Expected = expected_digest,
) -> Audit:
    """Return what the ledger proves of the first checkpoint of ``line``.

    Crash: reads only.

    Args:
        store: the repository.
        line: what resume may use, newest first; every one of them must fit the chain.
        signing: whether the manifests must be signed, and by which key.
        expected: computes the digests of orders.

    Raises:
        KeyNotFound: the checkpoint is gone.
        StoreError: the store failed; nothing is concluded from silence.
    """
    found = Audit(line[0])
    anchors = _anchors(store, line, signing, found)
    anchor = anchors.get(line[0])
    if anchor is None:
        return found
    chain = _follow_back(store, *anchor, found)
    if not chain:
        return found
    found.lives = tuple(sorted({one.checkpoint.generation for one in chain}))
    numbers = list_numbers(store)
    found.claimed = len(numbers)
    # First: without its record a life is taken to have begun elsewhere, and what follows is wrong.
    found.flaws += flaws_of_lives(store, numbers, found.lives, found.run_id)
    found.flaws += [flaw for one in chain for flaw in broken_links(one)]
    found.flaws += [flaw for pair in pairwise(chain) for flaw in _breaks(store, *pair)]
    known = {chain[0].opening, *(link for one in chain for link in one.links)}
    found.flaws += _unanchored(chain, known, anchors, line[0])
    if not found.flaws:
        _cover(chain, *anchor, found, expected)
    found.segments = len(chain)
    found.abandoned = tuple(_abandoned(store, {one.key for one in chain}, known, found))
    return found


_Anchored = tuple["Manifest", Anchor]


def _anchors(
    store: Store, line: Sequence[CheckpointId], signing: Signing | None, found: Audit
) -> dict[CheckpointId, _Anchored]:
    """Return what each manifest says of the ledger; note those that cannot be believed."""
    anchors = {}
    for one in line:
        key = one.manifest_key
        try:
            manifest = read_manifest(store, one)
            if signing is not None:
                check_signature(store, manifest, signing)
            anchor = Anchor.from_data(manifest.data)
        except (IntegrityError, IncompatibleCheckpoint) as error:
            found.flaws.append(Flaw(key, 0, error.message))
            continue
        except KeyNotFound:
            if one == line[0]:
                raise
            continue  # rotated away meanwhile
        if anchor is not None:
            anchors[one] = (manifest, anchor)
        elif one == line[0]:
            found.flaws.append(Flaw(key, 0, "was saved without a ledger: nothing is proved"))
    return anchors


def _follow_back(store: Store, manifest: Manifest, anchor: Anchor, found: Audit) -> list[Segment]:
    """Return the segments from where the ledger begins to the anchor; none if they do not meet."""
    found.run_id, key = manifest.run_id, anchor.segment
    named_by, chain = manifest.checkpoint.manifest_key, list[Segment]()
    seen: set[str] = set()
    while key:
        if key in seen:
            found.flaws.append(Flaw(named_by, 0, f"names `{key}` before itself"))
            return []
        seen.add(key)
        segment = _segment(store, key, named_by, found)
        if segment is None:
            return []
        chain.append(segment)
        named_by, key = key, segment.previous
    return chain[::-1]


def _segment(store: Store, key: str, named_by: str, found: Audit) -> Segment | None:
    """Return a segment of the chain; note what is wrong with its bytes."""
    try:
        return read_segment(store, key)
    except KeyNotFound:
        found.flaws.append(Flaw(key, 0, f"is missing, and `{named_by}` goes on from it"))
        return None
    except IntegrityError as error:
        sealed = Flaw(key, 0, error.message)
    try:
        altered = read_altered(store, key)
    except (IntegrityError, KeyNotFound):
        found.flaws.append(sealed)
        return None
    # Its links say where, better than its seal does.
    found.flaws += broken_links(altered) or [sealed]
    return None


def broken_links(segment: Segment) -> list[Flaw]:
    """Return the first place of a segment where its own chain does not hold (pure)."""
    stored, rows, links = segment.checks, segment.rows, segment.links
    for number, (row, link) in enumerate(zip(rows, links, strict=True), 1):
        if number > len(stored) or stored[number - 1] != link[:CHECK_LENGTH]:
            # The first link also stands for the run, the life and the place of the segment.
            header = ", or what the segment says of itself," if number == 1 else ""
            problem = f"this record{header} is not what was chained here: {row}"
            return [Flaw(segment.key, number, problem)]
    if len(stored) != len(rows):
        return [Flaw(segment.key, len(rows) + 1, "a record is missing here")]
    if segment.head != (links[-1] if links else segment.opening):
        return [Flaw(segment.key, 0, "its head is not the link of its last record")]
    return []


def _breaks(store: Store, before: Segment, after: Segment) -> list[Flaw]:
    """Return why a segment does not go on from the one that it names."""
    if before.run_id != after.run_id:
        problem = f"is of run {before.run_id}, and `{after.key}` of run {after.run_id}"
        return [Flaw(before.key, 0, problem)]
    if before.head != after.opens:
        problem = f"ends in another head than `{after.key}` goes on from: it was replaced"
        return [Flaw(before.key, 0, problem)]
    one, other = before.checkpoint, after.checkpoint
    if one >= other:
        return [Flaw(after.key, 0, f"goes on from `{before.key}`, which is not older")]
    parent = _parent(store, other.generation)
    if one.generation < other.generation and parent is not None and parent != one:
        problem = f"goes on from {one}, and life {other.generation} began from {parent}"
        return [Flaw(after.key, 0, problem)]
    return []


def _parent(store: Store, number: int) -> CheckpointId | None:
    """Return where a life began; None if its record says nothing, which is a flaw by itself."""
    try:
        return read_generation(store, number).parent
    except (IntegrityError, KeyNotFound):
        return None


def _unanchored(
    chain: Sequence[Segment],
    known: Collection[str],
    anchors: Mapping[CheckpointId, _Anchored],
    newest: CheckpointId,
) -> list[Flaw]:
    """Return the manifests that name a head which the chain has not, or not there."""
    flaws = []
    for one, (manifest, anchor) in anchors.items():
        is_there = anchor.head == chain[-1].head if one == newest else anchor.head in known
        if not is_there:
            said = f"says that the ledger ends in {anchor.head[:CHECK_LENGTH]}"
            flaws.append(Flaw(one.manifest_key, 0, f"{said}, and it does not"))
        elif manifest.run_id != chain[0].run_id:
            problem = f"is of run {manifest.run_id}, and its ledger of run {chain[0].run_id}"
            flaws.append(Flaw(one.manifest_key, 0, problem))
    return flaws


def _cover(
    chain: Sequence[Segment],
    manifest: Manifest,
    anchor: Anchor,
    found: Audit,
    expected: Expected,
) -> None:
    """Follow the records from the first to the last; note where they leave or repeat samples."""
    found.began = chain[0].start
    coverage = Coverage(found.began, expected)
    for segment in chain:
        if (segment.start, segment.before) != (coverage.place, found.records):
            said = f"{segment.start} after {segment.before} records"
            problem = f"begins at {said}, and comes after {coverage.place}, {found.records} records"
            found.flaws.append(Flaw(segment.key, 0, problem))
            return
        for number, row in enumerate(segment.rows, 1):
            try:
                coverage.follow(row)
            except Gap as gap:
                found.flaws.append(Flaw(segment.key, number, str(gap)))
                return
            found.records += 1
        if segment.stop != coverage.place:
            problem = f"says that it ends at {segment.stop}, and it ends at {coverage.place}"
            found.flaws.append(Flaw(segment.key, 0, problem))
            return
    problem = _ends_elsewhere(coverage, manifest, anchor, found.records)
    if problem:
        found.flaws.append(Flaw(manifest.checkpoint.manifest_key, 0, problem))
    found.place, found.idle = coverage.place, coverage.idle
    found.ranks, found.left_out = tuple(coverage.ranks), coverage.left_out
    found.epochs = tuple(coverage.epochs[one] for one in sorted(coverage.epochs))


def _ends_elsewhere(coverage: Coverage, manifest: Manifest, anchor: Anchor, records: int) -> str:
    """Return why the records do not end where the checkpoint is; empty if they do."""
    place, step = coverage.place, manifest.checkpoint.step
    if (anchor.place, anchor.records) != (place, records):
        said = f"{anchor.records} records up to {anchor.place}"
        return f"says that the ledger has {said}; it has {records} up to {place}"
    if place.step != step:
        return f"is of step {step}, and the ledger ends at step {place.step}"
    if "epoch" in manifest.data and "samples" in manifest.data:
        try:
            coverage.finish(manifest.data["epoch"], manifest.data["samples"])
        except Gap as gap:
            return str(gap)
    return ""


def _abandoned(store: Store, chain: set[str], known: set[str], found: Audit) -> list[Abandoned]:
    """Return what segments outside the chain hold that the chain does not."""
    lost = []
    for key in list_segments(store):
        if key in chain:
            continue
        try:
            segment = read_segment(store, key)
        except KeyNotFound:
            continue
        except IntegrityError as error:
            found.flaws.append(Flaw(key, 0, error.message))
            continue
        found.flaws += broken_links(segment)
        pairs = zip(segment.rows, segment.links, strict=True)
        steps = [json.loads(row) for row, link in pairs if link not in known]
        steps = [one for one in steps if one[0] == "step"]
        known.update(segment.links)
        if steps:
            lost.append(Abandoned(segment.checkpoint, steps[0][1], steps[-1][2]))
    return lost
