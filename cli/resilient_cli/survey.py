"""Manifest + findings of checkpoints.

What is known of checkpoints: manifest and findings, as one value each.

``ckpt verify --sample --max-duration``: checkpoints, some of whose bytes were read.

Whether training can go on from a checkpoint of ours, and what to run next.
"""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from random import SystemRandom
from typing import TYPE_CHECKING, Any, Self

from resilient.checkpoint.catalog import lineage, read_manifest
from resilient.checkpoint.refs import list_tags, read_tag
from resilient.checkpoint.verify import MISSING, read_sample, repair_command, verify
from resilient.clock import SystemClock
from resilient.errors import IntegrityError, KeyNotFound, UsageError
from resilient.format.keys import MANIFEST
from resilient.format.signature import UNSIGNED
from resilient.layouts.model import Resumability
from resilient.redaction import shell_quote
from resilient_cli.durations import parse_duration, parse_percentage
from resilient_cli.output import Progress

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from resilient.checkpoint.verify import Finding, VerifySample
    from resilient.format.keys import CheckpointId
    from resilient.format.manifest import Manifest
    from resilient.format.signature import SigningPolicy
    from resilient.storage.store import Store


class VerifyLevel(StrEnum):
    """How closely to look."""

    QUICK = "quick"
    FULL = "full"
    DEEP = "deep"


@dataclass(frozen=True, slots=True)
class Survey:
    """One checkpoint; without a manifest when this release cannot read it."""

    checkpoint: CheckpointId
    manifest: Manifest | None
    findings: tuple[Finding, ...]

    @property
    def damaged(self) -> bool:
        """Whether something that was committed is not there any more."""
        return any(one.severity == "damaged" for one in self.findings)

    @property
    def intact(self) -> bool:
        """Whether resume can take it, as far as the level looked."""
        return self.manifest is not None and not self.damaged

    @property
    def state(self) -> str:
        """The word for it."""
        if self.damaged:
            return "DAMAGED"
        return "warning" if self.findings else "ok"

    @property
    def absent_ranks(self) -> tuple[int, ...]:
        """The ranks of which no file is here, if all files of the others are whole; else none.

        So looks what one host holds of a near tier, whose rest is on the other hosts.
        """
        if self.manifest is None or not self.damaged:
            return ()
        wrong = {one.file: one.problem for one in self.findings if one.severity == "damaged"}
        owners = {one.name: one.rank for one in self.manifest.files}
        if not wrong.keys() <= owners.keys() or set(wrong.values()) != {MISSING}:
            return ()
        absent = {owners[name] for name in wrong}
        whole = {rank for name, rank in owners.items() if name not in wrong}
        return () if absent & whole or not whole else tuple(sorted(absent))

    @property
    def size_bytes(self) -> int:
        """Bytes that the manifest speaks of, 0 without one."""
        return self.manifest.size_bytes if self.manifest else 0


def survey(
    store: Store,
    checkpoints: Iterable[CheckpointId],
    level: VerifyLevel,
    signing: SigningPolicy = UNSIGNED,
) -> list[Survey]:
    """Examine checkpoints; one that is rotated away meanwhile is left out, not called damaged."""
    found = []
    for checkpoint in checkpoints:
        with suppress(KeyNotFound):
            found.append(examine(store, checkpoint, level, signing))
    return found


def examine(
    store: Store, checkpoint: CheckpointId, level: VerifyLevel, signing: SigningPolicy = UNSIGNED
) -> Survey:
    """Return what is known of one checkpoint; damage is a value here, not an error.

    Raises:
        KeyNotFound: it has no manifest, or lost it to rotation while it was read.
    """
    findings = tuple(verify(store, checkpoint, level.value, signing))
    if any(one.file == MANIFEST for one in findings):
        return Survey(checkpoint, None, findings)
    # Rotation deletes the manifest first, so files that are gone count only while it is there.
    return Survey(checkpoint, read_manifest(store, checkpoint), findings)


def first_intact(
    store: Store,
    known: Mapping[CheckpointId, bool],
    level: VerifyLevel,
    signing: SigningPolicy = UNSIGNED,
) -> CheckpointId | None:
    """Return where training would resume; reads further candidates only until one is intact.

    Args:
        store: the repository.
        known: checkpoints that were examined, and whether each is intact.
        level: how closely to look at others.
        signing: whether only what is signed counts, and by which key.
    """
    states = dict(known)
    for candidate in lineage(store).candidates:
        if candidate not in states:
            states |= {
                one.checkpoint: one.intact for one in survey(store, [candidate], level, signing)
            }
        if states.get(candidate):
            return candidate
    return None


