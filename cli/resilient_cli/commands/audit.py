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
    committed_of,
    open_repository,
    output_of,
    signing_of,
)
from resilient_cli.views.text import NONE, count

if TYPE_CHECKING:
    from resilient.checkpoint.ledger_audit import Audit, EpochCoverage

# Words for the values of ``ORDERS``, which JSON output keeps.
_ORDERS = dict(zip(ORDERS, ("from the seed", "same in all attempts", "unknown"), strict=True))


def auditing(url: str, found: Audit) -> CommandResult:
    """Build the answer of ``audit``."""
    document = {
        "repository": url,
        "proven": found.is_proven,
        "checkpoint": found.checkpoint.folder,
        "run_id": found.run_id,
        "began": asdict(found.began),
        "place": asdict(found.place),
        "segments": found.segments,
        "records": found.records,
        "lives": list(found.lives),
        "lives_begun": found.claimed,
        "ranks": list(found.ranks),
        "resizes": resizes_of(found),
        "epochs": [{**asdict(epoch), "complete": epoch.is_complete} for epoch in found.epochs],
        "left_out": found.left_out,
        "idle_steps": found.idle,
        "abandoned": [
            {"id": stretch.checkpoint.folder, "first": stretch.first, "last": stretch.last}
            for stretch in found.abandoned
        ],
        "flaws": [asdict(flaw) for flaw in found.flaws],
    }
    columns = ("EPOCH", "SAMPLES", "TRAINED", "SKIPPED", "REPEATED", "ORDER")
    epochs = Table(columns, tuple(_row(epoch) for epoch in found.epochs if found.is_proven))
    flaws = Table(
        ("WHERE", "RECORD", "PROBLEM"),
        tuple((flaw.key, str(flaw.record or NONE), flaw.problem) for flaw in found.flaws),
    )
    return CommandResult("audit", "audit", document, (epochs, flaws, *_closing(found)), ())


def resizes_of(found: Audit) -> int:
    """Count the changes of the number of ranks that share the data."""
    return max(0, len(found.ranks) - 1)


def _row(epoch: EpochCoverage) -> tuple[str, ...]:
    shown = (epoch.number, epoch.size or NONE, epoch.trained, epoch.left_out, epoch.repeated)
    return (*map(str, shown), _ORDERS[epoch.order])


def _closing(found: Audit) -> list[str]:
    if found.flaws:
        return [f"NOT VERIFIED up to {found.checkpoint}: {count(len(found.flaws), 'flaw')}."]
    began, place = found.began, found.place
    lines = []
    if began.step:
        lines.append(f"Steps 1 to {began.step} were trained before the ledger started.")
    lines += [
        f"{samples} samples were skipped on purpose: {reason}."
        for reason, samples in found.left_out.items()
    ]
    lines += _lost(found)
    again = sum(epoch.repeated for epoch in found.epochs)
    but = ""
    if again:
        verb = "was" if again == 1 else "were"
        repeated = f"{count(again, 'sample')} {verb} repeated"
        lines.append(f"{repeated} to fill the last round of all ranks.")
        but = " except those"
    part = f"{len(found.lives)} of {found.claimed} generations are part of the result"
    resized = count(resizes_of(found), "change")
    lines.append(f"{part}; {resized} of the number of ranks: {', '.join(map(str, found.ranks))}.")
    steps = f"Verified up to {found.checkpoint}: in steps {began.step + 1} to {place.step}"
    lines.append(f"{steps} no sample was lost, and no sample was trained twice{but}.")
    return lines


def _lost(found: Audit) -> list[str]:
    """Return a line for each range of steps that was saved and later abandoned."""
    return [
        f"Steps {stretch.first} to {stretch.last} of generation {stretch.checkpoint.generation} were trained "
        "and abandoned."
        for stretch in found.abandoned
    ]


NOT_PROVEN = 1


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
    rollbacks and changes of the number of ranks. It computes the order of each epoch again. Exit
    code 0: verified. 1: not verified; the answer names the first wrong record.

    Example: resilient audit runs/gpt2
    """
    signing = signing_of(is_required=require_signature)
    store = open_repository(place, repo, reads_unsigned=True)
    committed_of(store)
    known = lineage(store)
    if not known.candidates and known.lost:
        raise NoIntactCheckpoint(
            f"no checkpoint in `{store.url}` can be audited: {known.lost}",
            hint=f"resilient ckpt verify --all {shell_quote(store.url)}",
        )
    if not known.candidates:
        raise NothingToResume(f"no checkpoint was committed in `{store.url}` yet")
    found = audit_ledger(store, known.candidates, signing)
    show(auditing(store.url, found), output_of(ctx))
    return 0 if found.is_proven else NOT_PROVEN
