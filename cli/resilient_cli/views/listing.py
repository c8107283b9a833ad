"""Result of ``ckpt ls``."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from resilient.checkpoint.catalog import prunes_in
from resilient_cli.output import CommandResult, Table, human_size
from resilient_cli.views.text import NONE, age, count, folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from resilient.checkpoint.catalog import Lineage
    from resilient.checkpoint.generations import Generation
    from resilient.format.keys import CheckpointId, TrashedManifest
    from resilient_cli.survey import Survey


@dataclass(frozen=True, slots=True)
class Listing:
    """Contents of a repository for ``ckpt ls``.

    Attributes:
        url: URL of the repository.
        surveys: Checkpoints, newest first.
        lineage: Checkpoints that a resume may use.
        generations: Generations of the run, ascending.
        tags: Checkpoint that each tag names; None for a damaged tag.
        trash: Pruned checkpoints that can be restored.
    """

    url: str
    surveys: Sequence[Survey]
    lineage: Lineage
    generations: Sequence[Generation]
    tags: Mapping[str, CheckpointId | None]
    trash: Mapping[CheckpointId, TrashedManifest] = field(default_factory=dict)

    @property
    def resume(self) -> CheckpointId | None:
        """First checkpoint of the line of descent in which no damage was found."""
        intact = {survey.checkpoint for survey in self.surveys if survey.intact}
        return next(
            (candidate for candidate in self.lineage.candidates if candidate in intact), None
        )

    @property
    def size_bytes(self) -> int:
        """Bytes of all checkpoints together; a file that several checkpoints share counts once."""
        files = {
            survey.manifest.key(file.name): file.size_bytes
            for survey in self.surveys
            if survey.manifest
            for file in survey.manifest.files
        }
        return sum(files.values())

    def tags_on(self, checkpoint: CheckpointId) -> list[str]:
        """Return the tags that name a checkpoint."""
        return [name for name, named in self.tags.items() if named == checkpoint]

    @property
    def idle_tags(self) -> list[str]:
        """Tags that name nothing: damaged tags, and tags of deleted checkpoints."""
        there = {survey.checkpoint for survey in self.surveys}
        return [name for name, named in self.tags.items() if named not in there]

    def state(self, survey: Survey) -> str:
        """Return the state word of a checkpoint; damage takes precedence over ``abandoned``."""
        abandoned = survey.checkpoint not in self.lineage.candidates
        return "abandoned" if abandoned and survey.intact else survey.state


def listing(found: Listing, now: str, wanted: Sequence[Survey] | None = None) -> CommandResult:
    """Return the result of ``ckpt ls``.

    Args:
        found: Contents of the repository.
        now: Current time for ages, ISO 8601.
        wanted: Checkpoints to show; None for all.
    """
    shown = found.surveys if wanted is None else wanted
    document = {
        "repository": found.url,
        "resume": folder(found.resume),
        "size_bytes": found.size_bytes,
        "hidden": len(found.surveys) - len(shown),
        "checkpoints": [_checkpoint(found, survey) for survey in shown],
        "generations": [_generation(life) for life in found.generations],
        "skipped": [asdict(entry) for entry in found.lineage.skipped],
        "lost": found.lineage.lost,
        "tags": {name: folder(named) for name, named in found.tags.items()},
        "trash": [
            {
                "type": "trashed",
                "id": checkpoint_id.folder,
                "since": mark.since,
                "until": mark.until,
                "prune": mark.prune,
            }
            for checkpoint_id, mark in sorted(found.trash.items(), reverse=True)
        ],
    }
    table = Table(
        ("STEP", "GEN", "AGE", "SIZE", "OWN", "RANKS", "STATE", "ID", "NOTE"),
        tuple(_row(found, survey, now) for survey in shown),
    )
    skipped = [f"skipped: {entry.name}: {entry.reason}" for entry in found.lineage.skipped]
    idle = [
        f"tag {name} points to no checkpoint: resilient ckpt untag {name}"
        for name in found.idle_tags
    ]
    hidden = len(found.surveys) - len(shown)
    blocks: tuple[Table | str, ...] = (
        table,
        *([f"{len(shown)} shown, {hidden} not chosen."] if hidden else []),
        closing(found),
        *skipped,
        *idle,
        *_in_trash(found),
        _lives(found, now),
    )
    ids = tuple(survey.checkpoint.folder for survey in shown)
    return CommandResult("ckpt.ls", "checkpoints", document, blocks, ids)


def _in_trash(found: Listing) -> Iterator[str]:
    for prune in prunes_in(found.trash):
        many = count(sum(mark.prune == prune for mark in found.trash.values()), "checkpoint")
        yield f"{many} in the trash; to restore: resilient ckpt prune {found.url} --undo {prune}"


def _checkpoint(found: Listing, survey: Survey) -> dict[str, Any]:
    manifest = survey.manifest
    return {
        "type": "checkpoint",
        "id": survey.checkpoint.folder,
        "step": survey.checkpoint.step,
        "generation": survey.checkpoint.generation,
        "parent": folder(manifest.parent) if manifest else None,
        "created_at": manifest.created_at if manifest else None,
        "size_bytes": manifest.size_bytes if manifest else None,
        "own_bytes": manifest.own_bytes if manifest else None,
        "referred_bytes": manifest.size_bytes - manifest.own_bytes if manifest else None,
        "ranks": manifest.world.get("size") if manifest else None,
        "state": found.state(survey).lower(),
        "abandoned": survey.checkpoint not in found.lineage.candidates,
        "tags": found.tags_on(survey.checkpoint),
        "findings": [asdict(finding) for finding in survey.findings],
    }


def _generation(life: Generation) -> dict[str, Any]:
    return {
        "type": "generation",
        "number": life.number,
        "parent": folder(life.parent),
        "cause": life.cause,
        "claimed_at": life.claimed_at,
        "host": life.host,
    }


def _row(found: Listing, survey: Survey, now: str) -> tuple[str, ...]:
    manifest = survey.manifest
    about = (NONE, NONE, NONE, NONE)
    if manifest:
        ranks = str(manifest.world.get("size", NONE))
        sizes = (human_size(manifest.size_bytes), human_size(manifest.own_bytes))
        about = (age(manifest.created_at, now), *sizes, ranks)
    return (
        str(survey.checkpoint.step),
        str(survey.checkpoint.generation),
        *about,
        found.state(survey),
        survey.checkpoint.folder,
        note(found, survey),
    )


def note(found: Listing, survey: Survey) -> str:
    """Return the note on a checkpoint: its first finding, otherwise its tags."""
    if not survey.findings:
        return ", ".join(f"tag {name}" for name in found.tags_on(survey.checkpoint))
    first, *others = survey.findings
    return f"{first.file}: {first.problem}" + (f" (and {len(others)} more)" if others else "")


def closing(found: Listing) -> str:
    """Return the total size, and the checkpoint that a resume would use."""
    total = f"{count(len(found.surveys), 'checkpoint')}, {human_size(found.size_bytes)}."
    if found.resume:
        return f"{total} Training would resume from {found.resume}."
    if found.lineage.candidates or found.lineage.lost:
        return f"{total} Training has no intact checkpoint to resume from."
    return f"{total} Training would start from scratch."


def _lives(found: Listing, now: str) -> Table:
    steps: dict[int, list[str]] = defaultdict(list)
    for survey in reversed(found.surveys):
        mark = " (abandoned)" if survey.checkpoint not in found.lineage.candidates else ""
        steps[survey.checkpoint.generation].append(f"{survey.checkpoint.step}{mark}")
    return Table(
        ("GEN", "STARTED FROM", "CAUSE", "AGE", "SAVED STEPS"),
        tuple(
            (
                str(life.number),
                folder(life.parent) or "scratch",
                life.cause,
                age(life.claimed_at, now),
                ", ".join(steps[life.number]) or NONE,
            )
            for life in found.generations
        ),
    )
