"""``resilient ckpt scan``: whether a checkpoint can harm whoever loads it."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from resilient.layouts.scanning import Risk, scan
from resilient.storage.folder import open_folder
from resilient.world.launch import read_storage_options
from resilient_cli.places import output_of
from resilient_cli.progress import Progress
from resilient_cli.render import show
from resilient_cli.told import ToldFolder
from resilient_cli.views.scanning import scanned

HARM_FOUND = 1


def scan_(
    ctx: typer.Context,
    path: Annotated[str, typer.Argument(help="Path or URL of a folder, a checkpoint or a file.")],
) -> int:
    """Look for what could harm whoever loads a checkpoint of any tool; nothing in it is run.

    Pickles that call code, links and names that lead out of the folder, archives that swell,
    headers that lie, code that comes along. Exit code 1: there is a danger, or something that
    nobody can judge; notes alone are 0.

    Example: resilient ckpt scan downloads/model
    """
    with Progress("reading") as told:
        folder = ToldFolder(open_folder(path, read_storage_options(os.environ)), told)
        listing = folder.list()
        found = scan(folder, listing)
    show(scanned(folder.url, listing, found), output_of(ctx))
    return HARM_FOUND if any(one.risk is not Risk.NOTE for one in found) else 0
