"""Manifests and verification results of checkpoints, shared by several commands.

The module also does partial verification (``ckpt verify --sample --max-duration``), and checks the
resumability of this project's checkpoints.
"""

from __future__ import annotations

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
from resilient.format.keys import MANIFEST, signature_name
from resilient.format.signature import UNSIGNED
from resilient.redaction import shell_quote
from resilient_cli.durations import parse_duration, parse_percentage
from resilient_cli.output import Progress

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from resilient.checkpoint.verify import Finding, VerifySample
    from resilient.format.keys import CheckpointId
    from resilient.format.manifest import Manifest
    from resilient.format.signature import SigningPolicy
    from resilient.layouts.model import Resumability
    from resilient.storage.store import Store


class VerifyLevel(StrEnum):
    """Depth of a verification."""

    QUICK = "quick"
    FULL = "full"
    DEEP = "deep"


@dataclass(frozen=True, slots=True)
class Survey:
    """Manifest and findings of one checkpoint; no manifest if this release cannot read it."""

    checkpoint: CheckpointId
    manifest: Manifest | None
    findings: tuple[Finding, ...]

    @property
    def _refusals(self) -> tuple[Finding, ...]:
        """Findings at which a resume refuses the checkpoint."""
        return tuple(finding for finding in self.findings if finding.severity == "damaged")

    @property
    def unsigned(self) -> bool:
        """True if only the required signature is missing: the data is intact."""
        if self.manifest is None or not self._refusals:
            return False
        file = signature_name(self.manifest.root)
        return all(finding.file == file for finding in self._refusals)

    @property
    def damaged(self) -> bool:
        """True if committed data is missing or changed."""
        return bool(self._refusals) and not self.unsigned

    @property
    def intact(self) -> bool:
        """True if a resume can use the checkpoint, as far as the level verified it."""
        return self.manifest is not None and not self._refusals

    @property
    def state(self) -> str:
        """State word of the checkpoint."""
        if self.unsigned:
            return "UNSIGNED"
        if self.damaged:
            return "DAMAGED"
        return "warning" if self.findings else "ok"

    @property
    def absent_ranks(self) -> tuple[int, ...]:
        """Ranks without any file here, if all files of the other ranks are whole; else empty.

        One host's part of a near tier has this form; the other hosts have the rest.
        """
        if self.manifest is None or not self.damaged:
            return ()
        problem_by_file = {
            finding.file: finding.problem
            for finding in self.findings
            if finding.severity == "damaged"
        }
        owners = {file.name: file.rank for file in self.manifest.files}
        if not problem_by_file.keys() <= owners.keys() or set(problem_by_file.values()) != {
            MISSING
        }:
            return ()
        ranks_without_files = {owners[name] for name in problem_by_file}
        intact_ranks = {rank for name, rank in owners.items() if name not in problem_by_file}
        return (
            ()
            if ranks_without_files & intact_ranks or not intact_ranks
            else tuple(sorted(ranks_without_files))
        )

    @property
    def size_bytes(self) -> int:
        """Bytes of all files in the manifest; 0 without a manifest."""
        return self.manifest.size_bytes if self.manifest else 0


def survey(
    store: Store,
    checkpoints: Iterable[CheckpointId],
    level: VerifyLevel,
    signing: SigningPolicy = UNSIGNED,
) -> list[Survey]:
    """Examine checkpoints; leave out those that garbage collection deletes meanwhile."""
    surveys = []
    for checkpoint in checkpoints:
        with suppress(KeyNotFound):
            surveys.append(examine(store, checkpoint, level, signing))
    return surveys


def examine(
    store: Store, checkpoint: CheckpointId, level: VerifyLevel, signing: SigningPolicy = UNSIGNED
) -> Survey:
    """Verify one checkpoint and return its findings; damage is a value here, not an error.

    Raises:
        KeyNotFound: The checkpoint has no manifest, or garbage collection deleted it meanwhile.
    """
    findings = tuple(verify(store, checkpoint, level.value, signing))
    if any(finding.file == MANIFEST for finding in findings):
        return Survey(checkpoint, None, findings)
    # Garbage collection deletes the manifest first. Files count as missing only if it exists.
    return Survey(checkpoint, read_manifest(store, checkpoint), findings)


def first_intact(
    store: Store,
    is_intact: Mapping[CheckpointId, bool],
    level: VerifyLevel,
    signing: SigningPolicy = UNSIGNED,
) -> CheckpointId | None:
    """Return the checkpoint from which training would resume.

    Other candidates are read only until one is intact.

    Args:
        store: Repository.
        is_intact: Examined checkpoints, and whether each is intact.
        level: Depth of the verification of other candidates.
        signing: Whether a signature is required, and its key.
    """
    states = dict(is_intact)
    for candidate in lineage(store).candidates:
        if candidate not in states:
            states |= {
                candidate_survey.checkpoint: candidate_survey.intact
                for candidate_survey in survey(store, [candidate], level, signing)
            }
        if states.get(candidate):
            return candidate
    return None


