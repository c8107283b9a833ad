"""A file that somebody makes: a script, a shared folder, a projected volume."""

from __future__ import annotations

import json
from pathlib import Path

from resilient.agent.notices.notice import Notice, SourceGarbled, SourceLost, notice_of

_BYTES_MAX = 1 << 16


class FileSource:
    """Looks whether a file is there.

    An empty file asks to stop now. ``{"reason": "...", "seconds": 90}`` counts from when the file
    was written, and ``{"at": "2026-11-22T18:00:00Z"}`` names the moment.

    Args:
        path: of the file.
    """

    every_seconds = 0.5

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    @property
    def name(self) -> str:
        """Which file this is."""
        return f"file {self._path}"

    def look(self) -> Notice | None:
        """Return what the file says, None if there is none.

        Raises:
            SourceLost: it cannot be read.
            SourceGarbled: it says something else, or is not written to its end yet.
        """
        try:
            with self._path.open("rb") as file:
                text = file.read(_BYTES_MAX)
            since_seconds = self._path.stat().st_mtime
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SourceLost(f"cannot read `{self._path}`: {error.strerror}") from error
        try:
            document = json.loads(text) if text.strip() else {}
        except (ValueError, RecursionError) as error:
            raise SourceGarbled(f"`{self._path}` is neither empty nor JSON") from error
        if not isinstance(document, dict):
            raise SourceGarbled(f"`{self._path}` is no JSON object")
        return notice_of(document, "file", since_seconds)

    def acknowledge(self) -> None:
        """Do nothing: the file is its owner's."""

    def close(self) -> None:
        """Hold nothing, so let go of nothing."""