def tags_of(store: Store) -> dict[str, CheckpointId | None]:
    """Return what each tag names, None for a damaged one."""
    found: dict[str, CheckpointId | None] = {}
    for name in list_tags(store):
        with suppress(KeyNotFound):
            try:
                found[name] = read_tag(store, name).checkpoint
            except IntegrityError:
                found[name] = None
    return found


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """How much to read.

    Attributes:
        share: of all chunks.
        seconds: for how long at most; 0 for as long as it takes.
    """

    share: float = 1.0
    seconds: float = 0.0

    @property
    def is_some(self) -> bool:
        """Whether not all is to be read."""
        return self.share < 1 or self.seconds > 0

    @classmethod
    def of(cls, sample: str, max_duration: str, level: VerifyLevel) -> Self:
        """Return what the options say.

        Raises:
            UsageError: they are no share and no length, or the level does not read part of a file.
        """
        if (sample or max_duration) and level is not VerifyLevel.FULL:
            raise UsageError(
                f"--sample and --max-duration read some of the bytes; --level {level} does not",
                hint="resilient ckpt verify --all REPO --sample 5%",
            )
        return cls(
            parse_percentage(sample, "--sample") if sample else 1.0,
            parse_duration(max_duration, "--max-duration") if max_duration else 0.0,
        )


@dataclass(frozen=True, slots=True)
class SampleResult:
    """What was read.

    Attributes:
        wish: how much was to be.
        sample: what was.
        surveys: the checkpoints, with what was found in it.
        is_over: the time was, before everything was read that had been chosen.
    """

    wish: SampleRequest
    sample: VerifySample
    surveys: list[Survey]
    is_over: bool

    def to_json(self) -> dict[str, Any]:
        """Return how much was read."""
        return {
            "share": self.wish.share,
            "chunks": self.sample.chunks,
            "of": self.sample.of,
            "size_bytes": self.sample.size_bytes,
            "is_over": self.is_over,
        }


def read_some(store: Store, surveys: Sequence[Survey], wish: SampleRequest) -> SampleResult:
    """Read some of the bytes of checkpoints whose presence and sizes were looked at.

    Args:
        store: the repository.
        surveys: the checkpoints; those without a manifest have nothing to read.
        wish: how much.
    """
    clock = SystemClock()
    until = clock.monotonic_seconds() + wish.seconds
    over = []
    with Progress("reading", clock) as told:

        def goes_on(done: int, of: int) -> bool:
            told(done, of)
            if wish.seconds and clock.monotonic_seconds() >= until:
                over.append(done)
            return not over

        manifests = [one.manifest for one in surveys if one.manifest]
        sample = read_sample(store, manifests, wish.share, SystemRandom(), goes_on)
    return SampleResult(wish, sample, [_with(one, sample) for one in surveys], bool(over))


def _with(one: Survey, sample: VerifySample) -> Survey:
    """Add what was found in the bytes; a file that is short or missing was told of already."""
    known = {finding.file for finding in one.findings}
    new = [it for it in sample.findings.get(one.checkpoint, ()) if it.file not in known]
    return replace(one, findings=(*one.findings, *new))


_OF_A_TRAINER = "trainer_state"
# What a Trainer goes on without when it is not there, with one as new in its place.
_LOSSES = {
    "optimizer": "the optimizer's state",
    "scheduler": "the schedule",
    "rng_state": "the random state",
    "data": "the place in the data",
}
_NAMED_MAX = 4


def assess_native(store: Store, manifest: Manifest, found: Survey) -> Resumability:
    """Return the verdict of a checkpoint.

    Args:
        store: the repository.
        manifest: its table of contents.
        found: what is known of its files.
    """
    checkpoint = manifest.checkpoint
    wrong = [one for one in found.findings if one.severity == "damaged"]
    if wrong:
        why = tuple(f"{one.file}: {one.problem}" for one in wrong[:_NAMED_MAX])
        return Resumability("no", why, repair_command(store, checkpoint))
    lost = _losses(manifest)
    repo = shlex.quote(store.url)
    command = f"resilient train SCRIPT --repo {shell_quote(repo)} --resume {checkpoint}"
    return Resumability("partly" if lost else "yes", lost, command)


def _losses(manifest: Manifest) -> tuple[str, ...]:
    """Return what a Trainer's checkpoint lacks; another loop's holds what it was given."""
    names = {one.name for one in manifest.parts}
    if _OF_A_TRAINER not in names:
        return ()
    # Each rank has random numbers of its own, and a part that is named after it.
    there = names | {name.rpartition("_")[0] for name in names}
    return tuple(said for name, said in _LOSSES.items() if name not in there)
