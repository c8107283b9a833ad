"""``resilient report`` and ``resilient status``: time use and current state of a run."""

from __future__ import annotations

import shlex
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from resilient.checkpoint.catalog import committed, read_manifest
from resilient.checkpoint.refs import resolve
from resilient.clock import SystemClock
from resilient.errors import RepositoryNotFound, UsageError
from resilient.goodput.event_log import present_ms, read_records
from resilient.goodput.report import SILENT_MS, build_report
from resilient.redaction import shell_quote
from resilient_cli.commands.ls import list_first_repository, store_of
from resilient_cli.liveness import is_dead
from resilient_cli.output import CommandResult, Format, KeyValues, Progress, clear_screen, show
from resilient_cli.page.checkpoints import verification_html
from resilient_cli.page.page import Extras, page_of, write_page
from resilient_cli.repositories import local_path, output_of
from resilient_cli.survey import VerifyLevel, examine
from resilient_cli.views.goodput import (
    build_report_result,
    build_stored_report_result,
    build_stored_status_result,
    moment,
)
from resilient_cli.views.text import NONE, count, duration, share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.diff.model import CheckpointView
    from resilient.goodput.event_log import EventRecord
    from resilient.goodput.report import GoodputReport
    from resilient.storage.store import Store

_SILENT, _DEAD = "silent", "dead"
_MEANING = {_DEAD: " (its launcher died; the same command resumes)"}


def build_status_result(
    goodput: GoodputReport, now_ms: int, *, is_dead: bool = False
) -> CommandResult:
    """Build the answer of ``status``.

    Args:
        goodput: Goodput report of the run.
        now_ms: Current time in milliseconds since 1970.
        is_dead: True if the agent of the run is known to have died.
    """
    progress, last_save = goodput.now, goodput.saved[-1] if goodput.saved else None
    steps_left = max(0, progress.max_steps - progress.step)
    left_ms = 1000 * steps_left / progress.steps_per_second if progress.steps_per_second else None
    state = _state(goodput, now_ms, is_dead=is_dead)
    is_progressing = progress.exit_code is None and state not in (_SILENT, _DEAD)
    document = {
        "state": state,
        "exit_code": progress.exit_code,
        "step": progress.step,
        "max_steps": progress.max_steps,
        "steps_per_second": progress.steps_per_second,
        "left_ms": left_ms,
        "told": moment(progress.told_ms),
        "lives": len(goodput.doings),
        "ranks": _ranks(goodput),
        "faults": {cause: repair.count for cause, repair in goodput.repairs.items()},
        "lost_steps": goodput.lost_steps,
        "checkpoint": last_save.checkpoint if last_save else None,
        "committed": moment(last_save.at_ms) if last_save else None,
        "risk_steps": goodput.risk_steps,
        "wall_ms": goodput.wall_ms,
        "goodput": goodput.goodput,
    }
    total = (
        f" of {progress.max_steps} ({share(progress.step, progress.max_steps)})"
        if progress.max_steps
        else ""
    )
    speed = f", {progress.steps_per_second:.3g} steps/s" if progress.steps_per_second else ""
    eta = f", {duration(left_ms)} left" if steps_left and left_ms and is_progressing else ""
    causes = ", ".join(f"{cause} {repair.count}" for cause, repair in goodput.repairs.items())
    ranks = f", {count(_ranks(goodput), 'rank')}" if _ranks(goodput) else ""
    durable = (
        f"{last_save.checkpoint}, {duration(now_ms - last_save.at_ms)} ago; "
        f"{count(goodput.risk_steps, 'step')} at risk"
        if last_save
        else f"nothing yet; {count(goodput.risk_steps, 'step')} at risk"
    )
    pairs = (
        ("state", f"{state}{_MEANING.get(state, '')}"),
        ("step", f"{progress.step}{total}{speed}{eta}"),
        ("attempt", f"{len(goodput.doings)}{ranks}"),
        ("faults", f"{causes or NONE}; {count(goodput.lost_steps, 'step')} lost"),
        ("durable", durable),
        ("goodput", f"{share(goodput.goodput, 1)} of {duration(goodput.wall_ms)}"),
        ("last event", f"{duration(max(0, now_ms - progress.told_ms))} ago"),
    )
    return CommandResult("status", "status", document, (KeyValues(pairs),), (str(progress.step),))


