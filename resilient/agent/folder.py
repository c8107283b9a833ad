"""The folder that an agent shares with its workers, and those that killed agents left."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from resilient.storage.shared import lock_folder

_PREFIX = "resilient-agent-"
_MARK = "locked"


class OwnFolder:
    """A folder that is an agent's as long as that lives.

    Args:
        path: of :func:`make_folder`; empty to make one.
    """

    def __init__(self, path: str = "") -> None:
        self.path = Path(path) if path else make_folder()
        self._lock = lock_folder(self.path)
        if self._lock is not None:
            (self.path / _MARK).touch()

    def remove(self) -> None:
        """Let it go with all that is in it; there may be nothing any more."""
        shutil.rmtree(self.path, ignore_errors=True)
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def make_folder() -> Path:
    """Return a new folder for an agent, and remove those whose agents are dead.

    An agent locks its folder and then says so in it. One that does not say so stays: it may be of
    an agent that begins at this moment, or of a release that locks none.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if _is_own(path):
            _remove_if_left(path)
    return Path(tempfile.mkdtemp(prefix=_PREFIX))


def _is_own(path: Path) -> bool:
    try:
        return (
            not path.is_symlink() and path.stat().st_uid == os.geteuid() and (path / _MARK).exists()
        )
    except OSError:
        # Gone by now.
        return False


def _remove_if_left(path: Path) -> None:
    lock = lock_folder(path)
    if lock is not None:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)
