"""Agent's folder and its event file.

The folder that an agent shares with its workers, and those that killed agents left.

The agent's events as a file beside those of its ranks, which know where only once they run.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.distributed.launch_env import read_published_event_file
from resilient.events import json_lines
from resilient.goodput.event_log import AGENT_FILE
from resilient.storage.shared_memory import lock_folder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.events import Event

_PREFIX = "resilient-agent-"
_MARK = "locked"


class AgentDirectory:
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


HELD_MAX = 1000
"""Events that wait; a rank that says nothing for longer keeps none of its own either."""


class EventFile:
    """A sink that holds events until a worker has said where it keeps its own. Any thread.

    Nothing is written when none does: a script without our trainer, and without a repository on
    this host. Agents of several hosts, and one after the other, may share the file.

    Args:
        folder: of the file, empty to ask the workers.
    """

    def __init__(self, folder: str) -> None:
        self._held: deque[tuple[Mapping[str, Any], Event]] = deque(maxlen=HELD_MAX)
        self._sink = json_lines(Path(folder) / AGENT_FILE) if folder else None
        self._notes = ""
        self._lock = threading.Lock()

    def __call__(self, record: Mapping[str, Any], event: Event) -> None:
        """Write an event after those that came before it, or hold it."""
        with self._lock:
            self._held.append((record, event))
            self._write()

    def beat(self, notes: Path) -> None:
        """Look whether a worker left word in the agent's folder."""
        with self._lock:
            self._notes = str(notes)
            self._write()

    def _write(self) -> None:
        if not self._held:
            return
        if self._sink is None:
            folder = read_published_event_file(self._notes)
            if folder is None:
                return
            self._sink = json_lines(folder / AGENT_FILE)
        while self._held:
            self._sink(*self._held.popleft())
