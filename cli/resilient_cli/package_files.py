"""Text files of the package: help texts, static files of the page, schemas and templates."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable


def read_text(path: str) -> str:
    """Read a file, for example ``page/static/page.css``. A caller needs it at most once.

    Raises:
        FileNotFoundError: The package has no such file.
    """
    return _at(path).read_text(encoding="utf-8")


def list_stems(folder: str, suffix: str) -> tuple[str, ...]:
    """Return the sorted names of the files with a suffix in a folder, without that suffix."""
    names = (file.name for file in _at(folder).iterdir())
    return tuple(sorted(name.removesuffix(suffix) for name in names if name.endswith(suffix)))


def _at(path: str) -> Traversable:
    return files(__package__).joinpath(*path.split("/"))
