"""``resilient ckpt unlock``: who may write, who is let be, who is shut out."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from resilient.checkpoint.generations import claim, list_numbers
from resilient.checkpoint.writer_heartbeat import WriterHeartbeat
from resilient.clock import SystemClock
from resilient.format.keys import generation_key
from resilient.processes import ProcessIdentity
from resilient.storage.local import LocalStore
from tests.helpers.cli_repositories import TickingClock, write_usual_run

HERE = socket.gethostname()


@pytest.fixture
def repo(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node-7")
    folder = tmp_path / "run"
    write_usual_run(folder)
    return folder


def tell(folder, *words):
    """Write the event file of a launcher: words of (event, agent, moment, more)."""
    lines = [
        json.dumps({"at": at, "event": event, "agent": agent, **more})
        for event, agent, at, more in words
    ]
    (folder / "events").mkdir(parents=True, exist_ok=True)
    (folder / "events" / "agent.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def gone() -> int:
    """Return the number of a process that is no more."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait(60)
    return done.pid


# Before the second life, which claims at 01:04 of the first of January 2026.
BEGAN = "2026-01-01T00:00:30.000Z"
NOW = "2026-01-01T00:59:50.000Z"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("unlock", ()),
        ("unlock-yes", ("--yes",)),
        ("unlock-json", ("--yes", "--json")),
        ("unlock-dry-run", ("--yes", "--dry-run")),
    ],
)
def test_it_reads_as_in_the_transcript(name, arguments, repo, call, matches):
    matches(name, call("ckpt", "unlock", repo, *arguments), repo)


def test_twice_is_once_as_in_the_transcript(repo, call, matches):
    assert call("ckpt", "unlock", repo, "-y", "-q").stdout == "3\n"
    matches("unlock-nobody", call("ckpt", "unlock", repo, "--yes"), repo)
    assert list_numbers(LocalStore(repo)) == [1, 2, 3]


def test_a_launcher_that_died_here_is_dead(repo, call, monkeypatch):
    tell(repo, ("AgentStarted", f"node-7:{gone()}", BEGAN, {}))
    found = json.loads(call("ckpt", "unlock", repo, "--json").stdout)
    assert (found["state"], found["done"]) == ("dead", False)
    assert found["process"]["host"] == "node-7"


def test_a_writer_that_lives_here_is_let_be_but_by_force(repo, call, matches):
    now = datetime.now(UTC).isoformat()
    tell(repo, ("AgentStarted", f"node-7:{os.getpid()}", now, {}))
    outcome = call("ckpt", "unlock", repo)
    assert (outcome.status, "alive: pid" in outcome.stdout) == (80, True)
    refused = call("ckpt", "unlock", repo, "--yes")
    assert (refused.status, refused.stdout) == (80, "")
    assert "[RES-WRITER-ALIVE]" in refused.stderr
    assert f"resilient stop {LocalStore(repo).url}" in refused.stderr
    assert list_numbers(LocalStore(repo)) == [1, 2]
    assert call("ckpt", "unlock", repo, "--yes", "--force").status == 0
    assert list_numbers(LocalStore(repo)) == [1, 2, 3]


def test_a_launcher_elsewhere_is_alive_while_it_tells_and_unknown_when_silent(repo, call):
    tell(repo, ("AgentStarted", "node-9:12", BEGAN, {}), ("ProgressReported", "node-9:12", NOW, {}))
    assert call("ckpt", "unlock", repo, "--yes").status == 80
    tell(repo, ("AgentStarted", "node-7:12", BEGAN, {"exit_code": 0}))
    later = (datetime.fromisoformat(NOW) - timedelta(minutes=5)).isoformat()
    tell(
        repo, ("AgentStarted", "node-9:12", BEGAN, {}), ("ProgressReported", "node-9:12", later, {})
    )
    rename(repo, "node-9")
    found = json.loads(call("ckpt", "unlock", repo, "--json").stdout)
    assert (found["state"], found["process"]["pid"]) == ("unknown", 12)
    assert "check on that machine" in found["why"]


