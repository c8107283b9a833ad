"""One command in a folder of its own, started as often as it takes, and watched from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from resilient.storage.local import LocalStore
from resilient.testing.chaos.processes import kill_all, rank_processes, send
from resilient.vault.registry.catalog import committed, folders_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from resilient.clock import Clock
    from resilient.format.names import CheckpointId
    from resilient.testing.chaos.clocks import MovableClock
    from resilient.testing.chaos.processes import RankProcess

FOLDER = "{folder}"
"""Stands in the user's command for the folder of the run."""
_LOOK_SECONDS = 0.02


class WentWrong(Exception):
    """The job ended, or did not do in time what it should.

    Attributes:
        code: exit code of the job as a shell shows it, None if it still runs.
    """

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class Job:
    """The same `resilient train` command on one folder.

    Args:
        folder: of this run.
        repository: where it saves.
        options: of `resilient train`, ours; those of the user come later and win.
        command: of the user: options, script and the script's own arguments.
        clock: time.
        hands: of the clock that its processes see; None: that of everybody.

    Attributes:
        folder: of this run.
        repository: where it saves.
        store: the same, to look into it.
        highest: the last step that any rank was ever seen to have finished.
        ranks: how many were seen at once.
        hands: as given.
    """

    def __init__(
        self,
        folder: Path,
        repository: Path,
        options: Sequence[str],
        command: Sequence[str],
        clock: Clock,
        hands: MovableClock | None = None,
    ) -> None:
        self.folder = folder
        self.hands = hands
        self.repository = repository
        self.store = LocalStore(repository)
        self.highest = self.ranks = 0
        self._clock = clock
        self._events = folder / "events"
        ours = ["--repo", str(repository), "--events", str(self._events), *options]
        words = [word.replace(FOLDER, str(folder)) for word in command]
        self._command = [sys.executable, "-m", "resilient_cli", "train", *ours, *words]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def said(self) -> Path:
        """What it has said, all starts."""
        return self.folder / "said.txt"

    @property
    def pid(self) -> int:
        """The agent of the last start."""
        assert self._process is not None, "start() comes first"  # noqa: S101
        return self._process.pid

    def start(self) -> None:
        """Run the command in the background."""
        environ = self.hands.environ if self.hands else {}
        with self.said.open("ab") as said:
            self._process = subprocess.Popen(  # noqa: S603 - the user's own command
                self._command,
                stdout=said,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **environ},
            )

    def code(self) -> int | None:
        """Return the exit code as a shell shows it, None while it runs."""
        status = self._process.poll() if self._process else 0
        return status if status is None or status >= 0 else 128 - status

    def kill(self) -> None:
        """Leave nothing of it running."""
        if self._process is not None and self._process.poll() is None:
            kill_all(self.pid)
            self._process.wait()

    def terminate(self) -> None:
        """Send SIGTERM to the command."""
        send([self.pid], signal.SIGTERM)

    def look(self) -> list[RankProcess]:
        """Return the ranks, and remember how far they are."""
        found = rank_processes(self.pid)
        self.highest = max([self.highest, *(one.step for one in found)])
        self.ranks = max(self.ranks, len(found))
        return found

    def facts(self) -> list[dict[str, Any]]:
        """Return the events of rank 0, without a last line that is not whole."""
        path = self._events / "rank-0.jsonl"
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def newest(self) -> CheckpointId | None:
        """Return the newest committed checkpoint."""
        return max(committed(self.store), default=None)

    def is_saving(self) -> bool:
        """Whether a checkpoint is being written: files, and no manifest yet."""
        newest = self.newest()
        folders = folders_of(self.store).items()
        return any(
            "manifest.json" not in names and (newest is None or one > newest)
            for one, names in folders
        )

    def wait(self, within_seconds: float) -> int:
        """Return the exit code once it has ended.

        Raises:
            WentWrong: it did not in time.
        """
        code = self.until(lambda: False, within_seconds)
        assert code is not None, "nothing else ends that wait"  # noqa: S101
        return code

    def until(self, holds: Callable[[], object], within_seconds: float) -> int | None:
        """Wait until something holds or the job has ended; return the exit code of the latter.

        Raises:
            WentWrong: neither came in time.
        """
        deadline_seconds = self._clock.monotonic_seconds() + within_seconds
        while True:
            # Asked first, so that what a job has done at its end is seen below.
            code = self.code()
            if code is None:
                self.look()
            if holds():
                return None
            if code is not None:
                return code
            if self._clock.monotonic_seconds() > deadline_seconds:
                raise WentWrong(f"nothing happened within {within_seconds:g} s")
            self._clock.sleep(_LOOK_SECONDS)
