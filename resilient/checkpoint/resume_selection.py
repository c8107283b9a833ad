"""Resume selection: agreement of all ranks on the newest checkpoint that every rank can verify."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from resilient.checkpoint.catalog import Skipped, lineage
from resilient.checkpoint.refs import resolve
from resilient.checkpoint.restore.read import ReadRequest, VerifiedCheckpoint, read_wanted
from resilient.distributed.coordination import RankFailure, agree, capture_failure
from resilient.errors import IntegrityError, KeyNotFound, NoIntactCheckpoint
from resilient.format.keys import CheckpointId, parse_checkpoint
from resilient.redaction import shell_quote

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.checkpoint.context import CheckpointContext
    from resilient.distributed.coordination import ControlGroup
    from resilient.format.manifest import Manifest
    from resilient.storage.store import Store

_ROUNDS_MAX = 5
"""Maximum number of listings while another process changes the store."""


@dataclass(frozen=True, slots=True)
class ResumeChoice:
    """Checkpoint from which an attempt starts.

    Attributes:
        verified: This rank's share of the checkpoint; None for a start from scratch.
        skipped: Skipped checkpoints, with reasons.
    """

    verified: VerifiedCheckpoint | None
    skipped: tuple[Skipped, ...]

    @property
    def checkpoint(self) -> CheckpointId | None:
        """Id of the chosen checkpoint."""
        return self.verified.manifest.checkpoint if self.verified else None


@dataclass(frozen=True, slots=True)
class ResumeResult:
    """Result of a resume.

    Attributes:
        checkpoint: Checkpoint that all ranks verified and loaded.
        step: Its step.
        config: Configuration of the run that saved it.
        world_size: Number of ranks that saved it.
        absent: Requested parts that the checkpoint lacks.
        data: Its data position.
        parts: Stored names of all its parts.
    """

    checkpoint: CheckpointId
    step: int
    config: Mapping[str, Any]
    world_size: int
    absent: tuple[str, ...]
    data: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[str, ...] = ()

    @staticmethod
    def of(manifest: Manifest, absent: tuple[str, ...]) -> ResumeResult:
        """Return the result for a loaded checkpoint with this manifest."""
        checkpoint, size = manifest.checkpoint, int(manifest.world["size"])
        parts = tuple(entry.name for entry in manifest.parts)
        return ResumeResult(
            checkpoint, checkpoint.step, manifest.config, size, absent, manifest.data, parts
        )


def select_resume_checkpoint(
    store: Store, comms: ControlGroup, ref: str, request: ReadRequest, within_seconds: float
) -> ResumeChoice:
    """Return the first candidate that all ranks can read, with this rank's bytes.

    With ``request.places`` the bytes are already in place on all ranks. After an error, these
    places have bytes of one or several candidates.

    If the store fails, the checkpoint may still be intact. This function then raises instead of
    using an older checkpoint.

    Collective: every rank, same ``ref``.
    Crash: reads only; this process's memory changed.

    Args:
        store: Repository.
        comms: Control group of the ranks.
        ref: ``auto``, ``never``, or a reference for :func:`resilient.checkpoint.refs.resolve`.
        request: Read request of this rank.
        within_seconds: Deadline to read one candidate.

    Raises:
        NoIntactCheckpoint: Checkpoints were committed, but none of them is intact.
        IncompatibleCheckpoint: The format is newer, or ``request`` does not fit the stored state.
        StoreError: The store failed.
    """
    plan: dict[str, Any] = {}
    skipped: list[Skipped] = []
    problems: dict[str, str] = {}
    for round_number in range(_ROUNDS_MAX):
        previous_plan, topic_suffix = plan, f"/{round_number}" if round_number else ""
        plan = agree(
            comms, f"resume/plan{topic_suffix}", None, lambda _: _plan(store, ref), within_seconds
        )
        if plan == previous_plan:
            break
        skipped = [Skipped(name, reason) for name, reason in plan["skipped"]]
        for folder in plan["candidates"]:
            if folder not in problems:
                verified, problem = _try(store, folder, request)
                topic = f"resume/{folder}"
                problems[folder] = agree(comms, topic, problem, _first_problem, within_seconds)
                if not problems[folder]:
                    return ResumeChoice(verified, tuple(skipped))
            skipped.append(Skipped(folder, problems[folder]))
        if not plan["candidates"] and not plan["lost"]:
            return ResumeChoice(None, tuple(skipped))
        # Another process may have committed and deleted during this round. A checkpoint is lost
        # only if the next round does not find it either.
    raise _nothing_intact(store, skipped, plan, is_touched=request.places is not None)


def _plan(store: Store, ref: str) -> dict[str, Any]:
    if ref == "never":
        return {"candidates": [], "abandoned": [], "skipped": [], "lost": ""}
    if ref != "auto":
        folder = resolve(store, ref).folder
        return {"candidates": [folder], "abandoned": [], "skipped": [], "lost": ""}
    descent = lineage(store)
    return {
        "candidates": [candidate.folder for candidate in descent.candidates],
        "abandoned": [checkpoint.folder for checkpoint in (*descent.abandoned, *descent.separate)],
        "skipped": [[skip.name, skip.reason] for skip in descent.skipped],
        "lost": descent.lost,
    }


def _try(
    store: Store, folder: str, request: ReadRequest
) -> tuple[VerifiedCheckpoint | None, str | RankFailure]:
    """Return the bytes, or the damage of this checkpoint, or a failure that is no damage."""
    checkpoint = parse_checkpoint(folder)
    assert checkpoint is not None, "the coordinator names checkpoints"  # noqa: S101

    def work() -> tuple[VerifiedCheckpoint | None, str]:
        try:
            return read_wanted(store, checkpoint, request), ""
        except IntegrityError as error:
            return None, error.message
        except KeyNotFound:
            return None, "its manifest was deleted"

    outcome = capture_failure(work)
    return (None, outcome) if isinstance(outcome, RankFailure) else outcome


def _first_problem(problems: list[str]) -> str:
    has_peers = len(problems) > 1
    for rank, problem in enumerate(problems):
        if problem:
            return (
                f"rank {rank} found {problem}" if has_peers and len(set(problems)) > 1 else problem
            )
    return ""


def _nothing_intact(
    store: Store, skipped: list[Skipped], plan: dict[str, Any], *, is_touched: bool
) -> NoIntactCheckpoint:
    touched_text = (
        "; the live model and optimizer may hold parts of it: do not use them" * is_touched
    )
    reasons = "; ".join(f"{skip.name}: {skip.reason}" for skip in skipped) or plan["lost"]
    # Outside the line of descent, so never taken automatically; but the user may want it.
    abandoned_hints = "".join(
        f"; to resume {folder} anyway: --resume {folder}" for folder in plan["abandoned"]
    )
    return NoIntactCheckpoint(
        f"no intact checkpoint is left at {store.url}, and training does not start over silently: "
        f"{reasons}{touched_text}",
        hint=f"resilient ckpt verify --all {shell_quote(store.url)}{abandoned_hints}; "
        "to start over: --resume never",
    )


def resolve_collectively(context: CheckpointContext, topic: str, ref: str) -> CheckpointId:
    """Return the checkpoint that ``ref`` names, as the coordinator sees it.

    Collective: every rank, same topic, each topic once.
    Crash: reads only.

    Args:
        context: Context: repository and ranks.
        topic: Name of this agreement.
        ref: Reference for :func:`resilient.checkpoint.refs.resolve`.

    Raises:
        RepositoryNotFound: Nothing was ever committed there.
        NothingToResume: The reference names no checkpoint.
        UsageError: The reference names several checkpoints.
    """

    def rule(_: object) -> list[int]:
        checkpoint = resolve(context.store, ref)
        return [checkpoint.generation, checkpoint.step]

    return CheckpointId(*agree(context.comms, topic, None, rule, context.limits.within_seconds))
