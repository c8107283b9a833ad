"""``resilient ckpt diff``: differences and distances between two checkpoints."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path  # noqa: TC003 - Typer reads it when it runs
from typing import Annotated

import typer

from resilient.errors import UsageError
from resilient.redaction import shell_quote
from resilient_cli.output import Progress, show
from resilient_cli.repositories import Place, Repo, complete_ref, local_path, output_of
from resilient_cli.views.diff import render_diff

DIFFERENT = 1
_HELP = "A reference (`ckpt inspect --help` lists them), or the path or URL of a checkpoint."


def diff(  # noqa: PLR0913 - the options of a command
    ctx: typer.Context,
    a: Annotated[
        str,
        typer.Argument(metavar="A", help=_HELP, show_default=False, autocompletion=complete_ref),
    ],
    b: Annotated[
        str,
        typer.Argument(metavar="B", help=_HELP, show_default=False, autocompletion=complete_ref),
    ],
    place: Place = None,
    repo: Repo = None,
    *,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="GLOB",
            help="Compare only tensors whose name matches, as `model/*.bias`; may be repeated.",
        ),
    ] = None,
    lists_all: Annotated[
        bool, typer.Option("--all", help="List every tensor and field that differs.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="FILE", help="Write one self-contained HTML page to this file."
        ),
    ] = None,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit with 1 if anything differs.")
    ] = False,
) -> int:
    """Compare two checkpoints: across steps, runs, tools and world sizes.

    The answer covers configuration, software, trainer state, learning rates, random streams, data
    position, optimizer moments and every tensor. For a tensor, the answer shows the number of
    changed elements, the largest absolute distance, the relative distance (L2), the angle and the
    largest distance in ULP. Tensors are streamed, so memory does not grow with their size. Nothing
    is unpickled.

    A and B are checkpoints of a repository or of another tool (docs/layouts.md), local or at a URL.
    A reference can follow the repository after a slash: runs/gpt2/latest~2.

    --html writes a page with the same facts, a picture of all layers, and histograms of the tensors
    that differ most.

    Exit code 0. With --exit-code: 1 if the checkpoints differ or a part could not be compared.

    Example: resilient ckpt diff step:12000 latest s3://bucket/run

    Example: resilient ckpt diff out/checkpoint-500 runs/gpt2/step:500

    Example: resilient ckpt diff latest~1 latest runs/gpt2 --html diff.html
    """
    # Import late: NumPy takes longer to load than a whole `ckpt ls`.
    from resilient.diff.compare import compare
    from resilient_cli.foreign import open_view

    if html is not None:
        words = " ".join(shell_quote(word) for word in (a, b, place or repo) if word)
        html = local_path(html, "--html", f"resilient ckpt diff {words} --html diff.html")
    before, after = open_view(a, place, repo), open_view(b, place, repo)
    patterns = only or ["*"]
    with Progress("comparing") as progress:
        comparison = compare(
            before,
            after,
            is_selected=lambda name: any(fnmatchcase(name, pattern) for pattern in patterns),
            on_progress=progress,
        )
    if only and not comparison.tensors and not any(comparison.only):
        raise UsageError(
            f"no tensor of either checkpoint matches `{only[0][:80]}`",
            hint="resilient ckpt diff A B --json lists their names: model/h.0.weight",
        )
    if html is not None:
        from resilient_cli.page.diff_page import comparison_page
        from resilient_cli.page.page import write_page

        with Progress("drawing") as progress:
            page = comparison_page(comparison, progress)
        write_page(html, page)
    show(render_diff(comparison, lists_all=lists_all, page=str(html or "")), output_of(ctx))
    return DIFFERENT if exit_code and comparison.differs else 0
