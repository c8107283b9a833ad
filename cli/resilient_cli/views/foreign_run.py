"""The answer of ``ckpt ls`` about a run of another tool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.showing import quoted
from resilient_cli.render import Answer, Table, human_size
from resilient_cli.views.accounting import moment
from resilient_cli.views.words import NONE, age, count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.layouts.runs import Kept
    from resilient_cli.runs import Run

_YEAR_10000_SECONDS = 253_402_300_800
_CUT = "There are more files than were listed, so newer checkpoints may lack here."


def listed_run(run: Run, shown: Sequence[Kept], now: str) -> Answer:
    """Return the answer of ``ckpt ls`` about a folder of foreign checkpoints.

    Args:
        run: all of them.
        shown: those that were asked for.
        now: ISO 8601, for ages.
    """
    found, place = run.checkpoints, run.url.rstrip("/")
    size_bytes = sum(one.size_bytes for one in found)
    document = {
        "url": run.url,
        "size_bytes": size_bytes,
        "hidden": len(found) - len(shown),
        "whole": run.is_whole,
        "stale": dict(run.pointers.stale),
        "checkpoints": [
            {
                "type": "foreign_checkpoint_name",
                "name": one.name,
                "step": one.step,
                "changed": _changed(one),
                "layout": one.layout,
                "size_bytes": one.size_bytes,
                "files": one.files,
                "notes": _notes(run, one),
            }
            for one in shown
        ],
    }
    rows = tuple(
        (
            NONE if one.step is None else str(one.step),
            age(_changed(one) or "", now),
            human_size(one.size_bytes),
            str(one.files),
            one.layout,
            one.name,
            ", ".join(_notes(run, one)),
        )
        for one in shown
    )
    hidden = len(found) - len(shown)
    blocks: tuple[Table | str, ...] = (
        Table(("STEP", "AGE", "SIZE", "FILES", "LAYOUT", "NAME", "NOTE"), rows),
        *([f"{len(shown)} shown, {hidden} not chosen."] if hidden else []),
        f"{count(len(found), 'checkpoint')} of another tool, {human_size(size_bytes)}.",
        *([] if run.is_whole else [_CUT]),
        *(f"`{one}` names `{tag}`, which is not there." for one, tag in run.pointers.stale.items()),
        f"Whether one can be gone on from: resilient ckpt inspect latest {quoted(place)}",
    )
    # A name may have a slash, and with one it would be a path: so it is the whole of it.
    ids = tuple(f"{place}/{one.name}" for one in shown)
    return Answer("ckpt.ls-foreign", "foreign_checkpoints", document, blocks, ids)


def _changed(one: Kept) -> str | None:
    """Return when the last file of a checkpoint was written, None where nobody tells.

    Anybody can set it to what no calendar knows.
    """
    is_told = one.changed is not None and 0 <= one.changed < _YEAR_10000_SECONDS
    return moment(int(1000 * (one.changed or 0))) if is_told else None


def _notes(run: Run, one: Kept) -> list[str]:
    """Return what the run says of a checkpoint."""
    named = (("latest", run.latest), ("best", run.pointers.best))
    kinds = (("unfinished", one.is_unfinished), ("repaired", one.is_repaired))
    return [
        *(word for word, names in named if one.name in names),
        *(word for word, is_it in kinds if is_it),
    ]
