"""Ledger audit: check that a run trained on each sample exactly once, over all attempts.

The ledger records the samples of each step in segments, one per save, which form a hash chain. The
audit begins at a checkpoint's manifest (table of contents), which names the newest segment of the
chain. The audit goes back segment by segment to the beginning of the ledger, then forward through
the records. The audit also reads segments outside the chain. The steps in these segments were
trained, but no later attempt continued from them.

An attempt stores a record with its number (generation) before anything else, and the record is
never deleted. A number without a record therefore stands for work that the audit cannot account
for. The exceptions are numbers that an attempt skipped when it claimed its own number. The record
of this attempt has the count of these numbers (``Generation.skipped``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from resilient.checkpoint.catalog import committed, read_manifest
from resilient.checkpoint.generations import list_marks, list_numbers, read_generation
from resilient.checkpoint.ledger_segments import (
    expected_digest,
    list_segments,
    read_altered,
    read_segment,
)
from resilient.checkpoint.signing import check_signature
from resilient.errors import IncompatibleCheckpoint, IntegrityError, KeyNotFound
from resilient.format.keys import generation_key, parse_segment
from resilient.format.ledger import CHECK_LENGTH, LedgerHead, LedgerPosition, Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from resilient.checkpoint.generations import Generation
    from resilient.format.keys import CheckpointId
    from resilient.format.manifest import Manifest
    from resilient.format.signature import SigningPolicy
    from resilient.storage.store import Store

    Expected = Callable[[str, int, int, int], str]

# Values in JSON since schema version 1; `resilient audit` prints other words.
ORDERS = ("computed anew", "one in all lives", "not known")


@dataclass(slots=True)
class EpochCoverage:
    """Coverage of the samples of one epoch.

    Attributes:
        number: Number of the epoch, from 0.
        size: Samples in the dataset; 0 if it has no length, or the length is unknown.
        before: Samples used up before the ledger began.
        trained: Number of distinct samples that steps used up.
        left_out: Samples left out on purpose.
        repeated: Samples trained again, to complete a last round for all ranks.
        order: Source of the sample order, one of ``ORDERS``.
        digest: Digest of the sample order.
    """

    number: int
    size: int = 0
    before: int = 0
    trained: int = 0
    left_out: int = 0
    repeated: int = 0
    order: str = ORDERS[2]
    digest: str = ""

    @property
    def is_complete(self) -> bool:
        """True if every sample was used up or left out on purpose."""
        return self.size > 0 and self.before + self.trained + self.left_out == self.size


class LedgerGap(Exception):
    """A record does not continue where the previous record ended."""


@dataclass(slots=True)
class Coverage:
    """Follower of records in the order of the chain; a record out of order raises ``LedgerGap``.

    Attributes:
        place: End of the last record.
        expected: Digest of an order by kind, size, seed and epoch; empty if it cannot be computed.
        epochs: Coverage by epoch number.
        ranks: Successive numbers of ranks that shared the data, without repetition.
        left_out: Number of samples left out, by reason.
        steps: Optimizer steps.
        idle: Steps that changed nothing, such as after an overflow in half precision.
    """

    place: LedgerPosition
    expected: Callable[[str, int, int, int], str]
    epochs: dict[int, EpochCoverage] = field(default_factory=dict)
    ranks: list[int] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    idle: int = 0

    def __post_init__(self) -> None:
        if self.place.samples:
            number, first_sample = self.place.epoch, self.place.samples
            self.epochs[number] = EpochCoverage(number, before=first_sample)

    def follow(self, row: str) -> None:
        """Process the next record.

        Raises:
            LedgerGap: The record does not continue the records before it.
        """
        kind, *values = json.loads(row)
        try:
            if kind == "step":
                self._step(*values)
            elif kind == "skip":
                self._skip(*values)
            elif kind == "order":
                self._order(*values)
            else:
                raise LedgerGap(f"a record of unknown kind {kind!r}")
        except (TypeError, ValueError) as error:
            raise LedgerGap(f"no record of kind `{kind}`: {error}") from error

    def finish(self, epoch: int, samples: int) -> None:
        """Compare the end of the records with the data position of the checkpoint.

        Raises:
            LedgerGap: The two positions differ.
        """
        place = self.place
        if (epoch, samples) == (place.epoch, place.samples):
            return
        if (epoch, samples) == (place.epoch + 1, 0):
            self._end_epoch(place.epoch)
            return
        raise LedgerGap(
            f"the checkpoint is at epoch {epoch}, sample {samples}, but the ledger ends at "
            f"epoch {place.epoch}, sample {place.samples}"
        )

    def _step(self, *values: int) -> None:
        first, last, epoch, start, stop, rounds, batch, owners, ranks, updates, _loss = values
        if first != self.place.step + 1 or last < first:
            raise LedgerGap(f"steps {first} to {last} come after step {self.place.step}")
        steps_text = "step " + (f"{first}" if first == last else f"{first} to {last}")
        coverage = self._begin_record(steps_text, epoch, start)
        self._advance(steps_text, coverage, start, stop)
        assigned_samples, trained_samples = rounds * batch * owners, stop - start
        # A round that is not full is the last of its epoch; a single rank does not pad it.
        is_last_round = assigned_samples > trained_samples and (
            not coverage.size or stop == coverage.size
        )
        if not 0 < trained_samples <= assigned_samples or (
            assigned_samples > trained_samples and not is_last_round
        ):
            raise LedgerGap(
                f"{steps_text} used samples {start} to {stop} of epoch {epoch} in {rounds} rounds "
                f"of {owners} x {batch}: {assigned_samples} samples"
            )
        coverage.trained += trained_samples
        coverage.repeated += assigned_samples - trained_samples if owners > 1 else 0
        if self.ranks[-1:] != [ranks]:
            self.ranks.append(ranks)
        self.place = LedgerPosition(last, epoch, stop)
        self.steps += last - first + 1
        self.idle += last - first + 1 - updates

    def _skip(self, epoch: int, start: int, stop: int, reason: str) -> None:
        coverage = self._begin_record(f"skipped samples ({reason})", epoch, start)
        self._advance(reason, coverage, start, stop)
        coverage.left_out += stop - start
        self.left_out[reason] = self.left_out.get(reason, 0) + stop - start
        self.place = replace(self.place, epoch=epoch, samples=stop)

    def _order(self, epoch: int, size: int, seed: int, kind: str, digest: str) -> None:
        coverage = self.epochs.setdefault(epoch, EpochCoverage(epoch))
        if (coverage.digest and digest and coverage.digest != digest) or (
            coverage.size and coverage.size != size
        ):
            raise LedgerGap(
                f"epoch {epoch} continues in another order than it started with, so samples are "
                "repeated or missing"
            )
        if digest and not coverage.digest:
            expected = self.expected(kind, size, seed, epoch)
            if expected and expected != digest:
                raise LedgerGap(f"the order of epoch {epoch} is not that of seed {seed}")
            coverage.order, coverage.digest = ORDERS[0 if expected else 1], digest
        coverage.size = size

    def _begin_record(self, subject: str, epoch: int, start: int) -> EpochCoverage:
        """Return the epoch of a record that begins at ``start``."""
        place = self.place
        if epoch == place.epoch + 1 and place.samples:
            self._end_epoch(place.epoch)
            place = LedgerPosition(place.step, epoch, 0)
        if (epoch, start) == (place.epoch, place.samples):
            return self.epochs.setdefault(epoch, EpochCoverage(epoch))
        if epoch == place.epoch:
            times_trained = "twice" if start < place.samples else "never"
            low, high = sorted((start, place.samples))
            raise LedgerGap(
                f"{subject} starts at sample {start} of epoch {epoch} instead of {place.samples}: "
                f"samples {low} to {high} were trained {times_trained}"
            )
        raise LedgerGap(
            f"{subject} is at epoch {epoch}, sample {start}, but the previous record ends at "
            f"epoch {place.epoch}, sample {place.samples}"
        )

    def _end_epoch(self, epoch: int) -> None:
        coverage = self.epochs.get(epoch, EpochCoverage(epoch))
        if coverage.size and self.place.samples != coverage.size:
            raise LedgerGap(
                f"epoch {epoch} ends at sample {self.place.samples} of {coverage.size}, but no "
                "record says that the others were skipped"
            )

    def _advance(self, subject: str, coverage: EpochCoverage, start: int, stop: int) -> None:
        if stop < start or (coverage.size and stop > coverage.size):
            raise LedgerGap(
                f"{subject}: samples {start} to {stop} of {coverage.size} are impossible"
            )


@dataclass(frozen=True, slots=True)
class LedgerProblem:
    """Problem that invalidates the ledger as proof of the trained samples.

    Attributes:
        key: Key of the wrong object.
        record: Number of the record in its segment, from 1; 0: the segment as a whole.
        problem: Description.
    """

    key: str
    record: int
    problem: str


_IN_RESULT = "its work is part of the result, and its start is unknown"
_UNKNOWN_WORK = "it is unknown whether it trained, and from where"


def generation_problems(
    store: Store, numbers: Sequence[int], chain: Collection[int], run_id: str
) -> list[LedgerProblem]:
    """Return the problems of generation records, by number.

    Crash: reads only.

    Args:
        store: Repository.
        numbers: Numbers of all generations that have a record, readable or not.
        chain: Generations whose work is part of the result.
        run_id: Id of the run.

    Raises:
        StoreError: The store failed, so the audit has no result.
    """
    saved_generations = {checkpoint.generation for checkpoint in committed(store)} | set(
        list_marks(store)
    )
    segments = (parse_segment(key) for key in list_segments(store))
    saved_generations |= {segment.generation for segment in segments if segment}
    known_numbers, generations = {*numbers, *chain, *saved_generations}, dict[int, "Generation"]()
    flaws = []
    for number in sorted(known_numbers):
        try:
            generations[number] = read_generation(store, number)
        except KeyNotFound:
            flaws.append(
                LedgerProblem(
                    generation_key(number), 0, f"is missing: {_consequence(number, chain)}"
                )
            )
        except IntegrityError as error:
            problem = f"{error.message}: {_consequence(number, chain)}"
            flaws.append(LedgerProblem(generation_key(number), 0, problem))
    flaws += [
        flaw
        for generation in generations.values()
        for flaw in _foreign_generation_problems(generation, run_id)
    ]
    flaws += [
        flaw for pair in pairwise([0, *sorted(known_numbers)]) for flaw in _gap(*pair, generations)
    ]
    return sorted(flaws, key=lambda flaw: flaw.key)


def _gap(before: int, after: int, generations: Mapping[int, Generation]) -> Iterator[LedgerProblem]:
    """Find the numbers between two generations that no claim left out; there may be very many."""
    skipped_count = generations[after].skipped if after in generations else 0
    missing_count = after - skipped_count - before - 1
    if missing_count > 0:
        range_text = (
            (f", and {missing_count - 1} more up to generation {before + missing_count}")
            if missing_count > 1
            else ""
        )
        yield LedgerProblem(
            generation_key(before + 1), 0, f"is missing{range_text}: {_UNKNOWN_WORK}"
        )


def _consequence(number: int, chain: Collection[int]) -> str:
    return _IN_RESULT if number in chain else _UNKNOWN_WORK


def _foreign_generation_problems(generation: Generation, run_id: str) -> Iterator[LedgerProblem]:
    if generation.run_id != run_id:
        problem = f"belongs to run {generation.run_id}, but the ledger belongs to run {run_id}"
        yield LedgerProblem(generation_key(generation.number), 0, problem)


@dataclass(frozen=True, slots=True)
class Abandoned:
    """Steps that an attempt trained and saved, and that no later attempt continues from."""

    checkpoint: CheckpointId
    first: int
    last: int


@dataclass(slots=True)
class Audit:
    """Result of an audit: verified facts of a run's ledger, up to one checkpoint.

    Attributes:
        checkpoint: Checkpoint at which the chain begins.
        run_id: Id of the run.
        began: Beginning of the ledger; later than step 0 in a run that began without a ledger.
        place: End of the ledger.
        segments: Number of segments.
        records: Number of records.
        lives: Generations whose work is part of the result, in rising order.
        claimed: Number of generations with a record.
        ranks: Successive numbers of ranks that shared the data.
        epochs: Coverage of each epoch.
        left_out: Samples left out on purpose, by reason.
        idle: Steps that changed nothing.
        abandoned: Steps that were trained, saved and lost.
        flaws: Problems in the order of the chain; empty if the ledger is valid.
    """

    checkpoint: CheckpointId
    run_id: str = ""
    began: LedgerPosition = field(default_factory=LedgerPosition)
    place: LedgerPosition = field(default_factory=LedgerPosition)
    segments: int = 0
    records: int = 0
    lives: tuple[int, ...] = ()
    claimed: int = 0
    ranks: tuple[int, ...] = ()
    epochs: tuple[EpochCoverage, ...] = ()
    left_out: dict[str, int] = field(default_factory=dict)
    idle: int = 0
    abandoned: tuple[Abandoned, ...] = ()
    flaws: list[LedgerProblem] = field(default_factory=list)

    @property
    def is_proven(self) -> bool:
        """True if each sample of each epoch was trained once, or its absence is accounted for."""
        return not self.flaws


def audit(
    store: Store,
    line: Sequence[CheckpointId],
    signing: SigningPolicy | None = None,
    expected: Expected = expected_digest,
) -> Audit:
    """Audit the ledger of the first checkpoint of ``line``.

    Crash: reads only.

    Args:
        store: Repository.
        line: Checkpoints that resume may use, newest first; each of them must fit the chain.
        signing: Whether the manifests must be signed, and the key.
        expected: Function that computes the digests of orders.

    Raises:
        KeyNotFound: The checkpoint is gone.
        StoreError: The store failed, so the result is unknown.
    """
    result = Audit(line[0])
    anchors = _anchors(store, line, signing, result)
    anchor = anchors.get(line[0])
    if anchor is None:
        return result
    chain = _follow_back(store, *anchor, result)
    if not chain:
        return result
    result.lives = tuple(sorted({checkpoint.checkpoint.generation for checkpoint in chain}))
    numbers = list_numbers(store)
    result.claimed = len(numbers)
    # Check the records first. A generation without a record seems to begin at another checkpoint,
    # so the other results are wrong.
    result.flaws += generation_problems(store, numbers, result.lives, result.run_id)
    result.flaws += [flaw for checkpoint in chain for flaw in broken_links(checkpoint)]
    result.flaws += [
        flaw for pair in pairwise(chain) for flaw in _continuation_problems(store, *pair)
    ]
    segment_keys = {chain[0].opening, *(link for checkpoint in chain for link in checkpoint.links)}
    result.flaws += _unanchored(chain, segment_keys, anchors, line[0])
    if not result.flaws:
        _cover(chain, *anchor, result, expected)
    result.segments = len(chain)
    result.abandoned = tuple(
        _abandoned(store, {checkpoint.key for checkpoint in chain}, segment_keys, result)
    )
    return result


_Anchored = tuple["Manifest", LedgerHead]


def _anchors(
    store: Store, line: Sequence[CheckpointId], signing: SigningPolicy | None, result: Audit
) -> dict[CheckpointId, _Anchored]:
    """Return the ledger head in each manifest; record the manifests that fail verification."""
    anchors = {}
    for checkpoint in line:
        key = checkpoint.manifest_key
        try:
            manifest = read_manifest(store, checkpoint)
            if signing is not None:
                check_signature(store, manifest, signing)
            anchor = LedgerHead.from_data(manifest.data)
        except (IntegrityError, IncompatibleCheckpoint) as error:
            result.flaws.append(LedgerProblem(key, 0, error.message))
            continue
        except KeyNotFound:
            if checkpoint == line[0]:
                raise
            continue  # deleted meanwhile
        if anchor is not None:
            anchors[checkpoint] = (manifest, anchor)
        elif checkpoint == line[0]:
            result.flaws.append(
                LedgerProblem(key, 0, "was saved without a ledger: nothing can be verified")
            )
    return anchors


def _follow_back(
    store: Store, manifest: Manifest, anchor: LedgerHead, result: Audit
) -> list[Segment]:
    """Return the segments from the ledger's beginning to the anchor; none for a broken chain."""
    result.run_id, key = manifest.run_id, anchor.segment
    named_by, chain = manifest.checkpoint.manifest_key, list[Segment]()
    visited_keys: set[str] = set()
    while key:
        if key in visited_keys:
            result.flaws.append(
                LedgerProblem(named_by, 0, f"names `{key}`, which is already in the chain")
            )
            return []
        visited_keys.add(key)
        segment = _segment(store, key, named_by, result)
        if segment is None:
            return []
        chain.append(segment)
        named_by, key = key, segment.previous
    return chain[::-1]


