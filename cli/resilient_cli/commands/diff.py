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
            help="Compare only tensors with such a name, as `model/*.bias`; may be repeated.",
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="List every tensor and field that differs.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write one self-contained HTML page here."),
    ] = None,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit with 1 if anything differs.")
    ] = False,
) -> int:
    """Say what is different in two checkpoints: across steps, runs, tools and world sizes.

    Configuration, software, the trainer's state, learning rates, random streams, the place in the
    data, the optimizer's moments, and every tensor: how many elements changed, the largest
    distance, the relative one (L2), the angle, the largest in representable numbers (ULP). Tensors
    are streamed: memory does not grow with their size. Nothing is unpickled.

    Each of A and B is a checkpoint of a repository, or of another tool (docs/layouts.md), here or
    at a URL. A repository's reference may stand behind a slash: runs/gpt2/latest~2.

    --html writes a page with the same, a picture of all layers, and of the tensors that differ
    most how their numbers are spread.

    Exit code 0; with --exit-code 1 if they differ, or it could not be seen that they do not.

    Example: resilient ckpt diff step:12000 latest s3://bucket/run

    Example: resilient ckpt diff out/checkpoint-500 runs/gpt2/step:500

    Example: resilient ckpt diff latest~1 latest runs/gpt2 --html diff.html
    """
    # Import late: NumPy takes longer to load than a whole `ckpt ls`.
    from resilient.diff.compare import compare
    from resilient_cli.foreign import open_view

    if html is not None:
        words = " ".join(shell_quote(one) for one in (a, b, place or repo) if one)
        html = local_path(html, "--html", f"resilient ckpt diff {words} --html diff.html")
    before, after = open_view(a, place, repo), open_view(b, place, repo)
    patterns = only or ["*"]
    with Progress("comparing") as told:
        found = compare(
            before,
            after,
            wanted=lambda name: any(fnmatchcase(name, one) for one in patterns),
            on_progress=told,
        )
    if only and not found.tensors and not any(found.only):
        raise UsageError(
            f"no tensor of either checkpoint is called `{only[0][:80]}`",
            hint="resilient ckpt diff A B --json lists their names: model/h.0.weight",
        )
    if html is not None:
        from resilient_cli.page.diff_page import comparison_page
        from resilient_cli.page.page import write_page

        with Progress("drawing") as told:
            page = comparison_page(found, told)
        write_page(html, page)
    show(render_diff(found, every=every, page=str(html or "")), output_of(ctx))
    return DIFFERENT if exit_code and found.differs else 0
