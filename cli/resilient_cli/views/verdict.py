"""The line that says whether training can go on, the same for everybody's checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilient_cli.render import Facts

if TYPE_CHECKING:
    from resilient.layouts.values import Verdict

_ANSWERS = {"yes": "yes", "partly": "yes with loss of ", "no": "no, because "}


def conclusion(verdict: Verdict) -> Facts:
    """Return the line for people, and what to run next if something helps."""
    said = _ANSWERS[verdict.answer] + "; ".join(verdict.why)
    after = (("next", verdict.command),) if verdict.command else ()
    return Facts((("resumable", said), *after))


def resumable(verdict: Verdict) -> dict[str, Any]:
    """Return the same for programs."""
    return {"answer": verdict.answer, "why": list(verdict.why), "command": verdict.command}
