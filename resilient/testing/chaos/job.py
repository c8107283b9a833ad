"""Job under test: a command that runs in one folder, the hosts that run it, and its events.

A job starts its command in its own folder, and starts the command again as often as needed. The job
observes the processes of the command from outside.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from resilient.checkpoint.catalog import committed, folders_of
from resilient.errors import PERMANENT
from resilient.storage.local import LocalStore
from resilient.testing.chaos.netns import kill_hosts
from resilient.testing.chaos.processes import descendants, kill_all, rank_processes, send

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from resilient.clock import Clock
    from resilient.format.keys import CheckpointId
    from resilient.testing.chaos.clock_shift import MovableClock
    from resilient.testing.chaos.netns import Namespace, Network
    from resilient.testing.chaos.processes import RankProcess


class Host:
    """Host of a job: a command that is started repeatedly, on this machine or in a namespace.

    Args:
        number: Number of the host.
        command: Command to start.
        output: File for the output of the command.
        namespace: Namespace of the host; None for this machine.
        environ: Additional variables for the command.

    Attributes:
        number: Number of the host.
        output_path: File for the output of the command.
        namespace: Namespace of the host.
        codes: Exit codes of all ended starts as a shell shows them, once noticed.
        starts: Number of starts.
    """

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        output: Path,
        namespace: Namespace | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.number = number
        self.output_path = output
        self.namespace = namespace
        self.codes: list[int] = []
        self.starts = 0
        self._command = [*(namespace.inside if namespace else ()), *command]
        self._environ = dict(environ or {})
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        """Readable name of the host."""
        return name_of(self.number)

    @property
    def pid(self) -> int:
        """Process id of the agent of the last start."""
        assert self._process is not None, "start() comes first"  # noqa: S101
        return self._process.pid

    def start(self) -> None:
        """Run the command in the background."""
        self.code()
        with self.output_path.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603 - the user's own command
                self._command,
                stdout=output,
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
        """Return the running ranks of this host."""
        processes = rank_processes(self.pid) if self._process is not None else []
        return [replace(process, host=self.number) for process in processes]

    def processes(self) -> list[int]:
        """Return all running processes of this host, the agent first."""
        if self._process is None:
            return []
        if self.namespace is None:
            return [self.pid, *descendants(self.pid)]
        return sorted(self.namespace.processes(), key=lambda process: process != self.pid)

    def kill(self) -> None:
        """Kill all processes of this host at one moment."""
        if self.namespace is not None:
            kill_hosts((self.namespace,))
        elif self.code() is None:
            kill_all(self.pid)
        if self._process is not None:
            self._process.wait()

    def kill_agent(self) -> None:
        """Kill only the agent."""
        send([self.pid], signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def terminate(self) -> None:
        """Send SIGTERM to the agent."""
        send([self.pid], signal.SIGTERM)


def name_of(number: int) -> str:
    """Return the readable name of a host."""
    return f"host-{number}"


class JobEvents:
    """Events of rank 0 of a job, on any host, in the order in which they were read.

    Args:
        folders: Folders of event files, one per host.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = tuple(folders)
        self._paths = [folder / "rank-0.jsonl" for folder in folders]
        self._read_bytes = [0] * len(self._paths)
        self._events: list[dict[str, Any]] = []

    def facts(self) -> list[dict[str, Any]]:
        """Return all events without an incomplete last line; earlier results keep their order."""
        new_events: list[dict[str, Any]] = []
        for nth, path in enumerate(self._paths):
            if path.exists():
                with path.open("rb") as file:
                    file.seek(self._read_bytes[nth])
                    complete_text = file.read().rpartition(b"\n")[0]
                self._read_bytes[nth] += len(complete_text) + bool(complete_text)
                lines = complete_text.decode("utf-8", "replace").splitlines()
                new_events += [json.loads(line) for line in lines if line.endswith("}")]
        # Sort only the new events, so that a clock jump disturbs no more than these.
        self._events += sorted(new_events, key=lambda event: str(event.get("at", "")))
        return list(self._events)

    def worlds(self) -> tuple[int, ...]:
        """Return the world sizes of all attempts by the agents' events, without repetition."""
        sizes = set()
        for path in (folder / "agent.jsonl" for folder in self._folders):
            text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
            events = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
            start_events = [event for event in events if event["event"] == "WorkerGroupStarted"]
            sizes |= {int(event["world_size"]) for event in start_events}
        return tuple(sorted(sizes))


