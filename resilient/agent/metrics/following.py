"""Event files while they grow: what is new in them, so much at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.accounting.records import AGENT_FILE, parse_line
from resilient.storage.folder import open_inside

if TYPE_CHECKING:
    from pathlib import Path

    from resilient.accounting.records import Record

CHUNK_BYTES = 1 << 20
"""Read of a file at once; the rest the next time."""
FILES_MAX = 16
"""Ranks whose files are followed, the lowest first: they tell what concerns all."""


class Following:
    """Follows the event files of one folder; one thread.

    Args:
        folder: that may not be there yet.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}

    def read(self) -> list[Record]:
        """Return what was told since the last time, as far as it was written whole.

        Raises:
            OSError: a file that is there cannot be read.
            StoreDenied: a file leads out of the folder, or is no plain file.
        """
        return [record for path in self._files() for record in self._read(path)]

    def _files(self) -> list[Path]:
        ranks = {}
        for path in self._folder.glob("rank-*.jsonl"):
            number = path.stem.removeprefix("rank-")
            if number.isdecimal():
                ranks[int(number)] = path
        agent = self._folder / AGENT_FILE
        found = [agent] if agent.exists() else []
        return [*found, *(ranks[one] for one in sorted(ranks)[:FILES_MAX])]

    def _read(self, path: Path) -> list[Record]:
        offset = self._offsets.get(path, 0)
        with open_inside(self._folder, path) as file:
            if file.seek(0, 2) < offset:
                offset = 0  # another file by that name
            file.seek(offset)
            data = file.read(CHUNK_BYTES)
        whole = data.rfind(b"\n") + 1
        if not whole and len(data) == CHUNK_BYTES:
            whole = len(data)  # no event is that long
        self._offsets[path] = offset + whole
        lines = data[:whole].decode("utf-8", errors="replace").splitlines()
        found = (parse_line(line, path.name) for line in lines)
        return [one for one in found if one is not None]
