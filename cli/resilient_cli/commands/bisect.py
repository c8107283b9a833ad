"""``resilient ckpt bisect``: first checkpoint at which a user's command fails.

The search is a pure function that tests as few checkpoints as possible.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Generic, TypeVar

import typer

from resilient.checkpoint.catalog import ancestry
from resilient.checkpoint.refs import resolve
from resilient.checkpoint.verify import verify
from resilient.errors import UsageError
from resilient.redaction import shell_quote
from resilient.storage.open import local_path
from resilient.storage.urls import protocol_of
from resilient_cli.output import CommandResult, Format, KeyValues, Table, say, show
from resilient_cli.repositories import (
    Repo,
    committed_checkpoints,
    complete_ref,
    open_repository,
    output_of,
)
from resilient_cli.views.text import count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from resilient.format.keys import CheckpointId
    from resilient.storage.store import Store
    from resilient_cli.output import Output

Item = TypeVar("Item")


class Verdict(StrEnum):
    """Result of testing one item."""

    GOOD = "good"
    BAD = "bad"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class BisectResult(Generic[Item]):
    """Items between which the verdict changes from good to bad.

    Attributes:
        last_good: Last item that is known to be good.
        first_bad: First item that is known to be bad.
        unknown: Items between the two that have no verdict.
    """

    last_good: Item
    first_bad: Item
    unknown: tuple[Item, ...]


def bisect_sequence(
    row: Sequence[Item], judge: Callable[[Item, int], Verdict]
) -> BisectResult[Item]:
    """Find the place at which a sequence of items changes from good to bad.

    If the verdict changes several times, one of the changes is returned. Each verdict rules out
    half of the remaining items. An unknown verdict rules out nothing: the nearest untested
    neighbours are tested instead.

    Args:
        row: At least two items; the first is good and the last is bad.
        judge: Test of one item. It also receives the number of untested items, this one included.
    """
    good_index, bad_index = 0, len(row) - 1
    unknown_indices: set[int] = set()
    while candidates := [
        candidate
        for candidate in range(good_index + 1, bad_index)
        if candidate not in unknown_indices
    ]:
        middle = (good_index + bad_index) / 2
        at = min(candidates, key=lambda candidate: abs(candidate - middle))
        verdict = judge(row[at], len(candidates))
        if verdict is Verdict.GOOD:
            good_index = at
        elif verdict is Verdict.BAD:
            bad_index = at
        else:
            unknown_indices.add(at)
    return BisectResult(row[good_index], row[bad_index], tuple(row[good_index + 1 : bad_index]))


@dataclass(frozen=True, slots=True)
class BisectStep:
    """Result of testing one checkpoint.

    Attributes:
        checkpoint: The tested checkpoint.
        verdict: Good, bad or unknown.
        status: Exit status of the command; None if the command was not run.
        reason: Reason of the verdict, in words.
    """

    checkpoint: CheckpointId
    verdict: Verdict
    status: int | None
    reason: str


def build_bisect_result(
    url: str,
    row: Sequence[CheckpointId],
    change: BisectResult[CheckpointId],
    steps: Sequence[BisectStep],
) -> CommandResult:
    """Build the answer of ``ckpt bisect``.

    Args:
        url: URL of the repository.
        row: All checkpoints from the good checkpoint to the bad checkpoint.
        change: Checkpoints between which the verdict changes.
        steps: Tested checkpoints, in the order of the tests.
    """
    pair = f"{change.last_good} {change.first_bad}"
    next_command = f"resilient ckpt diff {pair} --repo {shell_quote(url)}"
    document = {
        "repository": url,
        "found": not change.unknown,
        "last_good": change.last_good.folder,
        "first_bad": change.first_bad.folder,
        "unknown": [checkpoint_id.folder for checkpoint_id in change.unknown],
        "between": len(row),
        "tried": [
            {"checkpoint": step.checkpoint.folder, "verdict": step.verdict, "status": step.status}
            for step in steps
        ],
        "next": next_command,
    }
    rows = tuple((step.checkpoint.folder, step.verdict.value, step.reason) for step in steps)
    facts = (
        ("last good", change.last_good.folder),
        ("first bad", _first_bad(change)),
        ("asked", f"{len(steps)} of {count(len(row), 'checkpoint')}"),
        ("next", next_command),
    )
    blocks = (Table(("CHECKPOINT", "VERDICT", "BECAUSE"), rows), KeyValues(facts))
    ids = (change.first_bad.folder,) if not change.unknown else ()
    return CommandResult("ckpt.bisect", "change", document, blocks, ids)


def _first_bad(change: BisectResult[CheckpointId]) -> str:
    if not change.unknown:
        return change.first_bad.folder
    names = ", ".join(checkpoint_id.folder for checkpoint_id in change.unknown)
    return f"{change.first_bad.folder}, or one that could not be tested: {names}"


UNDECIDED = 1
_UNDECIDED_STATUS = 125
_NOT_RUN = frozenset({126, 127})
_STATUS_MAX = 127
_PLACE = "{}"
_STDERR = 2


def bisect(
    ctx: typer.Context,
    good: Annotated[
        str,
        typer.Argument(
            metavar="GOOD",
            help="A checkpoint at which the command does not fail.",
            autocompletion=complete_ref,
        ),
    ],
    bad: Annotated[
        str,
        typer.Argument(
            metavar="BAD",
            help="A later checkpoint, at which the command fails.",
            autocompletion=complete_ref,
        ),
    ],
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND...",
            help="Command to run; {} is replaced by the checkpoint's path or URL.",
        ),
    ],
    repo: Repo = None,
) -> int:
    """Find the first checkpoint in a range at which a command fails.

    The command runs for GOOD, for BAD, and for about 10 of 1,000 checkpoints between them. An exit
    status from 1 to 124 is a failure. With status 125 the command cannot decide, and a neighbouring
    checkpoint is tried. Damaged checkpoints are skipped. The output of the command goes to stderr.
    RESILIENT_REPO and RESILIENT_CHECKPOINT name the checkpoint to test.

    Exit code 0: one checkpoint was found. 1: only a range of checkpoints was found.

    Example: resilient ckpt bisect step:1000 latest -r runs/mine -- python evaluate.py {}
    """
    store, output = open_repository(None, repo), output_of(ctx)
    committed_checkpoints(store)
    ends = resolve(store, good), resolve(store, bad)
    row = _row(store, *ends)
    judge = _Judge(store, command, output)
    _require(judge, ends[0], Verdict.GOOD)
    _require(judge, ends[1], Verdict.BAD)
    change = bisect_sequence(row, judge)
    show(build_bisect_result(store.url, row, change, judge.tried), output)
    return UNDECIDED if change.unknown else 0


def _row(store: Store, good: CheckpointId, bad: CheckpointId) -> list[CheckpointId]:
    """Return the checkpoints from the good to the bad checkpoint, in the order of training."""
    line = ancestry(store, bad)
    if good == bad or good not in line:
        raise UsageError(
            f"{good} is not an ancestor of {bad}: training did not continue from it",
            hint=f"resilient ckpt reflog {shell_quote(store.url)} (shows where each generation "
            "started)",
        )
    return line[line.index(good) :: -1]


def _require(judge: _Judge, end: CheckpointId, expected: Verdict) -> None:
    verdict = judge(end, 1)
    if verdict is not expected:
        reason = judge.tried[-1].reason
        raise UsageError(
            f"{end} must be {expected} but is {verdict}: {reason}. No result (the command must end "
            "with 0 at GOOD, and with 1 to 124 at BAD)",
            hint="resilient ckpt bisect --help",
        )


@dataclass(slots=True)
class _Judge:
    """Test that runs the command once per checkpoint, and records each result."""

    store: Store
    command: list[str]
    output: Output
    tried: list[BisectStep] = field(default_factory=list)

    def __call__(self, checkpoint: CheckpointId, untested_count: int) -> Verdict:
        if self.output.format is Format.HUMAN and not self.output.quiet:
            suffix = f": {untested_count} left" if untested_count > 1 else ""
            say(f"trying {checkpoint}{suffix}")
        findings = verify(self.store, checkpoint, "quick")
        damaged_files = [finding.file for finding in findings if finding.severity == "damaged"]
        if damaged_files:
            step = BisectStep(checkpoint, Verdict.UNKNOWN, None, f"damaged: {damaged_files[0]}")
        else:
            step = _judge_status(checkpoint, self._run(checkpoint))
        self.tried.append(step)
        return step.verdict

    def _run(self, checkpoint: CheckpointId) -> int:
        """Run the command and return its exit status.

        Raises:
            UsageError: The command cannot be run, or a signal ended it. A signal gives no result
                for the checkpoint.
        """
        url = self.store.url
        # A program that loads a file needs a path, not a URL.
        home = str(local_path(url)) if protocol_of(url) == "file" else url.rstrip("/")
        words = [word.replace(_PLACE, f"{home}/{checkpoint.folder}") for word in self.command]
        variables = {"RESILIENT_REPO": home, "RESILIENT_CHECKPOINT": checkpoint.folder}
        try:
            # stdout is only for the answer, so the user's command writes to stderr.
            env = {**os.environ, **variables}
            process = subprocess.run(words, env=env, stdout=_STDERR, check=False)  # noqa: S603
        except OSError as error:
            raise UsageError(f"cannot run `{words[0]}`: {error}", hint=_AFTER_DASHES) from error
        if process.returncode in _NOT_RUN:
            raise UsageError(
                f"`{words[0]}` ended with {process.returncode}: it was not found or cannot be "
                "executed",
                hint=_AFTER_DASHES,
            )
        if not 0 <= process.returncode <= _STATUS_MAX:
            raise UsageError(
                f"`{words[0]}` ended with {process.returncode} at {checkpoint}, probably by a "
                "signal, which says nothing about the checkpoint. End the command with 1 for a "
                "failure, or with 125 if it cannot decide",
                hint="resilient ckpt bisect --help",
            )
        return process.returncode


_AFTER_DASHES = "resilient ckpt bisect --help"


def _judge_status(checkpoint: CheckpointId, status: int) -> BisectStep:
    if status == _UNDECIDED_STATUS:
        return BisectStep(checkpoint, Verdict.UNKNOWN, status, "the command cannot decide")
    verdict = Verdict.BAD if status else Verdict.GOOD
    return BisectStep(checkpoint, verdict, status, f"the command ended with {status}")
