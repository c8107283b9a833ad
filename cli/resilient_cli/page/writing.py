"""Writes a page into a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.errors import StoreError
from resilient.showing import quoted

if TYPE_CHECKING:
    from pathlib import Path


def write_page(path: Path, text: str) -> None:
    """Write a page.

    Raises:
        StoreError: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreError(
            f"cannot write `{path}`: {error.strerror}", hint=f"ls -ld {quoted(path.parent)}"
        ) from error
