"""Whether training can go on from a checkpoint, what that costs, and the command that helps (pure).

The answer is about the tool that wrote it: what its own loader would do with these files. Where we
take a checkpoint over, our command is named instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.layouts.values import Verdict
from resilient.showing import quoted

if TYPE_CHECKING:
    from resilient.layouts.values import Contents

OURS = "resilient train SCRIPT --resume {path}"
_TAKEN_OVER = "hf-trainer"
_NAMED_MAX = 4


def judge(contents: Contents, path: str, sibling: str = "") -> Verdict:
    """Return the verdict of a checkpoint.

    Args:
        contents: what it holds.
        path: where it is.
        sibling: where another one of the same run is that training can go on from.
    """
    fatal = [one for one in contents.problems if one.is_fatal]
    if fatal:
        named = fatal[:_NAMED_MAX]
        why = tuple(one.what if one.place == "." else f"{one.place}: {one.what}" for one in named)
        # What mends one loss is no help where there are others.
        helps = {one.help for one in fatal}
        told = helps.pop() if len(helps) == 1 else ""
        other = f"resilient ckpt inspect {quoted(sibling)}" if sibling else ""
        return Verdict("no", why, filled(told, path) or other)
    lost = tuple(dict.fromkeys(one.loses for one in contents.problems if one.loses))
    # A checkpoint with a loss is refused by our own import.
    ours = contents.layout == _TAKEN_OVER and not lost
    return Verdict(
        "partly" if lost else "yes", lost, filled(OURS if ours else contents.resume, path)
    )


def filled(command: str, path: str) -> str:
    """Return a command with where the checkpoint is in it."""
    return command.replace("{path}", path if "'" in command else quoted(path))
