"""Files that are being written, or that a killed writer left: how they are named and swept."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from resilient.showing import quoted
from resilient.storage.errnos import kind_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from resilient.clock import Clock

TEMPORARY = ".tmp-"
"""How the name of a file being written begins: outside the grammar of keys, so invisible."""


class SweepsTemporaries:
    """What a store in a folder does about temporary files that nobody will rename any more."""

    _root: Path
    url: str

    def sweep(
        self, is_ours: Callable[[str], bool], older_than_seconds: float, clock: Clock
    ) -> tuple[str, ...]:
        """Remove temporary files that killed writers left; ``is_ours`` is asked by their own keys.

        What they were for is not known any more, but the folder is. A folder that is left empty
        goes too.
        """

        def key_of(path: Path) -> str:
            return path.relative_to(self._root).as_posix()

        try:
            gone = sweep_temporaries(
                self._root, older_than_seconds, clock, lambda path: is_ours(key_of(path))
            )
        except OSError as error:
            raise kind_of(error)(
                f"cannot sweep {self.url}: {error.strerror or error}",
                hint=f"ls -ld {quoted(self._root)}",
            ) from error
        for folder in {path.parent for path in gone}:
            # Not emptied: the end of the way.
            with suppress(OSError):
                folder.rmdir()
        return tuple(map(key_of, gone))


def sweep_temporaries(
    root: Path,
    older_than_seconds: float,
    clock: Clock,
    is_wanted: Callable[[Path], bool] = lambda _: True,
) -> list[Path]:
    """Remove temporary files that nobody has written to for ``older_than_seconds``.

    A write in progress touches its file at each of its parts, so an hour is generous where its
    writer may live. Other names are not touched, and symbolic links are not followed. A store's
    own file that is removed by mistake makes one ``put`` fail; it damages no object.

    Args:
        root: the folder of the store.
        older_than_seconds: age by the file system's clock, so leave room for a skew.
        clock: whose wall clock is now.
        is_wanted: says of a temporary file whether it may go.

    Returns:
        The files that were removed.
    """
    oldest = datetime.fromisoformat(clock.now_iso()).timestamp() - older_than_seconds
    removed = []
    for folder, _, names in os.walk(root, followlinks=False):
        for name in names:
            path = Path(folder, name)
            if name.startswith(TEMPORARY) and is_wanted(path) and _is_stale(path, oldest):
                # Its writer may have been slower than we thought, and have finished just now.
                with suppress(FileNotFoundError):
                    path.unlink()
                    removed.append(path)
    return sorted(removed)


def _is_stale(path: Path, oldest: float) -> bool:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_mtime <= oldest