def _segment(store: Store, key: str, named_by: str, result: Audit) -> Segment | None:
    """Return a segment of the chain; record the problem of its bytes."""
    try:
        return read_segment(store, key)
    except KeyNotFound:
        result.flaws.append(
            LedgerProblem(key, 0, f"is missing, and `{named_by}` continues from it")
        )
        return None
    except IntegrityError as error:
        sealed = LedgerProblem(key, 0, error.message)
    try:
        altered_segment = read_altered(store, key)
    except (IntegrityError, KeyNotFound):
        result.flaws.append(sealed)
        return None
    # Its links locate the change, which its seal does not.
    result.flaws += broken_links(altered_segment) or [sealed]
    return None


def broken_links(segment: Segment) -> list[LedgerProblem]:
    """Return the first place of a segment where its own chain is broken (pure)."""
    stored_checks, rows, links = segment.checks, segment.rows, segment.links
    for number, (row, link) in enumerate(zip(rows, links, strict=True), 1):
        if number > len(stored_checks) or stored_checks[number - 1] != link[:CHECK_LENGTH]:
            # The first link also covers the run, the attempt and the place of the segment.
            header = ", or the segment's own description," if number == 1 else ""
            problem = f"this record{header} is not the record that was chained here: {row}"
            return [LedgerProblem(segment.key, number, problem)]
    if len(stored_checks) != len(rows):
        return [LedgerProblem(segment.key, len(rows) + 1, "a record is missing here")]
    if segment.head != (links[-1] if links else segment.opening):
        return [LedgerProblem(segment.key, 0, "its head is not the link of its last record")]
    return []


