"""The answer of ``ckpt verify``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from resilient.vault.health.verify import BY_ITSELF
from resilient_cli.render import Answer, Table, human_size
from resilient_cli.views.words import NONE, count, folder, part_of_near, share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.format.names import CheckpointId
    from resilient.vault.health.verify import Finding
    from resilient_cli.partly import Part
    from resilient_cli.survey import Level, Survey

_STATES = {"damaged": "DAMAGED", "warning": "warning"}


def verification(
    url: str,
    surveys: Sequence[Survey],
    resume: CheckpointId | None,
    level: Level,
    records: Sequence[Finding] = (),
    part: Part | None = None,
) -> Answer:
    """Return the answer of ``ckpt verify``.

    Args:
        url: the repository.
        surveys: what is known of the checkpoints.
        resume: where training would go on.
        level: how closely it was looked.
        records: what is wrong with what lies beside the checkpoints.
        part: how much was read, if not all.
    """
    intact = [survey for survey in surveys if survey.intact]
    damaged = [survey for survey in surveys if survey.damaged]
    document = {
        "repository": url,
        "level": level.value,
        "intact": len(intact),
        "damaged": len(damaged),
        "unreadable": len(surveys) - len(intact) - len(damaged),
        "resume": folder(resume),
        "checkpoints": [_checkpoint(survey) for survey in surveys],
        "records": [asdict(one) for one in records],
        "sample": part.to_json() if part else None,
    }
    rows = tuple(row for survey in surveys for row in _rows(survey))
    read = (_read(part),) if part else ()
    rows += tuple(_finding(NONE, _STATES[one.severity], one) for one in records)
    table = Table(("ID", "STATE", "FILE", "BYTES", "TENSOR", "PROBLEM"), rows)
    found = [one for survey in surveys for one in survey.findings] + list(records)
    fixes = dict.fromkeys(one.fix for one in found if one.fix)
    if not resume:
        fixes.pop(BY_ITSELF, None)
    counts = f"{len(intact)} intact, {len(damaged)} damaged (level {level.value})."
    ruling = f"Training can resume from {resume}." if resume else "Training cannot resume."
    blocks: tuple[Table | str, ...] = (
        table,
        f"{counts} {ruling}",
        *read,
        *[
            f"{part_of_near(one.checkpoint, one.absent_ranks)} To be verified is the durable "
            "repository."
            for one in damaged
            if one.absent_ranks
        ],
        *[f"fix: {fix}" for fix in fixes],
    )
    ids = tuple(survey.checkpoint.folder for survey in intact)
    return Answer("ckpt.verify", "verification", document, blocks, ids)


def _read(part: Part) -> str:
    """Say how much was read."""
    found = part.sample
    seen = f"{found.chunks} of {count(found.of, 'chunk')}, {human_size(found.size_bytes)}"
    end = ", then the time was over" if part.is_over else ""
    rest = "; the rest only by presence and size" if found.chunks < found.of else ""
    return f"Read {share(found.chunks, found.of)}: {seen}{end}{rest}."


def _checkpoint(survey: Survey) -> dict[str, Any]:
    return {
        "type": "checkpoint",
        "id": survey.checkpoint.folder,
        "state": survey.state.lower(),
        "intact": survey.intact,
        "files": len(survey.manifest.files) if survey.manifest else None,
        "size_bytes": survey.manifest.size_bytes if survey.manifest else None,
        "own_bytes": survey.manifest.own_bytes if survey.manifest else None,
        "absent_ranks": list(survey.absent_ranks),
        "findings": [asdict(one) for one in survey.findings],
    }


def _rows(survey: Survey) -> list[tuple[str, ...]]:
    """Return one row per finding, or one that says how much was looked at."""
    name = survey.checkpoint.folder
    if survey.findings or not survey.manifest:
        return [_finding(name, survey.state, one) for one in survey.findings]
    files = count(len(survey.manifest.files), "file")
    return [(name, survey.state, files, human_size(survey.size_bytes), NONE, NONE)]


def _finding(name: str, state: str, finding: Finding) -> tuple[str, ...]:
    span = f"{finding.start}-{finding.stop}" if finding.stop > finding.start else NONE
    return (name, state, finding.file, span, finding.tensor or NONE, finding.problem)
