"""``resilient plan``: what saves cost, what failures cost, and how often to save."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from resilient.accounting.account import account
from resilient.accounting.every import parse_every
from resilient.accounting.planning import know, plan_tiers
from resilient.accounting.records import read_records
from resilient.errors import ConfigError, UsageError
from resilient.interval import observe
from resilient.vault.registry.catalog import read_manifest
from resilient.vault.registry.generations import read_generations
from resilient_cli.places import Repo, committed_of, open_repository, output_of
from resilient_cli.render import show
from resilient_cli.views.planning import Size, fits_notice, planning

if TYPE_CHECKING:
    from resilient.accounting.account import Account
    from resilient.storage.store import Store

Run = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[RUN]...",
        help="Folder of event files, or the output folder of the run; several for several hosts.",
    ),
]
Notice = Annotated[
    float | None,
    typer.Option(min=0, help="Seconds that a preemption is announced ahead: 120 on EC2 spot."),
]
Mtbf = Annotated[
    str, typer.Option(help="Time between failures, as 30m or 6h, in place of what was seen.")
]
Every = Annotated[
    str, typer.Option(help="An interval of yours to compare: 5m, 30s, 500steps or auto.")
]
DOES_NOT_FIT = 1


def plan(
    ctx: typer.Context,
    run: Run = None,
    *,
    repo: Repo = None,
    notice: Notice = None,
    mtbf: Mtbf = "",
    every: Every = "",
) -> int:
    """Say what a checkpoint is, what saving it takes, and how often to save.

    The size is of the newest checkpoint in the repository; times and failures are from the event
    files of the run. Without those the failures are from the repository's record of lives. Exit
    code 1: a save does not fit --notice, or nobody knows.

    Example: resilient plan runs/mine --notice 120
    """
    if not run and not repo:
        raise UsageError(
            "nothing to plan for was named: a run, or a --repo, or both", hint="resilient plan RUN"
        )
    mtbf_seconds = _time(mtbf)
    asked = parse_every(every, "--every") if every else None
    records = read_records(run) if run else []
    found = account(records)
    known, size = know(found, records), _told_size(found)
    if repo:
        store = open_repository(None, repo)
        size = _stored_size(store) or size
        if not run:
            lives = [(one.cause, one.claimed_at) for one in read_generations(store)]
            known = replace(known, failures=observe(lives))
    asked_seconds = (asked.seconds or asked.steps * known.step_seconds) if asked else 0.0
    tiers = plan_tiers(known, mtbf_seconds, asked_seconds)
    show(planning(size, known, tiers, notice), output_of(ctx))
    fits = notice is None or fits_notice(known, notice)
    return 0 if fits else DOES_NOT_FIT


def _time(mtbf: str) -> float | None:
    if not mtbf:
        return None
    seconds = parse_every(mtbf, "--mtbf").seconds
    if not seconds:
        raise ConfigError(f"--mtbf {mtbf!r} is no time: use 30m, 6h")
    return seconds


def _told_size(found: Account) -> Size:
    if not found.saved:
        return Size()
    newest = found.saved[-1]
    ranks = {one.life.number: one.life.world_size for one in found.doings}
    return Size(newest.checkpoint, newest.size_bytes, ranks.get(newest.life, 0))


def _stored_size(store: Store) -> Size | None:
    checkpoints = committed_of(store)
    if not checkpoints:
        return None
    manifest = read_manifest(store, checkpoints[0])
    ranks = len({one.rank for one in manifest.files})
    return Size(checkpoints[0].folder, manifest.size_bytes, ranks)