def _continuation_problems(store: Store, before: Segment, after: Segment) -> list[LedgerProblem]:
    """Return the reason why a segment does not continue its previous segment."""
    if before.run_id != after.run_id:
        problem = f"belongs to run {before.run_id}, but `{after.key}` belongs to run {after.run_id}"
        return [LedgerProblem(before.key, 0, problem)]
    if before.head != after.opens:
        problem = (
            f"its last link is not the link that `{after.key}` continues from: it was replaced"
        )
        return [LedgerProblem(before.key, 0, problem)]
    older_checkpoint, newer_checkpoint = before.checkpoint, after.checkpoint
    if older_checkpoint >= newer_checkpoint:
        return [LedgerProblem(after.key, 0, f"continues from `{before.key}`, which is not older")]
    parent = _parent(store, newer_checkpoint.generation)
    if (
        older_checkpoint.generation < newer_checkpoint.generation
        and parent is not None
        and parent != older_checkpoint
    ):
        problem = (
            f"continues from {older_checkpoint}, and generation {newer_checkpoint.generation} "
            f"started from {parent}"
        )
        return [LedgerProblem(after.key, 0, problem)]
    return []


def _parent(store: Store, number: int) -> CheckpointId | None:
    """Return a generation's parent; None if its record is unreadable, which is reported itself."""
    try:
        return read_generation(store, number).parent
    except (IntegrityError, KeyNotFound):
        return None


