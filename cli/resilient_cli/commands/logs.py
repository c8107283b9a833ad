"""``resilient logs``: output of the ranks of a run, by attempt."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from resilient.clock import SystemClock, parse_length
from resilient.elastic.worker_logs import LogReader, find_sources
from resilient.errors import RepositoryNotFound, UsageError
from resilient.redaction import escape_control_chars, redact_userinfo, shell_quote
from resilient_cli.output import Format, convert_write_errors, ignore_broken_pipe, put
from resilient_cli.repositories import output_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from resilient.elastic.worker_logs import LogRecord, LogSource
    from resilient_cli.output import Output


def line_of(record: LogRecord, form: Format, *, is_named: bool, is_safe: bool) -> str:
    """Return one line of the answer, without its line end.

    User names and passwords in URLs are removed.

    Args:
        record: Line that a rank printed.
        form: Output format: text for people, columns for tools, an object for programs.
        is_named: Put attempt and rank in front of the text for people.
        is_safe: Escape control characters, because the output is a terminal.
    """
    source, line = record.source, record.line
    text = redact_userinfo(line.text)
    if form is Format.JSON:
        return json.dumps(
            {
                "schema": "resilient/logs@1",
                "type": "line",
                "life": source.life,
                "attempt": source.attempt,
                "rank": source.rank,
                "stream": line.stream,
                "at": line.at or None,
                "text": text,
            }
        )
    if is_safe:
        text = harmless(text)
    if form is Format.PLAIN:
        return f"{source.life}\t{source.rank}\t{line.stream}\t{line.at}\t{text}"
    return f"attempt {source.life} rank {source.rank} | {text}" if is_named else text


def harmless(text: str) -> str:
    """Escape control characters, so that a terminal shows them and does not execute them."""
    return escape_control_chars(text.expandtabs(8), "")


Run = Annotated[
    Path | None,
    typer.Argument(
        metavar="[RUN]",
        help="Folder of `resilient train --log-dir`, or the output folder with a logs folder.",
        envvar="RESILIENT_REPO",
        show_default=False,
    ),
]
Rank = Annotated[int | None, typer.Option(help="Only this rank.", min=0)]
Attempt = Annotated[
    int | None, typer.Option(help="Only this attempt: 1 is the first, -1 the newest.")
]
Since = Annotated[
    str,
    typer.Option(help="Only lines after this time: 30s, 10m, 2h, 1d, or 2026-11-20T10:00 (UTC)."),
]
Tail = Annotated[int | None, typer.Option(help="Only the last N chosen lines.", min=0)]
Follow = Annotated[
    bool, typer.Option("-f", "--follow", help="Follow new lines, also of later attempts.")
]

_POLL_SECONDS = 0.2


def logs(  # noqa: PLR0913 - the options of a command
    ctx: typer.Context,
    run: Run = None,
    *,
    rank: Rank = None,
    attempt: Attempt = None,
    since: Since = "",
    tail: Tail = None,
    follow: Follow = False,
) -> None:
    """Show the output of the ranks of a run: attempt by attempt, the ranks of each sorted by time.

    The run must have been started with `resilient train --log-dir FOLDER`. If several attempts or
    ranks are shown, each line names its attempt and rank. --follow waits for the next attempt when
    one has ended; Ctrl-C stops it.

    Example: resilient logs runs/mine --attempt -1 --rank 0 --tail 50
    """
    if run is None:
        raise UsageError("no run was named", hint="resilient logs RUN, or set RESILIENT_REPO")
    output, clock = output_of(ctx), SystemClock()
    reader = LogReader(tail, _since(since, clock.now_iso()) if since else "")
    sources = find_sources(run)
    selected_sources = _select_sources(sources, rank, attempt)
    if not selected_sources:
        raise _no_lines_error(run, sources, rank, attempt)
    is_named = follow or len({(record.life, record.rank) for record in selected_sources}) > 1
    write = _writer(output, is_named=is_named and None in (rank, attempt))
    try:
        write(reader.read(selected_sources))
        while follow:
            clock.sleep(_POLL_SECONDS)
            write(reader.read_on(_select_sources(find_sources(run), rank, attempt)))
    except BrokenPipeError:
        ignore_broken_pipe()


def _select_sources(
    sources: Sequence[LogSource], rank: int | None, attempt: int | None
) -> list[LogSource]:
    newest = max((source.life for source in sources), default=0)
    number = newest + 1 + attempt if attempt is not None and attempt < 0 else attempt
    return [
        source
        for source in sources
        if rank in (None, source.rank) and number in (None, source.life)
    ]


def _writer(output: Output, *, is_named: bool) -> Callable[[Iterable[LogRecord]], None]:
    is_safe, encoding = sys.stdout.isatty(), sys.stdout.encoding or "utf-8"

    def write(records: Iterable[LogRecord]) -> None:
        with convert_write_errors():
            for record in records:
                text = line_of(record, output.format, is_named=is_named, is_safe=is_safe)
                # Replace letters that the locale cannot encode.
                text = text.encode(encoding, "replace").decode(encoding) + "\n"
                # Without a terminal, write exactly the characters that the rank printed.
                put(text, sys.stdout) if is_safe else sys.stdout.write(text)
            sys.stdout.flush()

    return write


def _since(text: str, now: str) -> str:
    """Return a time in the format of the log files.

    Raises:
        UsageError: The text is neither a length nor a time.
    """
    age_seconds = parse_length(text)
    try:
        if age_seconds is not None:
            moment = datetime.fromisoformat(now) - timedelta(seconds=age_seconds)
        else:
            moment = datetime.fromisoformat(text)
            moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        moment = moment.astimezone(UTC)
    except (ValueError, OverflowError):
        raise UsageError(
            f"--since {text!r} is neither a duration such as 10m, nor a time such as "
            "2026-11-20T10:00",
            hint="resilient logs --help",
        ) from None
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _no_lines_error(
    run: Path, sources: Sequence[LogSource], rank: int | None, attempt: int | None
) -> RepositoryNotFound:
    if not sources:
        return RepositoryNotFound(
            f"no output of ranks in `{run}` or `{run / 'logs'}`: a run keeps it only with "
            "--log-dir",
            hint=f"resilient train --log-dir {shell_quote(run / 'logs')} SCRIPT",
        )
    attempts, ranks = {source.life for source in sources}, {source.rank for source in sources}
    criteria = [f"attempt {attempt}"] * (attempt is not None) + [f"rank {rank}"] * (
        rank is not None
    )
    return RepositoryNotFound(
        f"`{run}` has nothing of {', '.join(criteria)}: it has attempts 1 to {max(attempts)}, "
        f"ranks {min(ranks)} to {max(ranks)}",
        hint=f"resilient logs {shell_quote(run)}",
    )