def rename(repo, host):
    """Let the newest life have been claimed on another host."""
    from resilient.format.document import seal, unseal

    path = repo / generation_key(2)
    fields = unseal(path.read_bytes(), "record")
    fields.pop("root", None)
    path.write_bytes(seal({**fields, "host": host}))


@pytest.mark.parametrize("is_alive", [True, False])
def test_unlock_heartbeat_of_another_host_shows_life(is_alive, repo, call, monkeypatch):
    store = LocalStore(repo)
    process = ProcessIdentity("node-9", 12, "another-boot", 5)
    record = claim(store, None, cause="start", clock=SystemClock(), process=process)
    writer = WriterHeartbeat(store, SystemClock(), print, 60.0, process)
    writer._claim = record
    writer.beat()

    class Waited(TickingClock):
        def sleep(self, seconds):
            super().sleep(seconds)
            if is_alive:
                writer.beat()

    monkeypatch.setattr("tests.cli.conftest.TickingClock", Waited)
    found = call("ckpt", "unlock", repo, "--json")
    document = json.loads(found.stdout)
    if is_alive:
        assert (found.status, document["state"]) == (80, "alive")
        assert document["why"] == "pid 12 of node-9 sent a heartbeat"
        assert call("ckpt", "unlock", repo, "--yes").status == 80
    else:
        assert (found.status, document["state"]) == (0, "unknown")
        assert document["why"] == "pid 12 of node-9 sent no heartbeat for 120 s"
        assert call("ckpt", "unlock", repo, "--yes").status == 0


def test_one_that_ended_is_said_to_have(repo, call):
    tell(repo, ("AgentStarted", "node-7:12", BEGAN, {}),
         ("RunEnded", "node-7:12", NOW, {"exit_code": 75, "reason": "preempted"}))  # fmt: skip
    found = json.loads(call("ckpt", "unlock", repo, "--json").stdout)
    assert (found["state"], found["process"]["exit_code"]) == ("ended", 75)


def test_an_end_says_nothing_of_somebody_else_s_life(repo, call):
    tell(repo, ("AgentStarted", "node-9:12", BEGAN, {}),
         ("RunEnded", "node-9:12", NOW, {"exit_code": 75}))  # fmt: skip
    assert json.loads(call("ckpt", "unlock", repo, "--json").stdout)["state"] == "unknown"
    tell(repo, ("AgentStarted", "node-7:12", NOW, {}),
         ("RunEnded", "node-7:12", NOW, {"exit_code": 75}))  # fmt: skip
    assert json.loads(call("ckpt", "unlock", repo, "--json").stdout)["state"] == "unknown"


@pytest.mark.parametrize(
    ("event", "at", "state"),
    [("TrainingEnded", BEGAN, "ended"), ("MetricsLogged", NOW, "alive"),
     ("MetricsLogged", BEGAN, "unknown")],
)  # fmt: skip
def test_ranks_without_a_launcher_tell_what_they_can(event, at, state, repo, tmp_path, call):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "rank-0.jsonl").write_text(json.dumps({"at": at, "event": event}), encoding="utf-8")
    found = call("ckpt", "unlock", repo, "--run", folder, "--json")
    assert json.loads(found.stdout)["state"] == state
    assert found.status == (80 if state == "alive" else 0)


def test_what_holds_rotation_is_told_and_what_is_no_repository_is_refused(repo, tmp_path, call):
    (repo / "tags").mkdir()
    (repo / "tags" / "release.json").write_bytes(b"{}")
    assert "a tag cannot be read" in call("ckpt", "unlock", repo).stdout
    assert call("ckpt", "unlock", tmp_path / "no").status == 66
    assert call("ckpt", "unlock", repo, "--run", tmp_path / "no").status == 66
