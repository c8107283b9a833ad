"""``resilient ckpt scan``: security risks of loading a checkpoint."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from resilient.distributed.launch_env import read_storage_options
from resilient.layouts.security_scan import Risk, scan
from resilient.storage.folder import open_folder
from resilient_cli.output import CommandResult, Progress, Table, show
from resilient_cli.repositories import output_of
from resilient_cli.store_wrappers import ProgressFolder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.layouts.security_scan import ScanFinding
    from resilient.storage.folder import DirectoryListing


def build_scan_result(
    url: str, listing: DirectoryListing, findings: Sequence[ScanFinding]
) -> CommandResult:
    """Build the answer of ``ckpt scan``: the findings, and advice for or against loading."""
    counts = {risk.value: sum(finding.risk is risk for finding in findings) for risk in Risk}
    files = len(listing.sizes) + len(listing.outside)
    document = {
        "url": url,
        "files": files,
        "counts": counts,
        "safe": not counts[Risk.DANGER] and not counts[Risk.WARNING],
        "findings": [asdict(finding) for finding in findings],
    }
    rows = tuple(
        (finding.risk.value, finding.file or ".", finding.what, finding.consequence)
        for finding in findings
    )
    table = Table(("RISK", "FILE", "WHAT", "CONSEQUENCE"), rows)
    ids = tuple(
        dict.fromkeys(finding.file for finding in findings if finding.risk is not Risk.NOTE)
    )
    return CommandResult("ckpt.scan", "scan", document, (table, _verdict(files, counts)), ids)


def _verdict(files: int, counts: dict[str, int]) -> str:
    text = f"{files} file{'s' * (files != 1)} scanned, none of them executed."
    if counts[Risk.DANGER]:
        return f"{text} Do not load it: {counts[Risk.DANGER]} can harm you."
    if counts[Risk.WARNING]:
        return f"{text} Load it only if you trust its author."
    return f"{text} No danger was found."


HARM_FOUND = 1


def scan_(
    ctx: typer.Context,
    path: Annotated[str, typer.Argument(help="Path or URL of a folder, a checkpoint or a file.")],
) -> int:
    """Search a checkpoint of any tool for content that could harm its reader; nothing is executed.

    The command finds pickles that call code, links and names that lead out of the folder, archives
    that expand too much, false headers and bundled code. Exit code 1: a danger, or content that
    cannot be judged. 0: no danger, or only notes.

    Example: resilient ckpt scan downloads/model
    """
    with Progress("reading") as progress:
        folder = ProgressFolder(open_folder(path, read_storage_options(os.environ)), progress)
        listing = folder.list()
        findings = scan(folder, listing)
    show(build_scan_result(folder.url, listing, findings), output_of(ctx))
    return HARM_FOUND if any(finding.risk is not Risk.NOTE for finding in findings) else 0