FOLDER, HOST = "{folder}", "{host}"
"""Placeholders in the user's command for the folder of the run and the name of each host."""
MEETING_HOST = 0
"""Number of the host that serves the rendezvous of a job."""
_PORT = 29400
_LOOK_SECONDS = 0.02


class JobFailed(Exception):
    """The job ended, or did not show the expected behavior in time.

    Attributes:
        code: Exit code of the job as a shell shows it, None if it still runs.
    """

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class JobEnvironment:
    """Environment of a job.

    Attributes:
        shifted_clock: Clock of the job's processes; None for the machine's clock.
        network: Hosts of the job; None for this machine alone.
    """

    shifted_clock: MovableClock | None = None
    network: Network | None = None


class Job:
    """One `resilient train` command on one folder, on one or several hosts.

    Args:
        folder: Folder of this run.
        repository: Folder of the checkpoints.
        options: Options of `resilient train` that we add; the user's options override them.
        command: Command of the user: options, script and arguments of the script.
        clock: Clock for all waits.
        environment: Environment of the job.

    Attributes:
        folder: Folder of this run.
        repository: Folder of the checkpoints.
        store: Store of the checkpoints.
        highest: Last step that any rank was seen to finish.
        reached: Last finished step by process, for every rank ever seen.
        ranks: Largest number of ranks seen at once.
        shifted_clock: Clock of the job's processes.
        network: Network between the hosts.
        hosts: Hosts of the job.
        excused: Hosts that may be absent at the end.
    """

    def __init__(
        self,
        folder: Path,
        repository: Path,
        options: Sequence[str],
        command: Sequence[str],
        clock: Clock,
        environment: JobEnvironment | None = None,
    ) -> None:
        environment = environment or JobEnvironment()
        self.folder = folder
        self.shifted_clock, self.network = environment.shifted_clock, environment.network
        self.repository = repository
        self.store = LocalStore(repository)
        self.highest = self.ranks = 0
        self.reached: dict[int, int] = {}
        self.excused: set[int] = set()
        self._clock = clock
        self.hosts = [
            self._host(number, options, command) for number in range(len(self.network or "1"))
        ]
        self._event_reader = JobEvents([self._events(host.number) for host in self.hosts])

    def start(self) -> None:
        """Run the command in the background, on all hosts on which it does not run."""
        for host in self.hosts:
            if host.starts == 0 or host.code() is not None:
                host.start()

    def revive(self) -> None:
        """Start ended hosts again, as a scheduler would.

        No host is started once a host has ended with 0, because the run is then over. A host with a
        permanent exit code is not started either.
        """
        codes = [host.code() for host in self.hosts]
        if 0 in codes:
            return
        for host, code in zip(self.hosts, codes, strict=True):
            if code is not None and code not in PERMANENT:
                host.start()

    def code(self) -> int | None:
        """Return the exit code as a shell shows it, None while the job runs.

        With several hosts, the result is the first nonzero code of a host that is not excused.
        """
        codes = {host.number: host.code() for host in self.hosts}
        if None in codes.values():
            return None
        failed_codes = [
            code for number, code in codes.items() if code and number not in self.excused
        ]
        return next(iter(failed_codes), 0)

    def kill(self) -> None:
        """Kill all processes of the job at one moment."""
        kill_hosts([host.namespace for host in self.hosts if host.namespace])
        for host in self.hosts:
            host.kill()

    def terminate(self) -> None:
        """Send SIGTERM to the command on all hosts."""
        for host in self.hosts:
            host.terminate()

    def processes(self) -> list[int]:
        """Return all running processes of the job."""
        return [pid for host in self.hosts for pid in host.processes()]

    def look(self) -> list[RankProcess]:
        """Return the ranks, and record their steps."""
        ranks = [rank for host in self.hosts for rank in host.look()]
        self.highest = max([self.highest, *(process.step for process in ranks)])
        self.reached |= {process.pid: process.step for process in ranks}
        self.ranks = max(self.ranks, len(ranks))
        return ranks

    def last_step(self, pids: Iterable[int]) -> int:
        """Return the last step that any of these processes was seen to finish; at least 0."""
        return max([0, *(self.reached.get(pid, 0) for pid in pids)])

    def facts(self) -> list[dict[str, Any]]:
        """Return the events of rank 0."""
        return self._event_reader.facts()

    def worlds(self) -> tuple[int, ...]:
        """Return the world sizes of the attempts by the agents' events, without repetition."""
        return self._event_reader.worlds()

    def newest(self) -> CheckpointId | None:
        """Return the newest committed checkpoint."""
        return max(committed(self.store), default=None)

    def is_saving(self) -> bool:
        """Return whether a checkpoint is being written: it has files but no manifest."""
        newest = self.newest()
        folders = folders_of(self.store).items()
        return any(
            "manifest.json" not in names and (newest is None or checkpoint > newest)
            for checkpoint, names in folders
        )

    def wait(self, within_seconds: float) -> int:
        """Return the exit code once the job has ended.

        Raises:
            JobFailed: The job did not end in time.
        """
        code = self.until(lambda: False, within_seconds)
        assert code is not None, "nothing else ends that wait"  # noqa: S101
        return code

    def until(
        self,
        condition: Callable[[], object],
        within_seconds: float,
        before_poll: Callable[[], None] | None = None,
    ) -> int | None:
        """Wait until a condition is met or the job has ended; return the exit code of an ended job.

        Args:
            condition: Condition to poll.
            within_seconds: Longest wait.
            before_poll: Function called before each poll.

        Raises:
            JobFailed: The condition was not met and the job did not end in time.
        """
        deadline_seconds = self._clock.monotonic_seconds() + within_seconds
        while True:
            if before_poll is not None:
                before_poll()
            # Read the exit code first, so that the condition sees the job's last effects.
            code = self.code()
            if code is None:
                self.look()
            if condition():
                return None
            if code is not None:
                return code
            if self._clock.monotonic_seconds() > deadline_seconds:
                ended_text = self._ended() if len(self.hosts) > 1 else ""
                raise JobFailed(f"nothing happened within {within_seconds:g} s{ended_text}")
            self._clock.sleep(_LOOK_SECONDS)

    def _ended(self) -> str:
        codes = {host.name: host.code() for host in self.hosts}
        return "".join(f", {name} ended with {code}" for name, code in codes.items() if code)

    def _events(self, number: int) -> Path:
        events = self.folder / "events"
        return events if self.network is None else events / name_of(number)

    def _host(self, number: int, options: Sequence[str], command: Sequence[str]) -> Host:
        network, name = self.network, name_of(number)
        own_options = ["--repo", str(self.repository), "--events", str(self._events(number))]
        output = self.folder / "said.txt"
        if network is not None:
            output = self.folder / f"said-{name}.txt"
            own_options += ["--nnodes", f"1:{len(network)}", "--rdzv-id", "chaos"]
            own_options += ["--rdzv-endpoint", f"{network.address(MEETING_HOST)}:{_PORT}"]
            own_options += ["--local-addr", network.address(number)]
        own_options += [word.replace(HOST, name) for word in options]
        words = [word.replace(FOLDER, str(self.folder)).replace(HOST, name) for word in command]
        full_command = [sys.executable, "-m", "resilient_cli", "train", *own_options, *words]
        environ = self.shifted_clock.environ if self.shifted_clock else {}
        return Host(number, full_command, output, network[number] if network else None, environ)
