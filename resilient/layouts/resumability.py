"""Decision whether a checkpoint of another tool can be resumed: fully, with a loss, or not.

:func:`assess_resumability` is a pure function from the contents of a checkpoint
(:class:`~resilient.layouts.model.Contents`) to a :class:`~resilient.layouts.model.Resumability`.
All callers use this one check: the Trainer's import, the agent's restart policy, and the commands
``ckpt import``, ``inspect``, ``verify`` and ``repair``. :func:`remedy` returns the fix for each
problem.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from resilient.layouts.model import Remedy, Resumability
from resilient.layouts.single_file import ALONE
from resilient.redaction import shell_quote

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from resilient.layouts.model import Contents, Problem

LIBRARY_RESUME = "resilient train SCRIPT --resume {path}"
REPAIR = "resilient ckpt repair {path}"
_IMPORTED = "hf-trainer"
_NAMED_MAX = 4
_TRAINED = ("optimizer", "schedule", "weights", "agreement")
"""Words in losses that change the result of the training; a run recovers from other losses."""


class RepairOutcome(Enum):
    """Result of a planned repair."""

    UNKNOWN = "unknown"
    """No repair was planned."""
    LOSSLESS = "lossless"
    """The repair restores everything."""
    LOSSY = "lossy"
    """The result is resumable, and something is lost."""
    NONE = "none"
    """The repair restores nothing that a resume needs."""


@dataclass(frozen=True, slots=True)
class Alternatives:
    """Alternatives to a resume from the unrepaired checkpoint.

    Attributes:
        sibling: Path of another resumable checkpoint of the run; empty without one.
        repair: Result of a planned repair.
    """

    sibling: str = ""
    repair: RepairOutcome = RepairOutcome.UNKNOWN


def assess_resumability(
    contents: Contents, path: str, others: Alternatives | None = None
) -> Resumability:
    """Assess whether training can continue from a checkpoint.

    Args:
        contents: Contents of the checkpoint, with problems of its bytes if those were read.
        path: Path of the checkpoint.
        others: Other ways to continue the run.
    """
    others = others or Alternatives()
    fatal = [problem for problem in contents.problems if problem.is_fatal]
    if fatal:
        return Resumability("no", reasons(fatal), _best_command(fatal, path, others))
    lost_state = tuple(
        dict.fromkeys(problem.loses for problem in contents.problems if problem.loses)
    )
    command = filled(_resume(contents), path)
    if lost_state:
        return Resumability(
            "partly", lost_state, _better_command(lost_state, path, others) or command
        )
    return Resumability("yes", (), command)


def reasons(problems: Sequence[Problem]) -> tuple[str, ...]:
    """Return the first few different problems, each with its place."""
    texts = dict.fromkeys(
        problem.what if problem.place == "." else f"{problem.place}: {problem.what}"
        for problem in problems
    )
    return tuple(texts)[:_NAMED_MAX]


def filled(command: str, path: str) -> str:
    """Return a command with the path of the checkpoint in it."""
    return command.replace("{path}", path if "'" in command else shell_quote(path))


def _resume(contents: Contents) -> str:
    """Return the resume command of this library if it imports the checkpoint, else the tool's."""
    is_importable = contents.layout == _IMPORTED and not contents.not_imported
    return LIBRARY_RESUME if is_importable else contents.resume


def _best_command(fatal: Sequence[Problem], path: str, others: Alternatives) -> str:
    """Return the best command for a checkpoint that is not resumable; empty without one.

    A lossless repair is better than another step. Another step is better than a lossy repair.
    """
    if others.repair is RepairOutcome.LOSSLESS:
        return filled(REPAIR, path)
    # A command that helps against one problem does not help against the others.
    helps = {problem.help for problem in fatal}
    help_text = helps.pop() if len(helps) == 1 else ""
    is_useless = help_text == REPAIR and others.repair is not RepairOutcome.UNKNOWN
    if help_text and not (is_useless and (others.sibling or others.repair is RepairOutcome.NONE)):
        return filled(help_text, path)
    if others.sibling:
        return f"resilient ckpt inspect {shell_quote(others.sibling)}"
    # A repair cannot improve a state that was saved as it is.
    is_saved_so = all(problem.cure is Remedy.EARLIER for problem in fatal)
    if others.repair is RepairOutcome.LOSSY:
        return filled(REPAIR, path)
    return "" if is_saved_so or others.repair is RepairOutcome.NONE else filled(REPAIR, path)


def _better_command(lost: Sequence[str], path: str, others: Alternatives) -> str:
    """Return a command that is better than a resume with a loss; empty without one."""
    if others.repair is RepairOutcome.LOSSLESS:
        return filled(REPAIR, path)
    if others.sibling and any(word in loss for loss in lost for word in _TRAINED):
        return f"resilient ckpt inspect {shell_quote(others.sibling)}"
    return ""


_FIXES = {
    Remedy.REPAIR: "resilient ckpt repair {path}",
    Remedy.COPY: "resilient ckpt repair {path} --from COPY",
    Remedy.EARLIER: "none: it was saved like that, so resume an earlier step",
    Remedy.UNKEPT: "none: its tool saves no such state, so each resume continues without it",
    Remedy.NEEDLESS: "none is needed: no resume uses it",
}


def is_costly(problems: Iterable[Problem]) -> bool:
    """Return True if a resume stops, or loses a state that the tool saves.

    A state that the tool never saves does not count as damage.
    """
    return any(
        problem.is_fatal or (problem.loses and problem.cure is not Remedy.UNKEPT)
        for problem in problems
        if problem.what != ALONE
    )


def remedy(problem: Problem, path: str, others: Alternatives | None = None) -> str:
    """Return the remedy: a command, or a text that begins with ``none``.

    Args:
        problem: The problem.
        path: Path of the checkpoint.
        others: Other ways to continue the run, as far as they are known.
    """
    others = others or Alternatives()
    if problem.cure is Remedy.EARLIER and others.sibling and not problem.help:
        return f"resilient ckpt inspect {shell_quote(others.sibling)}"
    fix = problem.help or _FIXES[problem.cure]
    # Without another copy, this repair would have nothing to do.
    is_useless = fix == REPAIR and others.repair is RepairOutcome.NONE
    return filled(_FIXES[Remedy.COPY] if is_useless else fix, path)
