"""A file for node_exporter's textfile collector, replaced as a whole."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def write_textfile(path: Path, text: str) -> None:
    """Replace ``path`` so that a reader sees the old text or the new one, never a part.

    It is not forced to the disk: after a crash of the machine nobody needs old figures. If this
    process dies inside, a hidden file stays that the collector does not read and the next process
    of this id replaces.

    Raises:
        OSError: it cannot be written; the old text stands.
    """
    # The collector reads what ends in .prom.
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        fresh.write_text(text, encoding="utf-8")
        # Whoever collects it is another user, most often.
        fresh.chmod(0o644)
        fresh.replace(path)
    except OSError:
        with suppress(OSError):
            fresh.unlink()
        raise
