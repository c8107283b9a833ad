"""``resilient ui``: HTML page of ``resilient report``, served during the run."""

from __future__ import annotations

import hashlib
import sys
import threading
import webbrowser
from itertools import chain
from typing import TYPE_CHECKING, Annotated

import typer

from resilient.clock import SystemClock
from resilient.errors import ResilientError
from resilient.format.keys import GENERATIONS, TAGS
from resilient.goodput.report import build_report
from resilient_cli.commands.ls import list_first_repository, store_of
from resilient_cli.commands.report import Run, records_of
from resilient_cli.output import CommandResult, Format, Output, show
from resilient_cli.page.lazy_parts import LazyParts
from resilient_cli.page.page import page_of
from resilient_cli.page.server import PageServer
from resilient_cli.repositories import output_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from resilient.clock import Clock

Port = Annotated[int, typer.Option(help="Port; 0 lets the system choose.", min=0, max=65535)]
Browser = Annotated[
    bool, typer.Option("--browser/--no-browser", help="Open the page, if this is a terminal.")
]

_SOURCE_FILES = ("*.jsonl", "events/*.jsonl", "checkpoint-*/*", f"{GENERATIONS}*", f"{TAGS}*")
_BETWEEN_SECONDS = 0.5
_SHARE = 5
"""Ratio of the pause between two renewals to the duration of one renewal."""


def ui(ctx: typer.Context, run: Run, *, port: Port = 0, browser: Browser = True) -> None:
    """Serve the page of `resilient report` on this machine; it updates while the run is active.

    The server listens on 127.0.0.1 only, and answers only requests with the printed address. The
    page is read-only. Ctrl-C ends the server, with 130.

    Example: resilient ui runs/mine
    """
    output = output_of(ctx)
    page = RunPage(run, SystemClock())
    try:
        with PageServer(port, page) as server:
            show(_build_serving_result(server.url, str(run[0])), output)
            if browser and _is_interactive(output):
                webbrowser.open(server.url)
            server.serve_until_interrupted()
    finally:
        page.close()


class RunPage:
    """Page of a run, rebuilt when its files change. Thread-safe.

    Args:
        run: Folders of the run; the first is the title.
        clock: Clock for the pauses.

    Raises:
        RepositoryNotFound: A folder has no event file, and is not a repository.
    """

    def __init__(self, run: Sequence[Path], clock: Clock) -> None:
        self._run = run
        self._clock = clock
        self._lock = threading.Lock()
        self._version = version_of(run)
        self._next_seconds = 0.0
        self._parts = LazyParts(lambda: store_of(run), clock)
        self._text = self._render()

    def version(self) -> str:
        """Return the newest version of the page."""
        with self._lock:
            self._renew()
            return self._version

    def text(self) -> str:
        """Return the newest page."""
        with self._lock:
            self._renew()
            return self._text

    def part(self, name: str, query: Mapping[str, str]) -> tuple[int, str] | None:
        """Return the status and HTML of a part that is made on demand."""
        return self._parts.part(name, query)

    def close(self) -> None:
        """Stop making parts."""
        self._parts.close()

    def _renew(self) -> None:
        began_seconds = self._clock.monotonic_seconds()
        if began_seconds < self._next_seconds:
            return
        version = version_of(self._run)
        if version != self._version:
            previous_version, self._version = self._version, version
            try:
                self._text = self._render()
            except (ResilientError, OSError):
                # The files are being moved. Keep the last page, which was correct at its time.
                self._version = previous_version
        now_seconds = self._clock.monotonic_seconds()
        pause_seconds = max(_BETWEEN_SECONDS, _SHARE * (now_seconds - began_seconds))
        self._next_seconds = now_seconds + pause_seconds

    def _render(self) -> str:
        goodput = build_report(records_of(self._run))
        return page_of(goodput, str(self._run[0]), list_first_repository(self._run), self._version)


def version_of(run: Sequence[Path]) -> str:
    """Return a word that changes when event files or checkpoints of a run change."""
    stats = "\n".join(f"{path} {size} {at}" for path, size, at in sorted(_stats(run)))
    return hashlib.sha256(stats.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _stats(run: Sequence[Path]) -> Iterator[tuple[str, int, int]]:
    for folder in run:
        for path in chain.from_iterable(map(folder.glob, _SOURCE_FILES)):
            try:
                status = path.stat()
            except OSError:
                continue  # The file was deleted meanwhile.
            yield str(path), status.st_size, status.st_mtime_ns


def _is_interactive(output: Output) -> bool:
    is_for_people = output.format is Format.HUMAN and not output.quiet
    return is_for_people and sys.stdout.isatty() and sys.stderr.isatty()


def _build_serving_result(url: str, name: str) -> CommandResult:
    lines = (
        f"{name}: {url}",
        "Anyone with this address can read the page. Ctrl-C ends the server.",
    )
    return CommandResult("ui", "serving", {"url": url, "run": name}, lines, ids=(url,))
