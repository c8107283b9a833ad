"""One training on several hosts: an agent on each, and a folder that all of them see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.services.netns import Network

SCRIPT = Path(__file__).with_name("canonical_job.py")
PATIENCE_SECONDS = 180.0
PORT = 29400
# Silence for 6 s is death, and a question to the rendezvous waits for 15 s: torch's own 15 and 60
# would make these tests long. Who comes first waits for the others, most often long enough.
CONF = "last_call_timeout=4,keep_alive_interval=2,keep_alive_max_attempt=3,read_timeout=15"


class HostAgent:
    """One `resilient train` on one host.

    Args:
        network: of all hosts.
        number: of this host; host 0 serves the rendezvous.
        folder: that all hosts see; the script trains there.
        nnodes: as the option.
        pause: of each step, in seconds.
        options: more for `resilient train`.
        arguments: of the training, beyond those of the script.
    """

    def __init__(
        self,
        network: Network,
        number: int,
        folder: Path,
        nnodes: str,
        *options: str,
        pause: float = 0.2,
        **arguments: object,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.host, self.run = network[number], folder / "run"
        self.events = folder / f"events-{self.host.name}"
        self.run.mkdir(exist_ok=True)
        self._path = folder / f"said-{self.host.name}.txt"
        is_host = f"is_host={'true' if number == 0 else 'false'}"
        command = [sys.executable, "-m", "resilient_cli", "train", "--nnodes", nnodes]
        command += ["--rdzv-endpoint", f"{network.address(0)}:{PORT}", "--rdzv-id", "test"]
        command += ["--rdzv-conf", f"{is_host},{CONF}", "--local-addr", network.address(number)]
        command += ["--events", str(self.events), "--notice", "off", *options]
        command += [str(SCRIPT), "rank", str(self.run), str(pause), json.dumps(arguments)]
        with self._path.open("ab") as said:
            self.process = subprocess.Popen(
                [*self.host.inside, *command],
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "RESILIENT_REPO": ""},
            )

    def close(self) -> None:
        """End everything on its host."""
        self.host.kill()
        self.process.wait()

    @property
    def said(self) -> str:
        """Everything that the agent and its workers said."""
        return self._path.read_text(encoding="utf-8", errors="replace")

    def told(self, name: str) -> list[dict[str, object]]:
        """Return the agent's events of one name."""
        path = self.events / "agent.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [one for one in map(json.loads, lines) if one["event"] == name]

    def worlds(self) -> list[int]:
        """Return how many ranks each life had that workers of this host lived."""
        return [int(one["world_size"]) for one in self.told("WorkerGroupStarted")]

    def steps(self) -> list[int]:
        """Return the steps that were made, on whichever hosts, in the order of time."""
        path = self.run / "beats"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def wait_for_steps(self, more: int) -> None:
        """Wait until so many more steps were made than now."""
        until = len(self.steps()) + more
        self.wait_until(lambda: len(self.steps()) >= until, f"{more} more steps")

    def wait_for_world(self, size: int) -> None:
        """Wait until workers of this host live in a world of so many ranks."""
        self.wait_until(lambda: self.worlds()[-1:] == [size], f"a world of {size}")

    def wait_until(self, holds, what: str) -> None:
        """Wait until something holds, while this agent lives."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not holds():
            assert self.process.poll() is None, f"ended before {what}:\n{self.said}"
            assert time.monotonic() < deadline, f"waited in vain for {what}:\n{self.said}"
            time.sleep(0.02)

    def end(self) -> int:
        """Wait for the agent and return its exit code."""
        return self.process.wait(PATIENCE_SECONDS)


def calm_digest(folder: Path, job: dict[str, object]) -> str:
    """Return the digest of the run of a job when nothing happens to it."""
    command = [sys.executable, str(SCRIPT), "sizes", str(folder), "1", json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["1"])


def audited(folder: Path) -> dict[str, object]:
    """Return what `resilient audit` says of a run; it must be proven."""
    command = [sys.executable, "-m", "resilient_cli", "audit", str(folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)
