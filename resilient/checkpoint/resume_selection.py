"""Ranks agree on the newest checkpoint that all can verify.

All ranks settle on the newest checkpoint that every one of them can read, proved.

Which checkpoint a reference names, for all ranks alike.
"""

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

_LOOKS_MAX = 5
"""How often the store is asked what there is, while a rival changes it."""


@dataclass(frozen=True, slots=True)
class ResumeChoice:
    """What this life starts from.

    Attributes:
        proved: this rank's share of the checkpoint; None to start from scratch.
        skipped: what was passed over, and why.
    """

    proved: VerifiedCheckpoint | None
    skipped: tuple[Skipped, ...]

    @property
    def checkpoint(self) -> CheckpointId | None:
        """The checkpoint that was chosen."""
        return self.proved.manifest.checkpoint if self.proved else None


@dataclass(frozen=True, slots=True)
class ResumeResult:
    """What a life goes on from.

    Attributes:
        checkpoint: the one that all ranks proved and loaded.
        step: its step.
        config: the configuration of the run that saved it.
        world_size: how many ranks saved it.
        absent: parts that were asked for and that it does not hold.
        data: what it says of its place in the data.
        parts: everything that it holds, as it is called there.
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
        """Return what a life goes on from that loaded the checkpoint of ``manifest``."""
        checkpoint, size = manifest.checkpoint, int(manifest.world["size"])
        held = tuple(entry.name for entry in manifest.parts)
        return ResumeResult(
            checkpoint, checkpoint.step, manifest.config, size, absent, manifest.data, held
        )


def select_resume_checkpoint(
    store: Store, comms: ControlGroup, ref: str, wanted: ReadRequest, within_seconds: float
) -> ResumeChoice:
    """Return the first candidate that all ranks can read, with this rank's bytes of it.

    With ``wanted.places`` they are where they are wanted already, on all ranks; and if this
    raises, those places hold what was read last of one candidate or of several.

    A store that fails says nothing about a checkpoint: then this raises, and no older
    checkpoint is taken in its place.

    Collective: every rank, same ``ref``.
    Crash: reads only; this process's memory changed.

    Args:
        store: the repository.
        comms: the ranks.
        ref: ``auto``, ``never``, or what :func:`resilient.checkpoint.refs.resolve` takes.
        wanted: what this rank needs, and proves.
        within_seconds: how long one candidate may take to read.

    Raises:
        NoIntactCheckpoint: something was committed and nothing of it can be read whole.
        IncompatibleCheckpoint: a newer format, or ``wanted`` does not fit what is stored.
        StoreError: the store failed.
    """
    plan: dict[str, Any] = {}
    skipped: list[Skipped] = []
    problems: dict[str, str] = {}
    for look in range(_LOOKS_MAX):
        before, again = plan, f"/{look}" if look else ""
        plan = agree(
            comms, f"resume/plan{again}", None, lambda _: _plan(store, ref), within_seconds
        )
        if plan == before:
            break
        skipped = [Skipped(name, reason) for name, reason in plan["skipped"]]
        for folder in plan["candidates"]:
            if folder not in problems:
                proved, problem = _try(store, folder, wanted)
                topic = f"resume/{folder}"
                problems[folder] = agree(comms, topic, problem, _first_problem, within_seconds)
                if not problems[folder]:
                    return ResumeChoice(proved, tuple(skipped))
            skipped.append(Skipped(folder, problems[folder]))
        if not plan["candidates"] and not plan["lost"]:
            return ResumeChoice(None, tuple(skipped))
        # A rival may have committed and rotated while this was looking: only what a second look
        # does not find either is gone.
    raise _nothing_left(store, skipped, plan, is_touched=wanted.places is not None)


def _plan(store: Store, ref: str) -> dict[str, Any]:
    if ref == "never":
        return {"candidates": [], "abandoned": [], "skipped": [], "lost": ""}
    if ref != "auto":
        chosen = resolve(store, ref).folder
        return {"candidates": [chosen], "abandoned": [], "skipped": [], "lost": ""}
    known = lineage(store)
    return {
        "candidates": [one.folder for one in known.candidates],
        "abandoned": [one.folder for one in (*known.abandoned, *known.separate)],
        "skipped": [[one.name, one.reason] for one in known.skipped],
        "lost": known.lost,
    }


def _try(
    store: Store, folder: str, wanted: ReadRequest
) -> tuple[VerifiedCheckpoint | None, str | RankFailure]:
    """Return the bytes, or why this checkpoint is damaged, or the failure that is not damage."""
    checkpoint = parse_checkpoint(folder)
    assert checkpoint is not None, "the coordinator names checkpoints"  # noqa: S101

    def work() -> tuple[VerifiedCheckpoint | None, str]:
        try:
            return read_wanted(store, checkpoint, wanted), ""
        except IntegrityError as error:
            return None, error.message
        except KeyNotFound:
            return None, "its manifest is gone"

    outcome = capture_failure(work)
    return (None, outcome) if isinstance(outcome, RankFailure) else outcome


def _first_problem(problems: list[str]) -> str:
    several = len(problems) > 1
    for rank, problem in enumerate(problems):
        if problem:
            return f"rank {rank} found {problem}" if several and len(set(problems)) > 1 else problem
    return ""


def _nothing_left(
    store: Store, skipped: list[Skipped], plan: dict[str, Any], *, is_touched: bool
) -> NoIntactCheckpoint:
    touched = "; the live model and optimizer may hold some of it: use neither" * is_touched
    reasons = "; ".join(f"{one.name}: {one.reason}" for one in skipped) or plan["lost"]
    # Outside the line of descent, so never taken by itself; but a person may want it.
    others = "".join(f"; to use {one} all the same: --resume {one}" for one in plan["abandoned"])
    return NoIntactCheckpoint(
        f"no intact checkpoint is left at {store.url}, and training will not silently start "
        f"over: {reasons}{touched}",
        hint=f"resilient ckpt verify --all {shell_quote(store.url)}{others}; "
        "to start over: --resume never",
    )


def resolve_collectively(desk: CheckpointContext, topic: str, ref: str) -> CheckpointId:
    """Return the checkpoint that ``ref`` names, as the coordinator sees it.

    Collective: every rank, same topic, each topic once.
    Crash: reads only.

    Args:
        desk: the repository and the ranks.
        topic: names this agreement.
        ref: as :func:`resilient.checkpoint.refs.resolve` takes it.

    Raises:
        RepositoryNotFound: nothing was ever committed there.
        NothingToResume: it names no checkpoint.
        UsageError: it names several.
    """

    def rule(_: object) -> list[int]:
        found = resolve(desk.store, ref)
        return [found.generation, found.step]

    return CheckpointId(*agree(desk.comms, topic, None, rule, desk.limits.within_seconds))
