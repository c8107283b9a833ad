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
        intact_checkpoints = {survey.checkpoint for survey in self.surveys if survey.intact}
        return next(
            (candidate for candidate in self.lineage.candidates if candidate in intact_checkpoints),
            None,
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
        return [name for name, tagged_id in self.tags.items() if tagged_id == checkpoint]

    @property
    def idle_tags(self) -> list[str]:
        """Tags that name nothing: damaged tags, and tags of deleted checkpoints."""
        stored_ids = {survey.checkpoint for survey in self.surveys}
        return [name for name, tagged_id in self.tags.items() if tagged_id not in stored_ids]

    def state(self, survey: Survey) -> str:
        """Return the state word of a checkpoint; damage takes precedence over ``abandoned``."""
        is_abandoned = survey.checkpoint not in self.lineage.candidates
        return "abandoned" if is_abandoned and survey.intact else survey.state


def build_list_result(
    contents: Listing, now: str, surveys: Sequence[Survey] | None = None
) -> CommandResult:
    """Return the result of ``ckpt ls``.

    Args:
        contents: Contents of the repository.
        now: Current time for ages, ISO 8601.
        surveys: Checkpoints to show; None for all.
    """
    surveys_shown = contents.surveys if surveys is None else surveys
    document = {
        "repository": contents.url,
        "resume": folder(contents.resume),
        "size_bytes": contents.size_bytes,
        "hidden": len(contents.surveys) - len(surveys_shown),
        "checkpoints": [_checkpoint(contents, survey) for survey in surveys_shown],
        "generations": [_generation(generation) for generation in contents.generations],
        "skipped": [asdict(entry) for entry in contents.lineage.skipped],
        "lost": contents.lineage.lost,
        "tags": {name: folder(tagged_id) for name, tagged_id in contents.tags.items()},
        "trash": [
            {
                "type": "trashed",
                "id": checkpoint_id.folder,
                "since": mark.since,
                "until": mark.until,
                "prune": mark.prune,
            }
            for checkpoint_id, mark in sorted(contents.trash.items(), reverse=True)
        ],
    }
    table = Table(
        ("STEP", "GEN", "AGE", "SIZE", "OWN", "RANKS", "STATE", "ID", "NOTE"),
        tuple(_row(contents, survey, now) for survey in surveys_shown),
    )
    skipped_lines = [f"skipped: {entry.name}: {entry.reason}" for entry in contents.lineage.skipped]
    idle = [
        f"tag {name} points to no checkpoint: resilient ckpt untag {name}"
        for name in contents.idle_tags
    ]
    hidden_count = len(contents.surveys) - len(surveys_shown)
    blocks: tuple[Table | str, ...] = (
        table,
        *([f"{len(surveys_shown)} shown, {hidden_count} not chosen."] if hidden_count else []),
        summary_line(contents),
        *skipped_lines,
        *idle,
        *_trash_lines(contents),
        _generations_table(contents, now),
    )
    ids = tuple(survey.checkpoint.folder for survey in surveys_shown)
    return CommandResult("ckpt.ls", "checkpoints", document, blocks, ids)


def _trash_lines(contents: Listing) -> Iterator[str]:
    for prune in prunes_in(contents.trash):
        checkpoints = count(
            sum(mark.prune == prune for mark in contents.trash.values()), "checkpoint"
        )
        yield (
            f"{checkpoints} in the trash; to restore: resilient ckpt prune {contents.url} --undo "
            f"{prune}"
        )


def _checkpoint(contents: Listing, survey: Survey) -> dict[str, Any]:
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
        "state": contents.state(survey).lower(),
        "abandoned": survey.checkpoint not in contents.lineage.candidates,
        "tags": contents.tags_on(survey.checkpoint),
        "findings": [asdict(finding) for finding in survey.findings],
    }


def _generation(generation: Generation) -> dict[str, Any]:
    return {
        "type": "generation",
        "number": generation.number,
        "parent": folder(generation.parent),
        "cause": generation.cause,
        "claimed_at": generation.claimed_at,
        "host": generation.host,
    }


def _row(contents: Listing, survey: Survey, now: str) -> tuple[str, ...]:
    manifest = survey.manifest
    manifest_cells = (NONE, NONE, NONE, NONE)
    if manifest:
        ranks = str(manifest.world.get("size", NONE))
        sizes = (human_size(manifest.size_bytes), human_size(manifest.own_bytes))
        manifest_cells = (age(manifest.created_at, now), *sizes, ranks)
    return (
        str(survey.checkpoint.step),
        str(survey.checkpoint.generation),
        *manifest_cells,
        contents.state(survey),
        survey.checkpoint.folder,
        note(contents, survey),
    )


def note(contents: Listing, survey: Survey) -> str:
    """Return the note on a checkpoint: its first finding, otherwise its tags."""
    if not survey.findings:
        return ", ".join(f"tag {name}" for name in contents.tags_on(survey.checkpoint))
    first_finding, *more_findings = survey.findings
    return f"{first_finding.file}: {first_finding.problem}" + (
        f" (and {len(more_findings)} more)" if more_findings else ""
    )


def summary_line(contents: Listing) -> str:
    """Return the total size, and the checkpoint that a resume would use."""
    total = f"{count(len(contents.surveys), 'checkpoint')}, {human_size(contents.size_bytes)}."
    if contents.resume:
        return f"{total} Training would resume from {contents.resume}."
    if contents.lineage.candidates or contents.lineage.lost:
        return f"{total} Training has no intact checkpoint to resume from."
    return f"{total} Training would start from scratch."


def _generations_table(contents: Listing, now: str) -> Table:
    steps: dict[int, list[str]] = defaultdict(list)
    for survey in reversed(contents.surveys):
        mark = " (abandoned)" if survey.checkpoint not in contents.lineage.candidates else ""
        steps[survey.checkpoint.generation].append(f"{survey.checkpoint.step}{mark}")
    return Table(
        ("GEN", "STARTED FROM", "CAUSE", "AGE", "SAVED STEPS"),
        tuple(
            (
                str(generation.number),
                folder(generation.parent) or "scratch",
                generation.cause,
                age(generation.claimed_at, now),
                ", ".join(steps[generation.number]) or NONE,
            )
            for generation in contents.generations
        ),
    )