def _unanchored(
    chain: Sequence[Segment],
    segment_keys: Collection[str],
    anchors: Mapping[CheckpointId, _Anchored],
    newest: CheckpointId,
) -> list[LedgerProblem]:
    """Return the manifests that name a head which the chain does not have, or not there."""
    flaws = []
    for checkpoint, (manifest, anchor) in anchors.items():
        is_in_chain = (
            anchor.head == chain[-1].head if checkpoint == newest else anchor.head in segment_keys
        )
        if not is_in_chain:
            claim = f"states that the ledger ends in {anchor.head[:CHECK_LENGTH]}"
            flaws.append(LedgerProblem(checkpoint.manifest_key, 0, f"{claim}, but it does not"))
        elif manifest.run_id != chain[0].run_id:
            problem = (
                f"belongs to run {manifest.run_id}, but its ledger belongs to run {chain[0].run_id}"
            )
            flaws.append(LedgerProblem(checkpoint.manifest_key, 0, problem))
    return flaws


def _cover(
    chain: Sequence[Segment],
    manifest: Manifest,
    anchor: LedgerHead,
    result: Audit,
    expected: Expected,
) -> None:
    """Follow all records; note the first place where they leave out or repeat samples."""
    result.began = chain[0].start
    coverage = Coverage(result.began, expected)
    for segment in chain:
        if (segment.start, segment.before) != (coverage.place, result.records):
            claim = f"{segment.start} after {segment.before} records"
            problem = f"starts at {claim}, but follows {coverage.place}, {result.records} records"
            result.flaws.append(LedgerProblem(segment.key, 0, problem))
            return
        for number, row in enumerate(segment.rows, 1):
            try:
                coverage.follow(row)
            except LedgerGap as gap:
                result.flaws.append(LedgerProblem(segment.key, number, str(gap)))
                return
            result.records += 1
        if segment.stop != coverage.place:
            problem = f"states its end as {segment.stop}, but ends at {coverage.place}"
            result.flaws.append(LedgerProblem(segment.key, 0, problem))
            return
    problem = _end_problem(coverage, manifest, anchor, result.records)
    if problem:
        result.flaws.append(LedgerProblem(manifest.checkpoint.manifest_key, 0, problem))
    result.place, result.idle = coverage.place, coverage.idle
    result.ranks, result.left_out = tuple(coverage.ranks), coverage.left_out
    result.epochs = tuple(coverage.epochs[epoch] for epoch in sorted(coverage.epochs))


