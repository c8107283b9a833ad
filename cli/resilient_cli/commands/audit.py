"""``resilient audit``: sample audit over all attempts of a run.

The audit reads the sample ledger and checks that each sample was trained exactly once.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from resilient.checkpoint.catalog import lineage
from resilient.checkpoint.ledger_audit import ORDERS
from resilient.checkpoint.ledger_audit import audit as audit_ledger
from resilient.errors import NoIntactCheckpoint, NothingToResume
from resilient.redaction import shell_quote
from resilient_cli.output import CommandResult, Table, show
from resilient_cli.repositories import (
    Place,
    Repo,
    committed_checkpoints,
    open_repository,
    output_of,
    signing_policy,
)
from resilient_cli.views.text import NONE, count

if TYPE_CHECKING:
    from resilient.checkpoint.ledger_audit import Audit, EpochCoverage

# Words for the values of ``ORDERS``, which JSON output keeps.
_ORDERS = dict(zip(ORDERS, ("from the seed", "same in all attempts", "unknown"), strict=True))


def build_audit_result(url: str, result: Audit) -> CommandResult:
    """Build the answer of ``audit``."""
    document = {
        "repository": url,
        "proven": result.is_proven,
        "checkpoint": result.checkpoint.folder,
        "run_id": result.run_id,
        "began": asdict(result.began),
        "place": asdict(result.place),
        "segments": result.segments,
        "records": result.records,
        "lives": list(result.lives),
        "lives_begun": result.claimed,
        "ranks": list(result.ranks),
        "resizes": resizes_of(result),
        "epochs": [{**asdict(epoch), "complete": epoch.is_complete} for epoch in result.epochs],
        "left_out": result.left_out,
        "idle_steps": result.idle,
        "abandoned": [
            {"id": steps.checkpoint.folder, "first": steps.first, "last": steps.last}
            for steps in result.abandoned
        ],
        "flaws": [asdict(flaw) for flaw in result.flaws],
    }
    columns = ("EPOCH", "SAMPLES", "TRAINED", "SKIPPED", "REPEATED", "ORDER")
    epochs = Table(columns, tuple(_row(epoch) for epoch in result.epochs if result.is_proven))
    flaws = Table(
        ("WHERE", "RECORD", "PROBLEM"),
        tuple((flaw.key, str(flaw.record or NONE), flaw.problem) for flaw in result.flaws),
    )
    return CommandResult("audit", "audit", document, (epochs, flaws, *_summary_lines(result)), ())


def resizes_of(result: Audit) -> int:
    """Count the changes of the number of ranks that share the data."""
    return max(0, len(result.ranks) - 1)


def _row(epoch: EpochCoverage) -> tuple[str, ...]:
    values = (epoch.number, epoch.size or NONE, epoch.trained, epoch.left_out, epoch.repeated)
    return (*map(str, values), _ORDERS[epoch.order])


def _summary_lines(result: Audit) -> list[str]:
    if result.flaws:
        return [f"NOT VERIFIED up to {result.checkpoint}: {count(len(result.flaws), 'flaw')}."]
    began, place = result.began, result.place
    lines = []
    if began.step:
        lines.append(f"Steps 1 to {began.step} were trained before the ledger started.")
    lines += [
        f"{samples} samples were skipped on purpose: {reason}."
        for reason, samples in result.left_out.items()
    ]
    lines += _abandoned_step_lines(result)
    repeated_samples = sum(epoch.repeated for epoch in result.epochs)
    exception_text = ""
    if repeated_samples:
        verb = "was" if repeated_samples == 1 else "were"
        repetitions = f"{count(repeated_samples, 'sample')} {verb} repeated"
        lines.append(f"{repetitions} to fill the last round of all ranks.")
        exception_text = " except those"
    part = f"{len(result.lives)} of {result.claimed} generations are part of the result"
    changes = count(resizes_of(result), "change")
    lines.append(f"{part}; {changes} of the number of ranks: {', '.join(map(str, result.ranks))}.")
    steps = f"Verified up to {result.checkpoint}: in steps {began.step + 1} to {place.step}"
    lines.append(f"{steps} no sample was lost, and no sample was trained twice{exception_text}.")
    return lines


def _abandoned_step_lines(result: Audit) -> list[str]:
    """Return a line for each range of steps that was saved and later abandoned."""
    return [
        f"Steps {steps.first} to {steps.last} of generation {steps.checkpoint.generation} were "
        "trained and abandoned."
        for steps in result.abandoned
    ]


NOT_VERIFIED = 1


def audit(
    ctx: typer.Context,
    place: Place = None,
    repo: Repo = None,
    *,
    require_signature: Annotated[
        bool,
        typer.Option(
            "--require-signature",
            help="Accept only manifests signed with the key of RESILIENT_SIGNING_KEY or "
            "RESILIENT_SIGNING_KEY_FILE. RESILIENT_REQUIRE_SIGNATURE has the same effect.",
        ),
    ] = False,
) -> int:
    """Verify from the ledger that no sample was lost or trained twice, in all attempts of a run.

    The command follows the chain of records from the newest checkpoint back to the start, through
    rollbacks and changes of the number of ranks. The command also recomputes the order of each
    epoch. Exit code 0: verified. 1: not verified; the answer names the first wrong record.

    Example: resilient audit runs/gpt2
    """
    signing = signing_policy(is_required=require_signature)
    store = open_repository(place, repo, reads_unsigned=True)
    committed_checkpoints(store)
    run_lineage = lineage(store)
    if not run_lineage.candidates and run_lineage.lost:
        raise NoIntactCheckpoint(
            f"no checkpoint in `{store.url}` can be audited: {run_lineage.lost}",
            hint=f"resilient ckpt verify --all {shell_quote(store.url)}",
        )
    if not run_lineage.candidates:
        raise NothingToResume(f"no checkpoint was committed in `{store.url}` yet")
    result = audit_ledger(store, run_lineage.candidates, signing)
    show(build_audit_result(store.url, result), output_of(ctx))
    return 0 if result.is_proven else NOT_VERIFIED
