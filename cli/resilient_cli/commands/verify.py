"""``resilient ckpt verify``: verification of checkpoints."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from resilient.checkpoint.catalog import folders_of, lineage
from resilient.checkpoint.refs import resolve
from resilient.checkpoint.verify import BY_ITSELF, verify_records
from resilient.errors import (
    IncompatibleCheckpoint,
    NoIntactCheckpoint,
    NothingToResume,
    RepositoryNotFound,
    SignatureRefused,
    UsageError,
)
from resilient.redaction import shell_quote
from resilient_cli.foreign import find_in_run, inspect_if_known
from resilient_cli.output import CommandResult, Progress, Table, human_size, show
from resilient_cli.repositories import (
    Place,
    Ref,
    Repo,
    committed_checkpoints,
    open_repository,
    output_of,
    ref_and_place,
    signing_policy,
)
from resilient_cli.store_wrappers import ProgressStore
from resilient_cli.survey import (
    SampleRequest,
    Survey,
    VerifyLevel,
    first_intact,
    sample_surveys,
    survey,
)
from resilient_cli.views.foreign import build_verify_result
from resilient_cli.views.text import NONE, count, folder, near_part_note, share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.checkpoint.verify import Finding
    from resilient.format.keys import CheckpointId
    from resilient.format.signature import SigningPolicy
    from resilient.storage.store import Store
    from resilient_cli.survey import SampleResult

_STATES = {"damaged": "DAMAGED", "warning": "warning"}


def verification(
    url: str,
    surveys: Sequence[Survey],
    resume: CheckpointId | None,
    level: VerifyLevel,
    records: Sequence[Finding] = (),
    part: SampleResult | None = None,
) -> CommandResult:
    """Build the answer of ``ckpt verify``.

    Args:
        url: URL of the repository.
        surveys: Survey of each checkpoint.
        resume: Checkpoint to resume from; None if there is none.
        level: Level of the verification.
        records: Findings about files beside the checkpoints.
        part: Result of a sample; None if everything was read.
    """
    intact_surveys = [survey for survey in surveys if survey.intact]
    damaged_surveys = [survey for survey in surveys if survey.damaged]
    unsigned_surveys = [survey for survey in surveys if survey.unsigned]
    known_count = len(intact_surveys) + len(damaged_surveys) + len(unsigned_surveys)
    document = {
        "repository": url,
        "level": level.value,
        "intact": len(intact_surveys),
        "damaged": len(damaged_surveys),
        "unsigned": len(unsigned_surveys),
        "unreadable": len(surveys) - known_count,
        "resume": folder(resume),
        "checkpoints": [_checkpoint(survey) for survey in surveys],
        "records": [asdict(record) for record in records],
        "sample": part.to_json() if part else None,
    }
    rows = tuple(row for survey in surveys for row in _rows(survey))
    read = (_read(part),) if part else ()
    rows += tuple(_finding(NONE, _STATES[record.severity], record) for record in records)
    table = Table(("ID", "STATE", "FILE", "BYTES", "TENSOR", "PROBLEM"), rows)
    findings = [finding for survey in surveys for finding in survey.findings] + list(records)
    fixes = dict.fromkeys(finding.fix for finding in findings if finding.fix)
    if not resume:
        fixes.pop(BY_ITSELF, None)
    unsigned_text = f", {len(unsigned_surveys)} unsigned" if unsigned_surveys else ""
    counts = (
        f"{len(intact_surveys)} intact, {len(damaged_surveys)} damaged{unsigned_text} "
        f"(level {level.value})."
    )
    resume_text = f"Training can resume from {resume}." if resume else "Training cannot resume."
    blocks: tuple[Table | str, ...] = (
        table,
        f"{counts} {resume_text}",
        *read,
        *[
            f"{near_part_note(damaged_survey.checkpoint, damaged_survey.absent_ranks)} Verify the "
            "durable repository instead."
            for damaged_survey in damaged_surveys
            if damaged_survey.absent_ranks
        ],
        *[f"fix: {fix}" for fix in fixes],
    )
    ids = tuple(survey.checkpoint.folder for survey in intact_surveys)
    return CommandResult("ckpt.verify", "verification", document, blocks, ids)


def _read(part: SampleResult) -> str:
    """Describe how much was read."""
    sample = part.sample
    amount = f"{sample.chunks} of {count(sample.of, 'chunk')}, {human_size(sample.size_bytes)}"
    end = ", then the time limit was reached" if part.is_over else ""
    suffix = "; the others only by presence and size" if sample.chunks < sample.of else ""
    return f"Read {share(sample.chunks, sample.of)}: {amount}{end}{suffix}."


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
        "findings": [asdict(finding) for finding in survey.findings],
    }


def _rows(survey: Survey) -> list[tuple[str, ...]]:
    """Return one row per finding, or one row with the size of the checkpoint."""
    name = survey.checkpoint.folder
    if survey.findings or not survey.manifest:
        return [_finding(name, survey.state, finding) for finding in survey.findings]
    files = count(len(survey.manifest.files), "file")
    return [(name, survey.state, files, human_size(survey.size_bytes), NONE, NONE)]


def _finding(name: str, state: str, finding: Finding) -> tuple[str, ...]:
    span = f"{finding.start}-{finding.stop}" if finding.stop > finding.start else NONE
    return (name, state, finding.file, span, finding.tensor or NONE, finding.problem)


DAMAGE_FOUND = 1


def verify(  # noqa: PLR0913 - the options of a command
    ctx: typer.Context,
    ref: Ref = None,
    place: Place = None,
    repo: Repo = None,
    *,
    verifies_all: Annotated[bool, typer.Option("--all", help="Verify all checkpoints.")] = False,
    level: Annotated[
        VerifyLevel,
        typer.Option(
            help="quick: presence and sizes; full: every byte; deep: also regions, headers, "
            "documents, and the consistency of records, tags and checkpoints."
        ),
    ] = VerifyLevel.FULL,
    require_signature: Annotated[
        bool,
        typer.Option(
            "--require-signature",
            help="Refuse checkpoints without a signature of the key of RESILIENT_SIGNING_KEY or "
            "RESILIENT_SIGNING_KEY_FILE. RESILIENT_REQUIRE_SIGNATURE has the same effect.",
        ),
    ] = False,
    sample: Annotated[
        str,
        typer.Option(
            metavar="5%", help="Read only this share of the bytes, chosen at random each time."
        ),
    ] = "",
    max_duration: Annotated[
        str, typer.Option(metavar="10m", help="Read in random order until this time limit.")
    ] = "",
) -> int:
    """Verify one, the latest, or all checkpoints against their manifests.

    A path or URL without a repository can also be a checkpoint of another tool (docs/layouts.md).
    Its checksums and numbers are checked, and the answer says whether training can resume from it.

    --sample and --max-duration read a random part of the bytes, after a check of the presence and
    size of all files. 5 % per night covers nearly everything within a year.

    Exit code 0: intact. 1: damaged, and an intact checkpoint remains to resume from; or a resume of
    another tool's checkpoint fails or loses saved state. 3: no intact checkpoint remains. 65:
    intact, but written by a newer release. 77: intact, but without the required signature.

    Example: resilient ckpt verify --all runs/gpt2 --level quick
    """
    if verifies_all and ref and place:
        raise UsageError("`--all` takes no REF", hint="resilient ckpt verify --all REPO")
    ref, place = (None, ref or place) if verifies_all else ref_and_place(ref, place, repo)
    signing = signing_policy(is_required=require_signature)
    request = SampleRequest.of(sample, max_duration, level)
    may_be_foreign = (
        ref is None and not verifies_all and not signing.is_required and not request.is_partial
    )
    if may_be_foreign and (
        foreign_checkpoint := inspect_if_known(
            place or repo, is_read=level is not VerifyLevel.QUICK
        )
    ):
        show(build_verify_result(foreign_checkpoint), output_of(ctx))
        return DAMAGE_FOUND if foreign_checkpoint.is_damaged else 0
    store = open_repository(place, repo, reads_unsigned=True)
    try:
        committed_ids = committed_checkpoints(store)
    except RepositoryNotFound as error:
        path = find_in_run(ref, place or repo)
        if path is None:
            _refuse_foreign_unsigned(place or repo, signing)
            raise error from None
        return verify(
            ctx,
            None,
            path,
            level=level,
            require_signature=signing.is_required,
            sample=sample,
            max_duration=max_duration,
        )
    checkpoints = (
        committed_ids if verifies_all or not committed_ids else [resolve(store, ref or "latest")]
    )
    folders = folders_of(store)
    of_bytes = sum(sum(folders.get(checkpoint_id, {}).values()) for checkpoint_id in checkpoints)
    with Progress("reading") as progress:
        reader = ProgressStore(store, progress, of_bytes)
        surveys = survey(
            reader, checkpoints, VerifyLevel.QUICK if request.is_partial else level, signing
        )
    part = sample_surveys(store, surveys, request) if request.is_partial else None
    surveys = part.surveys if part else surveys
    states = {result.checkpoint: result.intact for result in surveys}
    resume = first_intact(store, states, VerifyLevel.QUICK if part else level, signing)
    records = verify_records(store, level.value)
    show(verification(store.url, surveys, resume, level, records, part), output_of(ctx))
    is_damaged = any(record.severity == "damaged" for record in records)
    return _verdict(store, surveys, resume) or (DAMAGE_FOUND if is_damaged else 0)


def _refuse_foreign_unsigned(url: str | None, signing: SigningPolicy) -> None:
    """Refuse a checkpoint of another tool, which has no signature, if one is required.

    Raises:
        SignatureRefused: A signature is required, and such a checkpoint is there.
    """
    if signing.is_required and (checkpoint := inspect_if_known(url, is_read=False)):
        raise SignatureRefused(
            f"`{checkpoint.url}` is a checkpoint of another tool, which has no signature, and a "
            "signature is required; nothing else was verified",
            key=checkpoint.url,
            hint=f"resilient ckpt inspect {shell_quote(checkpoint.url)}",
        )


def _verdict(store: Store, surveys: Sequence[Survey], resume: CheckpointId | None) -> int:
    """Return the exit code if something intact remains; raise an error otherwise."""
    # Lost parity does not prevent a resume, but the user must learn of the damage.
    if not any(survey.findings for survey in surveys) and (surveys or resume):
        return 0
    if resume:
        return DAMAGE_FOUND
    if not surveys and not lineage(store).lost:
        raise NothingToResume(f"no checkpoint was committed in `{store.url}` yet")
    unsigned_surveys = [survey for survey in surveys if survey.unsigned]
    if unsigned_surveys:
        checkpoint = unsigned_surveys[0].checkpoint
        raise SignatureRefused(
            f"{checkpoint} of `{store.url}` is refused: a signature of this key is required, and "
            "no checkpoint has one. Its data is intact",
            key=checkpoint.folder,
            hint=f"resilient ckpt sign {checkpoint} {shell_quote(store.url)}",
        )
    if surveys and not any(survey.damaged for survey in surveys):
        newer = next(survey for survey in surveys if not survey.intact).findings[0]
        raise IncompatibleCheckpoint(newer.problem, hint=newer.fix)
    raise NoIntactCheckpoint(
        f"no checkpoint in `{store.url}` is left that training could resume from",
        hint=f"resilient ckpt repair latest {shell_quote(store.url)} --from COPY",
    )