def _end_problem(coverage: Coverage, manifest: Manifest, anchor: LedgerHead, records: int) -> str:
    """Return why the records do not end at the checkpoint; empty if they do."""
    place, step = coverage.place, manifest.checkpoint.step
    if (anchor.place, anchor.records) != (place, records):
        claim = f"{anchor.records} records up to {anchor.place}"
        return f"states {claim} for the ledger; it has {records} up to {place}"
    if place.step != step:
        return f"is at step {step}, but the ledger ends at step {place.step}"
    if "epoch" in manifest.data and "samples" in manifest.data:
        try:
            coverage.finish(manifest.data["epoch"], manifest.data["samples"])
        except LedgerGap as gap:
            return str(gap)
    return ""


def _abandoned(
    store: Store, chain: set[str], segment_keys: set[str], result: Audit
) -> list[Abandoned]:
    """Return the steps in segments outside the chain that the chain does not have."""
    abandoned_segments = []
    for key in list_segments(store):
        if key in chain:
            continue
        try:
            segment = read_segment(store, key)
        except KeyNotFound:
            continue
        except IntegrityError as error:
            result.flaws.append(LedgerProblem(key, 0, error.message))
            continue
        result.flaws += broken_links(segment)
        pairs = zip(segment.rows, segment.links, strict=True)
        steps = [json.loads(row) for row, link in pairs if link not in segment_keys]
        steps = [step for step in steps if step[0] == "step"]
        segment_keys.update(segment.links)
        if steps:
            abandoned_segments.append(Abandoned(segment.checkpoint, steps[0][1], steps[-1][2]))
    return abandoned_segments
