"""Two agents on hosts of two names: a start by hand never ends a live run of the other host."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.services.netns import why_impossible

pytestmark = pytest.mark.long

PATIENCE_SECONDS = 100.0
PERIOD_SECONDS = 1.0
SCRIPT = """
import sys, time
from pathlib import Path
from resilient import Checkpointer

stop = Path(sys.argv[1])
with Checkpointer("repo", count=0) as saver:
    start = saver.resume() or 0
    saver.save(start + 1)
    saver.wait()
    print("saved", start + 1, flush=True)
    while not stop.exists():
        time.sleep(0.05)
"""


class Elsewhere:
    """One `resilient train` on a host of another name, with processes of its own."""

    def __init__(self, folder: Path, host: str, *options: str, **environ: str) -> None:
        self.stop = folder / f"stop-{host}"
        self.events = folder / f"events-{host}"
        self._said = (folder / f"said-{host}-{time.monotonic_ns()}.txt").open("w+")
        agent = [sys.executable, "-m", "resilient_cli", "train", "--notice", "off"]
        agent += ["--events", str(self.events), *options, str(folder / "script.py"), str(self.stop)]
        inside = ["unshare", "--uts", "sh", "-c", f'hostname {host} && exec "$@"', "sh"]
        self.process = subprocess.Popen(
            [*inside, *agent],
            cwd=folder,
            stdout=self._said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "RESILIENT_HEARTBEAT_SECONDS": str(PERIOD_SECONDS), **environ},
        )

    @property
    def said(self) -> str:
        return Path(self._said.name).read_text()

    def told(self, name: str) -> list[dict[str, object]]:
        lines = [
            line for file in self.events.glob("*.jsonl") for line in file.read_text().splitlines()
        ]
        return [one for one in map(json.loads, lines) if one["event"] == name]

    def wait_for(self, text: str) -> None:
        began = time.monotonic()
        while text not in self.said:
            assert self.process.poll() is None, self.said
            assert time.monotonic() - began < PATIENCE_SECONDS, self.said
            time.sleep(0.05)

    def end(self) -> int:
        return self.process.wait(PATIENCE_SECONDS)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for pid in workers_of(self.stop):
            os.kill(pid, signal.SIGKILL)
        self._said.close()


def workers_of(stop: Path) -> list[int]:
    """Return the processes that were given this file, in whichever session."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if str(stop).encode() in line.split(b"\\0"):
            found.append(int(folder.name))
    return found


@pytest.fixture
def on_host(tmp_path):
    """Start agents on hosts; those that still run are killed at the end."""
    if why := why_impossible():
        pytest.skip(why)
    (tmp_path / "script.py").write_text(SCRIPT)
    started = []

    def start(*arguments, **environ):
        started.append(Elsewhere(tmp_path, *arguments, **environ))
        return started[-1]

    yield start
    for one in started:
        one.kill()


def content(folder):
    repo = folder / "repo"
    files = [one for one in repo.rglob("*") if one.is_file() and one.parent.name != "heartbeats"]
    return {str(one): one.read_bytes() for one in files if "events" not in one.parts}


@pytest.mark.slow
def test_start_beside_a_live_writer_of_another_host_is_refused(on_host, tmp_path):
    first = on_host("host-1", RESILIENT_JOB="nightly")
    first.wait_for("saved 1")
    before = content(tmp_path)
    second = on_host("host-2")
    assert second.end() == 80, second.said
    assert f"process {first.process.pid} on host-1 has written to" in second.said
    assert content(tmp_path) == before
    assert first.process.poll() is None
    same_job = on_host("host-3", RESILIENT_JOB="nightly")
    same_job.wait_for("saved 2")
    assert not same_job.told("WriterAwaited")


@pytest.mark.slow
def test_start_after_a_writer_of_another_host_ended_or_died_begins(on_host, tmp_path):
    first = on_host("host-1")
    first.wait_for("saved 1")
    assert list(tmp_path.glob("repo/heartbeats/*.json"))
    first.stop.touch()
    assert first.end() == 0, first.said
    assert not list(tmp_path.glob("repo/heartbeats/*"))

    second = on_host("host-2")
    second.wait_for("saved 2")
    assert not second.told("WriterSilent")
    second.kill()
    assert list(tmp_path.glob("repo/heartbeats/*.json"))

    third = on_host("host-3")
    third.wait_for("saved 3")
    (silent,) = third.told("WriterSilent")
    assert (silent["pid"], silent["host"]) == (second.process.pid, "host-2")
    assert PERIOD_SECONDS < silent["seconds"] < 30
