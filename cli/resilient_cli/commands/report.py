"""``resilient report`` and ``resilient status``: where the time of a run went, and where it is."""

from __future__ import annotations

import shlex
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from resilient.accounting.account import account
from resilient.accounting.records import read_records
from resilient.accounting.steadying import present_ms
from resilient.clock import SystemClock
from resilient.errors import RepositoryNotFound, UsageError
from resilient_cli.commands.listing import store_of, stored
from resilient_cli.page.html import page_of
from resilient_cli.page.writing import write_page
from resilient_cli.places import local_path, output_of
from resilient_cli.render import Format, show
from resilient_cli.streams import clear_screen
from resilient_cli.views.accounting import moment, reporting
from resilient_cli.views.eventless import reporting_stored, standing_stored
from resilient_cli.views.progress import standing
from resilient_cli.witness import is_dead

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.accounting.account import Account
    from resilient.accounting.records import Record

Run = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN...",
        help="Folder of event files, or the output folder of the run; several for several hosts.",
    ),
]
Page = Annotated[
    Path | None, typer.Option("-o", "--output", help="Write one self-contained HTML page here.")
]
Tensors = Annotated[
    str | None,
    typer.Option("--tensors", metavar="REF", help="With -o: draw the tensors of a checkpoint."),
]
Compare = Annotated[
    tuple[str, str] | None,
    typer.Option("--compare", metavar="A B", help="With -o: compare two checkpoints."),
]
Verify = Annotated[
    bool, typer.Option("--verify", help="With -o: read every byte of all checkpoints.")
]
Watch = Annotated[bool, typer.Option("-w", "--watch", help="Again and again, until the run ends.")]
Interval = Annotated[float, typer.Option(help="Seconds between two looks of --watch.", min=0.1)]


def report(
    ctx: typer.Context,
    run: Run,
    *,
    output: Page = None,
    tensors: Tensors = None,
    compare: Compare = None,
    verify: Verify = False,
) -> None:
    """Say where the wall clock of a run went: each second is in one class, and they sum to it.

    Goodput is the share of it that was training whose steps are part of the result. It reads the
    event files of all lives; the run may still go on. A repository whose run kept none says what
    it holds.

    The page of -o has the checkpoints too, where RUN is also the repository. What takes long to
    read is in it where it is asked for; `resilient ui` reads it when somebody looks.

    Example: resilient report runs/mine -o run.html

    Example: resilient report runs/mine -o run.html --verify --compare latest~1 latest
    """
    if output is None and (tensors or compare or verify):
        raise UsageError(
            "`--tensors`, `--compare` and `--verify` are parts of a page",
            hint="resilient report RUN -o run.html --verify",
        )
    if output is not None:
        output = local_path(
            output, "-o", f"resilient report {shlex.join(map(str, run))} -o run.html"
        )
    found, kept = account(records_of(run)), stored(run)
    if output is not None:
        # Not before a page is wanted: it loads NumPy where tensors are read.
        from resilient_cli.page.extras import extras_of

        extras = extras_of(run, tensors, compare, verify=verify)
        write_page(output, page_of(found, str(run[0]), kept, extras=extras))
    page = str(output) if output else ""
    is_told = bool(found.doings or found.launches)
    told = reporting_stored(kept, page) if kept and not is_told else reporting(found, page)
    show(told, output_of(ctx))


def status(ctx: typer.Context, run: Run, *, watch: Watch = False, interval: Interval = 2.0) -> None:
    """Say where a run is: its step, its speed, what is durable, what would be lost now.

    Of a run that keeps no events nobody can tell when it ends: --watch looks at it once.

    Example: resilient status runs/mine --watch
    """
    clock, output = SystemClock(), output_of(ctx)
    while True:
        now_ms = round(datetime.fromisoformat(clock.now_iso()).timestamp() * 1000)
        records = records_of(run)
        kept = None if records else stored(run)
        now_ms = present_ms(records, clock, now_ms)
        found, is_gone = account(records), is_dead(records, now_ms)
        if not _is_over(found):
            found = account(records, now_ms, goes_on=not is_gone)
        if watch and output.format is Format.HUMAN and sys.stdout.isatty():
            clear_screen()
        said = standing(found, now_ms, is_dead=is_gone)
        told = standing_stored(kept, moment(now_ms)) if kept else said
        show(told, output)
        if not watch or _is_over(found) or (kept and not _keeps_events(run)):
            return
        clock.sleep(interval)


def records_of(run: Sequence[Path]) -> list[Record]:
    """Return the records of a run; none of a repository whose run kept no events.

    Raises:
        RepositoryNotFound: a folder holds no event file, and is no repository.
        OSError: a file cannot be read.
    """
    try:
        return read_records(run)
    except RepositoryNotFound:
        others = [one for one in run if store_of([one]) is None]
        if len(others) == len(run):
            raise
        return read_records(others)


def _keeps_events(run: Sequence[Path]) -> bool:
    """Say whether any of the folders holds event files.

    Of a run that keeps none nothing ever says that it has ended: who waits for that would wait for
    ever, so it is looked at once. An event file that is still empty will have more.
    """
    for one in run:
        with suppress(RepositoryNotFound):
            read_records([one])
            return True
    return False


def _is_over(found: Account) -> bool:
    return found.now.exit_code is not None or (found.now.is_done and not found.launches)
