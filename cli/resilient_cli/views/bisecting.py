"""The answer of ``ckpt bisect``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from resilient.showing import quoted
from resilient_cli.render import Answer, Facts, Table
from resilient_cli.views.words import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.format.names import CheckpointId
    from resilient_cli.halving import Change, Verdict


@dataclass(frozen=True, slots=True)
class Tried:
    """What was found of one checkpoint.

    Attributes:
        checkpoint: which one.
        verdict: about it.
        status: of the command; None if it was not run.
        reason: why, in words.
    """

    checkpoint: CheckpointId
    verdict: Verdict
    status: int | None
    reason: str


def bisected(
    url: str, row: Sequence[CheckpointId], change: Change[CheckpointId], tried: Sequence[Tried]
) -> Answer:
    """Return the answer.

    Args:
        url: the repository.
        row: all checkpoints from the good one to the bad one.
        change: where it changed.
        tried: in the order in which they were asked.
    """
    pair = f"{change.last_good} {change.first_bad}"
    next_command = f"resilient ckpt diff {pair} --repo {quoted(url)}"
    document = {
        "repository": url,
        "found": not change.unknown,
        "last_good": change.last_good.folder,
        "first_bad": change.first_bad.folder,
        "unknown": [one.folder for one in change.unknown],
        "between": len(row),
        "tried": [
            {"checkpoint": one.checkpoint.folder, "verdict": one.verdict, "status": one.status}
            for one in tried
        ],
        "next": next_command,
    }
    rows = tuple((one.checkpoint.folder, one.verdict.value, one.reason) for one in tried)
    facts = (
        ("last good", change.last_good.folder),
        ("first bad", _first_bad(change)),
        ("asked", f"{len(tried)} of {count(len(row), 'checkpoint')}"),
        ("next", next_command),
    )
    blocks = (Table(("CHECKPOINT", "VERDICT", "BECAUSE"), rows), Facts(facts))
    ids = (change.first_bad.folder,) if not change.unknown else ()
    return Answer("ckpt.bisect", "change", document, blocks, ids)


def _first_bad(change: Change[CheckpointId]) -> str:
    if not change.unknown:
        return change.first_bad.folder
    known = ", ".join(one.folder for one in change.unknown)
    return f"{change.first_bad.folder}, or one that nothing is known of: {known}"
