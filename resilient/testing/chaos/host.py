"""One host of a job: where the command runs, and what became of it each time it was started."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

from resilient.testing.chaos.namespaces import kill_hosts
from resilient.testing.chaos.processes import descendants, kill_all, rank_processes, send

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from resilient.testing.chaos.namespaces import Namespace
    from resilient.testing.chaos.processes import RankProcess


class Host:
    """A command, started as often as it takes, on this machine or in a namespace of it.

    Args:
        number: of the host.
        command: what is started.
        said: file for what it says.
        namespace: the host; None: this machine.
        environ: more variables for it.

    Attributes:
        number: as given.
        said: as given.
        namespace: as given.
        codes: with which each of its starts ended, as a shell shows them, once that was noticed.
        starts: how often it was started.
    """

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        said: Path,
        namespace: Namespace | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.number = number
        self.said = said
        self.namespace = namespace
        self.codes: list[int] = []
        self.starts = 0
        self._command = [*(namespace.inside if namespace else ()), *command]
        self._environ = dict(environ or {})
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        """What people call it."""
        return name_of(self.number)

    @property
    def pid(self) -> int:
        """The agent of the last start."""
        assert self._process is not None, "start() comes first"  # noqa: S101
        return self._process.pid

    def start(self) -> None:
        """Run the command in the background."""
        self.code()
        with self.said.open("ab") as said:
            self._process = subprocess.Popen(  # noqa: S603 - the user's own command
                self._command,
                stdout=said,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **self._environ},
            )
        self.starts += 1

    def code(self) -> int | None:
        """Return the exit code of the last start as a shell shows it, None while it runs."""
        if self._process is None:
            return 0
        status = self._process.poll()
        if status is None:
            return None
        code = status if status >= 0 else 128 - status
        if len(self.codes) < self.starts:
            self.codes.append(code)
        return code

    def look(self) -> list[RankProcess]:
        """Return the ranks that it runs."""
        found = rank_processes(self.pid) if self._process is not None else []
        return [replace(one, host=self.number) for one in found]

    def processes(self) -> list[int]:
        """Return everything that runs of it, the agent first."""
        if self._process is None:
            return []
        if self.namespace is None:
            return [self.pid, *descendants(self.pid)]
        return sorted(self.namespace.processes(), key=lambda one: one != self.pid)

    def kill(self) -> None:
        """Leave nothing of it running: all processes die at one moment."""
        if self.namespace is not None:
            kill_hosts((self.namespace,))
        elif self.code() is None:
            kill_all(self.pid)
        if self._process is not None:
            self._process.wait()

    def kill_agent(self) -> None:
        """Kill the agent alone."""
        send([self.pid], signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def terminate(self) -> None:
        """Send SIGTERM to the agent."""
        send([self.pid], signal.SIGTERM)


def name_of(number: int) -> str:
    """Return what people call a host."""
    return f"host-{number}"
