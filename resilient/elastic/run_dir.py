"""Directory that an agent shares with its workers, and the buffered file of the agent's events.

A new agent removes the directories of killed agents. The agent's events are stored beside the
ranks' events. The folder of the ranks' events is known only after the ranks have started. Until
then, the agent buffers its events.
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
_LOCKED_MARKER = "locked"


class AgentDirectory:
    """Directory owned by an agent during its lifetime.

    Args:
        path: Result of :func:`make_folder`; empty to create one.
    """

    def __init__(self, path: str = "") -> None:
        self.path = Path(path) if path else make_folder()
        self._lock = lock_folder(self.path)
        if self._lock is not None:
            (self.path / _LOCKED_MARKER).touch()

    def remove(self) -> None:
        """Delete the directory with its content; it may already be gone."""
        shutil.rmtree(self.path, ignore_errors=True)
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def make_folder() -> Path:
    """Create a directory for an agent, and delete those of dead agents.

    An agent locks its directory and then marks it as locked. A directory without the mark is not
    deleted, because its agent may be starting now, or belong to a release without locks.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if _is_own(path):
            _remove_if_unlocked(path)
    return Path(tempfile.mkdtemp(prefix=_PREFIX))


def _is_own(path: Path) -> bool:
    try:
        return (
            not path.is_symlink()
            and path.stat().st_uid == os.geteuid()
            and (path / _LOCKED_MARKER).exists()
        )
    except OSError:
        # The directory is already gone.
        return False


def _remove_if_unlocked(path: Path) -> None:
    lock = lock_folder(path)
    if lock is not None:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


PENDING_EVENTS_MAX = 1000
"""Largest number of buffered events; the oldest events are dropped."""


class EventFile:
    """Event sink that buffers until a worker has published its event folder. Any thread.

    Nothing is written if no worker publishes a folder. An example is a script that uses neither
    `resilient.Trainer` nor a repository on this host. Agents of several hosts, and successive
    agents, may share the file.

    Args:
        folder: Folder of the file; empty to take it from the workers.
    """

    def __init__(self, folder: str) -> None:
        self._pending_events: deque[tuple[Mapping[str, Any], Event]] = deque(
            maxlen=PENDING_EVENTS_MAX
        )
        self._sink = json_lines(Path(folder) / AGENT_FILE) if folder else None
        self._agent_folder = ""
        self._lock = threading.Lock()

    def __call__(self, record: Mapping[str, Any], event: Event) -> None:
        """Write an event after the earlier ones, or buffer it."""
        with self._lock:
            self._pending_events.append((record, event))
            self._write()

    def check_event_folder(self, agent_folder: Path) -> None:
        """Check whether a worker published its event folder in the agent's directory."""
        with self._lock:
            self._agent_folder = str(agent_folder)
            self._write()

    def _write(self) -> None:
        if not self._pending_events:
            return
        if self._sink is None:
            folder = read_published_event_file(self._agent_folder)
            if folder is None:
                return
            self._sink = json_lines(folder / AGENT_FILE)
        while self._pending_events:
            self._sink(*self._pending_events.popleft())