def _ranks(goodput: GoodputReport) -> int:
    """Return the number of ranks of the newest attempt; 0 if unknown."""
    return goodput.doings[-1].life.world_size if goodput.doings else 0


def _state(goodput: GoodputReport, now_ms: int, *, is_dead: bool) -> str:
    progress = goodput.now
    if progress.exit_code is not None:
        return "done" if progress.exit_code == 0 else f"left with exit code {progress.exit_code}"
    if progress.is_done and not goodput.launches:
        return "done"
    if is_dead:
        return _DEAD
    if now_ms - progress.told_ms > SILENT_MS:
        return _SILENT
    return goodput.intervals[-1].spent.value if goodput.intervals else "starting"


Run = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN...",
        help="Folder of event files, or the output folder of the run; several for several hosts.",
    ),
]
Page = Annotated[
    Path | None,
    typer.Option("-o", "--output", help="Write one self-contained HTML page to this file."),
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
Watch = Annotated[bool, typer.Option("-w", "--watch", help="Repeat until the run ends.")]
Interval = Annotated[float, typer.Option(help="Seconds between two refreshes of --watch.", min=0.1)]


def report(
    ctx: typer.Context,
    run: Run,
    *,
    output: Page = None,
    tensors: Tensors = None,
    compare: Compare = None,
    verify: Verify = False,
) -> None:
    """Show where the wall-clock time of a run went: each second belongs to exactly one class.

    Goodput is the share of training time whose steps are part of the result. The command reads the
    event files of all attempts; the run may still be active. Without event files, the report shows
    the contents of the repository.

    The page of -o also shows the checkpoints if RUN is the repository. Parts that are slow to read
    need an option; `resilient ui` reads them on demand.

    Example: resilient report runs/mine -o run.html

    Example: resilient report runs/mine -o run.html --verify --compare latest~1 latest
    """
    if output is None and (tensors or compare or verify):
        raise UsageError(
            "`--tensors`, `--compare` and `--verify` need an HTML page",
            hint="resilient report RUN -o run.html --verify",
        )
    if output is not None:
        output = local_path(
            output, "-o", f"resilient report {shlex.join(map(str, run))} -o run.html"
        )
    goodput, repository = build_report(records_of(run)), list_first_repository(run)
    if output is not None:
        # Only a page needs the extras, which load NumPy if they read tensors.
        extras = extras_of(run, tensors, compare, verify=verify)
        write_page(output, page_of(goodput, str(run[0]), repository, extras=extras))
    page = str(output) if output else ""
    has_events = bool(goodput.doings or goodput.launches)
    result = (
        build_stored_report_result(repository, page)
        if repository and not has_events
        else build_report_result(goodput, page)
    )
    show(result, output_of(ctx))


def status(ctx: typer.Context, run: Run, *, watch: Watch = False, interval: Interval = 2.0) -> None:
    """Show the state of a run: its step, its speed, what is durable, what would be lost now.

    Without event files the end of a run cannot be detected, so --watch shows the state once.

    Example: resilient status runs/mine --watch
    """
    clock, output = SystemClock(), output_of(ctx)
    while True:
        now_ms = round(datetime.fromisoformat(clock.now_iso()).timestamp() * 1000)
        records = records_of(run)
        repository = None if records else list_first_repository(run)
        now_ms = present_ms(records, clock, now_ms)
        goodput, has_died = build_report(records), is_dead(records, now_ms)
        if not _is_over(goodput):
            goodput = build_report(records, now_ms, goes_on=not has_died)
        if watch and output.format is Format.HUMAN and sys.stdout.isatty():
            clear_screen()
        progress = build_status_result(goodput, now_ms, is_dead=has_died)
        result = build_stored_status_result(repository, moment(now_ms)) if repository else progress
        show(result, output)
        if not watch or _is_over(goodput) or (repository and not _keeps_events(run)):
            return
        clock.sleep(interval)


def records_of(run: Sequence[Path]) -> list[EventRecord]:
    """Return the event records of a run; none for a repository whose run kept no events.

    Raises:
        RepositoryNotFound: A folder has no event file, and is not a repository.
        OSError: A file cannot be read.
    """
    try:
        return read_records(run)
    except RepositoryNotFound:
        event_sources = [source for source in run if store_of([source]) is None]
        if len(event_sources) == len(run):
            raise
        return read_records(event_sources)


def _keeps_events(run: Sequence[Path]) -> bool:
    """Return True if any of the folders has event files.

    Without events, the end of a run is never recorded, and ``--watch`` would wait forever. So
    ``--watch`` shows such a run once. An empty event file counts, because records will follow.
    """
    for source in run:
        with suppress(RepositoryNotFound):
            read_records([source])
            return True
    return False


def _is_over(goodput: GoodputReport) -> bool:
    return goodput.now.exit_code is not None or (goodput.now.is_done and not goodput.launches)


def extras_of(
    run: Sequence[Path],
    tensors: str | None,
    pair: tuple[str, str] | None,
    *,
    verify: bool,
) -> Extras:
    """Build the requested extra parts of a page; read nothing if none was requested.

    Args:
        run: Folders of the run.
        tensors: Reference of the checkpoint whose tensors are drawn.
        pair: References of two checkpoints to compare.
        verify: Read and verify all bytes.

    Raises:
        RepositoryNotFound: No folder is a repository.
        ResilientError: A reference names no checkpoint, or the checkpoint could not be read.
    """
    if not (tensors or pair or verify):
        return Extras()
    store = store_of(run)
    if store is None:
        raise RepositoryNotFound(
            f"no checkpoints in `{run[0]}`; give a run's output folder",
            hint=f"resilient ckpt ls {shell_quote(run[0])}",
        )
    state_by_checkpoint, text = _verify_all(store) if verify else ({}, "")
    return Extras(
        _tensors(_side(store, tensors)) if tensors else "",
        _comparison_html(_side(store, pair[0]), _side(store, pair[1])) if pair else "",
        state_by_checkpoint,
        text,
    )


def _side(store: Store, ref: str) -> CheckpointView:
    from resilient.diff.native import open_native

    return open_native(store, read_manifest(store, resolve(store, ref)))


def _tensors(side: CheckpointView) -> str:
    from resilient_cli.page.tensors import pictures_of, tensors

    with Progress("drawing") as progress:
        return tensors(side, pictures_of(side, progress))


def _comparison_html(before: CheckpointView, after: CheckpointView) -> str:
    from resilient.diff.compare import compare
    from resilient_cli.page.diff_page import comparison
    from resilient_cli.page.tensors import pair_pictures

    with Progress("comparing") as progress:
        result = compare(before, after, on_progress=progress)
    with Progress("drawing") as progress:
        return comparison(result, pair_pictures(result, progress))


def _verify_all(store: Store) -> tuple[dict[str, str], str]:
    """Verify all checkpoints; return a state for each, and all findings, as HTML."""
    cells: dict[str, str] = {}
    texts: list[str] = []
    checkpoints = committed(store)
    with Progress("verifying") as progress:
        for nth, checkpoint in enumerate(checkpoints, 1):
            survey = examine(store, checkpoint, VerifyLevel.DEEP)
            state = "damaged" if survey.damaged else "warning" if survey.findings else "ok"
            cells[checkpoint.folder] = f'<span class="s-{state}">{survey.state}</span>'
            if survey.findings:
                texts.append(verification_html(survey, VerifyLevel.DEEP))
            progress(nth, len(checkpoints))
    return cells, "<h3>What is wrong</h3>" + "".join(texts) if texts else ""
