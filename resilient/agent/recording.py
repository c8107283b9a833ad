"""The agent's events as a file beside those of its ranks, which know where only once they run."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.accounting.records import AGENT_FILE
from resilient.events import json_lines
from resilient.world.launch import told_events

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.events import Event

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
            folder = told_events(self._notes)
            if folder is None:
                return
            self._sink = json_lines(folder / AGENT_FILE)
        while self._held:
            self._sink(*self._held.popleft())
