"""The answer of ``ckpt repair`` about a checkpoint that another tool wrote."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from resilient_cli.render import Answer, Table
from resilient_cli.views.words import NONE, count

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from resilient.mending.planning import MendingPlan

_SHOWN_MAX = 6


def mending(plan: MendingPlan, target: Path, command: str, *, done: bool) -> Answer:
    """Return the answer of ``ckpt repair`` about a foreign checkpoint.

    Args:
        plan: what can be made whole and what cannot.
        target: where it is written, or would be.
        command: The command that writes it.
        done: whether it was.
    """
    document = {
        "url": plan.url,
        "layout": plan.layout,
        "done": done,
        "whole": plan.is_whole,
        "mended": plan.is_mended,
        "target": str(target) if plan.is_mended or plan.salvaged else None,
        "steps": [{"type": "step", **asdict(one)} for one in plan.steps],
        "losses": dict(plan.losses),
        "refused": dict(plan.refused),
        "salvaged": [_salvaged(one) for one in plan.salvaged if not plan.is_mended],
        "resumable": {"answer": plan.verdict.answer, "why": list(plan.verdict.why)},
    }
    rows = [(one.file, "mended" if done else "mend", one.what, one.source) for one in plan.steps]
    rows += [(name, "LOST", follows, NONE) for name, follows in plan.losses.items()]
    rows += [(name, "stays", why, NONE) for name, why in plan.refused.items()]
    table = Table(("WHAT", "PLAN", "HOW, OR WHAT FOLLOWS", "FROM"), tuple(rows))
    blocks: tuple[Table | str, ...] = (table, *_lines(plan, target, done=done))
    if not done and (plan.is_mended or plan.salvaged):
        blocks = (*blocks, f"To write it: {command}")
    return Answer("ckpt.repair-foreign", "mending", document, blocks, (str(target),))


def _salvaged(one: Any) -> dict[str, Any]:
    whole = [saved.name for saved in one.saved]
    return {"type": "salvaged", "file": one.file, "whole": whole, "lost": list(one.lost)}


def _lines(plan: MendingPlan, target: Path, *, done: bool) -> Iterator[str]:
    if not plan.steps and not plan.refused and not plan.is_hopeless:
        lacks = "; ".join(plan.verdict.why)
        if lacks and plan.is_damaged:
            yield f"{plan.url} is damaged: a resume loses {lacks}. Nothing here makes it whole."
        elif lacks:
            yield f"Nothing of {plan.url} is damaged."
            yield f"It is without {lacks}, and nothing here has it."
        else:
            yield f"{plan.url} is whole: nothing to repair."
        return
    if plan.is_mended:
        kept = "; what is lost is in its repaired.json" if plan.losses else ""
        verb = "is in" if done else "would be in"
        yield f"A new checkpoint {verb} {target}{kept}. {plan.url} is only read."
    elif plan.salvaged:
        yield from _left(plan, target, done=done)
    else:
        yield "Nothing can be mended, and nothing was changed."


def _left(plan: MendingPlan, target: Path, *, done: bool) -> Iterator[str]:
    whole = sum(len(one.saved) for one in plan.salvaged)
    lost = [name for one in plan.salvaged for name in one.lost]
    named = ", ".join(lost[:_SHOWN_MAX]) + (", ..." if len(lost) > _SHOWN_MAX else "")
    verb = "are in" if done else "would be in"
    yield f"No tool can go on from it. {count(whole, 'tensor')} of what is damaged {verb} {target}."
    yield f"Lost: {count(len(lost), 'tensor')}{': ' + named if named else ''}."