def tags_of(store: Store) -> dict[str, CheckpointId | None]:
    """Return the checkpoint that each tag names; None for a damaged tag."""
    checkpoint_by_tag: dict[str, CheckpointId | None] = {}
    for name in list_tags(store):
        with suppress(KeyNotFound):
            try:
                checkpoint_by_tag[name] = read_tag(store, name).checkpoint
            except IntegrityError:
                checkpoint_by_tag[name] = None
    return checkpoint_by_tag


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Requested extent of a partial verification.

    Attributes:
        share: Share of all chunks.
        seconds: Time limit; 0 for none.
    """

    share: float = 1.0
    seconds: float = 0.0

    @property
    def is_partial(self) -> bool:
        """True if the request omits a part of the bytes."""
        return self.share < 1 or self.seconds > 0

    @classmethod
    def of(cls, sample: str, max_duration: str, level: VerifyLevel) -> Self:
        """Parse the options of ``ckpt verify``.

        Raises:
            UsageError: A text is no share or no duration, or the level cannot read part of a file.
        """
        if (sample or max_duration) and level is not VerifyLevel.FULL:
            raise UsageError(
                f"--sample and --max-duration read a part of the bytes; --level {level} reads "
                "none or all",
                hint="resilient ckpt verify --all REPO --sample 5%",
            )
        return cls(
            parse_percentage(sample, "--sample") if sample else 1.0,
            parse_duration(max_duration, "--max-duration") if max_duration else 0.0,
        )


@dataclass(frozen=True, slots=True)
class SampleResult:
    """Result of a partial verification.

    Attributes:
        request: Requested extent.
        sample: Chunks that were read, with their findings.
        surveys: Checkpoints, with the findings of the sample.
        is_over: Whether the time limit ended the reading before all chosen chunks were read.
    """

    request: SampleRequest
    sample: VerifySample
    surveys: list[Survey]
    is_over: bool

    def to_json(self) -> dict[str, Any]:
        """Return the extent of the sample as a JSON value."""
        return {
            "share": self.request.share,
            "chunks": self.sample.chunks,
            "of": self.sample.of,
            "size_bytes": self.sample.size_bytes,
            "is_over": self.is_over,
        }


def sample_surveys(store: Store, surveys: Sequence[Survey], request: SampleRequest) -> SampleResult:
    """Read part of the bytes of checkpoints whose files were checked for presence and size.

    Args:
        store: Repository.
        surveys: Checkpoints; those without a manifest are not read.
        request: Requested extent.
    """
    clock = SystemClock()
    deadline_seconds = clock.monotonic_seconds() + request.seconds
    is_expired = False
    with Progress("reading", clock) as progress:

        def should_continue(read_bytes: int, of: int) -> bool:
            nonlocal is_expired
            progress(read_bytes, of)
            if request.seconds and clock.monotonic_seconds() >= deadline_seconds:
                is_expired = True
            return not is_expired

        manifests = [survey.manifest for survey in surveys if survey.manifest]
        sample = read_sample(store, manifests, request.share, SystemRandom(), should_continue)
    return SampleResult(
        request, sample, [_add_findings(survey, sample) for survey in surveys], is_expired
    )


def _add_findings(survey: Survey, sample: VerifySample) -> Survey:
    """Add the findings of the sample, except for files that already have a finding."""
    damaged_files = {finding.file for finding in survey.findings}
    new_findings = [
        addition
        for addition in sample.findings.get(survey.checkpoint, ())
        if addition.file not in damaged_files
    ]
    return replace(survey, findings=(*survey.findings, *new_findings))


_TRAINER_PART = "trainer_state"
# Parts that a Trainer creates anew if a checkpoint lacks them, each with the lost state.
_LOSSES = {
    "optimizer": "the optimizer's state",
    "scheduler": "the schedule",
    "rng_state": "the random state",
    "data": "the place in the data",
}
_NAMED_MAX = 4


def assess_native(store: Store, manifest: Manifest, candidate: Survey) -> Resumability:
    """Return whether training can resume from one of our checkpoints, and the next command.

    Args:
        store: Repository.
        manifest: Manifest of the checkpoint.
        candidate: Findings about its files.
    """
    from resilient.layouts.model import Resumability

    checkpoint = manifest.checkpoint
    damage_findings = [finding for finding in candidate.findings if finding.severity == "damaged"]
    if damage_findings:
        reasons = tuple(
            f"{finding.file}: {finding.problem}" for finding in damage_findings[:_NAMED_MAX]
        )
        return Resumability("no", reasons, repair_command(store, checkpoint))
    losses = _losses(manifest)
    command = f"resilient train SCRIPT --repo {shell_quote(store.url)} --resume {checkpoint}"
    return Resumability("partly" if losses else "yes", losses, command)


def _losses(manifest: Manifest) -> tuple[str, ...]:
    """Return the states that a Trainer's checkpoint lacks; empty for other training loops.

    The checkpoint of another loop holds exactly the states that the loop passed in.
    """
    names = {part.name for part in manifest.parts}
    if _TRAINER_PART not in names:
        return ()
    # Each rank has its own random state, in a part whose name ends in the rank.
    file_names = names | {name.rpartition("_")[0] for name in names}
    return tuple(description for name, description in _LOSSES.items() if name not in file_names)
