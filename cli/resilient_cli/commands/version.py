"""``resilient version``: versions of the installed software, read without an import."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

import typer  # noqa: TC002 - Typer reads the annotations when it runs

import resilient
from resilient_cli.output import CommandResult, KeyValues, show


def version(ctx: typer.Context) -> None:
    """Show the versions of the installed software."""
    versions = {
        "resilient": resilient.__version__,
        "python": platform.python_version(),
        "torch": _installed_version("torch"),
    }
    facts = KeyValues(tuple((name, value or "not installed") for name, value in versions.items()))
    answer = CommandResult("version", "version", versions, (facts,), ids=(resilient.__version__,))
    show(answer, ctx.find_root().obj)


def _installed_version(distribution: str) -> str | None:
    """Return a version from the package metadata, because importing torch takes seconds."""
    try:
        return installed_version(distribution)
    except PackageNotFoundError:
        return None
