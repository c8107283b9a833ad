"""What to do about each thing that is wrong with a checkpoint of another tool (pure)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.layouts.judging import filled
from resilient.layouts.plain import ALONE
from resilient.layouts.values import Cure
from resilient.showing import quoted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from resilient.layouts.values import Problem

_FIXES = {
    Cure.REPAIR: "resilient ckpt repair {path}",
    Cure.COPY: "resilient ckpt repair {path} --from COPY",
    Cure.EARLIER: "none: it was saved like that, so a step before is what can be gone on from",
    Cure.UNKEPT: "none: what saved it keeps none, so each resume goes on without",
    Cure.NEEDLESS: "none is needed: no resume goes by it",
}


def is_costly(problems: Iterable[Problem]) -> bool:
    """Return True if a resume stops, or loses a state that the tool saves.

    A state that the tool never saves is no damage of the checkpoint.
    """
    return any(
        one.is_fatal or (one.loses and one.cure is not Cure.UNKEPT)
        for one in problems
        if one.what != ALONE
    )


def remedy(problem: Problem, path: str, sibling: str = "") -> str:
    """Return what helps: a command, or a sentence that begins with ``none``.

    Args:
        problem: what is wrong.
        path: where the checkpoint is.
        sibling: where another one of the same run is that training can go on from.
    """
    if problem.help:
        return filled(problem.help, path)
    if problem.cure is Cure.EARLIER and sibling:
        return f"resilient ckpt inspect {quoted(sibling)}"
    return filled(_FIXES[problem.cure], path)
