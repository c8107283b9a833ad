"""The answer of ``audit``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from resilient_cli.render import Answer, Table
from resilient_cli.views.words import NONE, count

if TYPE_CHECKING:
    from resilient.vault.ledger.audit import Audit
    from resilient.vault.ledger.coverage import Epoch


def auditing(url: str, found: Audit) -> Answer:
    """Return the answer of ``audit``."""
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
        "epochs": [{**asdict(one), "complete": one.is_complete} for one in found.epochs],
        "left_out": found.left_out,
        "idle_steps": found.idle,
        "abandoned": [
            {"id": one.checkpoint.folder, "first": one.first, "last": one.last}
            for one in found.abandoned
        ],
        "flaws": [asdict(one) for one in found.flaws],
    }
    columns = ("EPOCH", "SAMPLES", "TRAINED", "LEFT OUT", "AGAIN", "ORDER")
    epochs = Table(columns, tuple(_row(one) for one in found.epochs if found.is_proven))
    flaws = Table(
        ("WHERE", "RECORD", "PROBLEM"),
        tuple((one.key, str(one.record or NONE), one.problem) for one in found.flaws),
    )
    return Answer("audit", "audit", document, (epochs, flaws, *_closing(found)), ())


def resizes_of(found: Audit) -> int:
    """Return how often the number of ranks that share the data changed."""
    return max(0, len(found.ranks) - 1)


def _row(epoch: Epoch) -> tuple[str, ...]:
    shown = (epoch.number, epoch.size or NONE, epoch.trained, epoch.left_out, epoch.repeated)
    return (*map(str, shown), epoch.order)


def _closing(found: Audit) -> list[str]:
    if found.flaws:
        return [f"NOT PROVEN up to {found.checkpoint}: {count(len(found.flaws), 'flaw')}."]
    began, place = found.began, found.place
    lines = []
    if began.step:
        lines.append(f"Steps 1 to {began.step} were trained before the ledger began.")
    lines += [
        f"{samples} samples were left out on purpose: {reason}."
        for reason, samples in found.left_out.items()
    ]
    lines += _lost(found)
    again = sum(one.repeated for one in found.epochs)
    but = ""
    if again:
        lines.append(f"{count(again, 'sample')} came again to complete last rounds for all ranks.")
        but = " but those"
    part = f"{len(found.lives)} of {found.claimed} lives are part of it"
    resized = count(resizes_of(found), "change")
    lines.append(f"{part}; {resized} of the number of ranks: {', '.join(map(str, found.ranks))}.")
    steps = f"Proven up to {found.checkpoint}: in steps {began.step + 1} to {place.step}"
    lines.append(f"{steps} no sample was lost, and none trained on twice{but}.")
    return lines


def _lost(found: Audit) -> list[str]:
    """Say which steps were saved and are no part of the result."""
    return [
        f"Steps {one.first} to {one.last} of life {one.checkpoint.generation} were trained and "
        "given up."
        for one in found.abandoned
    ]
