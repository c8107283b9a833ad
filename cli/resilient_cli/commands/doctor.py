"""``resilient doctor``: is this machine, and this repository, fit to train on?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from resilient.agent.notices.choosing import detect
from resilient.clock import SystemClock
from resilient.errors import UsageError
from resilient_cli.doctor import budget, machine
from resilient_cli.doctor.repository import Found, examine
from resilient_cli.places import open_repository
from resilient_cli.render import Answer, Table, show

if TYPE_CHECKING:
    from resilient_cli.doctor.check import Check

Repo = Annotated[
    str | None, typer.Option("-r", "--repo", envvar="RESILIENT_REPO", help="Look at its store too.")
]
Events = Annotated[
    Path | None, typer.Option(help="Event files of a run, which say what its saves took.")
]
Grace = Annotated[
    float, typer.Option("--grace", "--shutdown-timeout", help="That of resilient train.", min=0)
]
Termination = Annotated[
    float | None,
    typer.Option(help="Seconds from SIGTERM to SIGKILL: terminationGracePeriodSeconds, KillWait."),
]
Notice = Annotated[
    str, typer.Option(help="auto, off, aws, gcp, azure, gke, slurm, or seconds of notice.")
]


def doctor(
    ctx: typer.Context,
    *,
    repo: Repo = None,
    events: Events = None,
    grace: Grace = 25.0,
    termination_grace: Termination = None,
    notice: Notice = "auto",
) -> None:
    """Look at what training will depend on. Ends with 1 if anything needs attention."""
    checks = [
        machine.check_package(),
        machine.check_gpus(),
        machine.check_shared_memory(),
        machine.check_clock(),
        machine.check_signals(),
    ]
    notice_seconds = _notice(notice)
    found = (
        examine(open_repository(repo, None, reads_unsigned=True), SystemClock())
        if repo
        else Found()
    )
    checks += found.checks
    terms = _terms(found, events)
    checks += budget.judge(
        budget.Budget(terms[0], terms[1], grace, termination_grace, notice_seconds, terms[2])
    )
    show(_answer(checks), ctx.find_root().obj)
    raise typer.Exit(0 if all(one.is_ok for one in checks) else 1)


def _notice(word: str) -> float | None:
    """Return how many seconds are announced, None if nobody knows.

    Raises:
        UsageError: it is no word that is known.
    """
    if word == "auto":
        known = [budget.NOTICE_SECONDS[one] for one in detect(os.environ)]
        return min(known, default=None)
    if word in budget.NOTICE_SECONDS:
        return budget.NOTICE_SECONDS[word]
    if word == "off":
        return None
    try:
        return float(word)
    except ValueError as error:
        names = ", ".join(budget.NOTICE_SECONDS)
        raise UsageError(f"--notice {word!r} is none of auto, off, {names}, seconds") from error


def _terms(found: Found, events: Path | None) -> tuple[float | None, float, str]:
    """Return what a save takes, what its promotion takes, and who says so."""
    took = budget.read_events(events) if events else budget.Took()
    save_seconds = budget.p95(took.saves)
    if save_seconds is not None:
        return save_seconds, budget.p95(took.promotions) or 0.0, f"p95 of {len(took.saves)} saves"
    return found.save_seconds, 0.0, "by the size of the newest checkpoint and the store's speed"


def _answer(checks: list[Check]) -> Answer:
    rows = tuple((one.name, one.verdict, one.found) for one in checks)
    hints = tuple(f"hint: {one.name}: {one.hint}" for one in checks if one.hint)
    warned = tuple(one.name for one in checks if not one.is_ok)
    document = {"is_ok": not warned, "checks": [one.to_json() for one in checks]}
    return Answer(
        "doctor", "diagnosis", document, (Table(("CHECK", "", "FOUND"), rows), *hints), ids=warned
    )
