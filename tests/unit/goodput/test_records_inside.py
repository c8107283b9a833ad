"""Event files and logs of a run folder: nothing outside the folder is read, nothing endless."""

from __future__ import annotations

import json
import os
import socket

import pytest

from resilient.elastic.metrics.collector import EventFileTail
from resilient.elastic.worker_logs import LogLine, LogReader, find_sources
from resilient.errors import StoreDenied
from resilient.goodput.event_log import LINE_BYTES_MAX, read_records

AT = "2026-11-20T10:00:00.000Z"
EVENT = json.dumps({"at": AT, "event": "TrainingStarted", "secret": "of another folder"}) + "\n"
STORED = LogLine(AT, "out", "of another folder").stored() + "\n"


def link(path, elsewhere, content):
    elsewhere.mkdir()
    (elsewhere / "file").write_text(content)
    path.symlink_to(elsewhere / "file")


def link_folder(path, elsewhere, content):
    elsewhere.mkdir()
    (elsewhere / path.name).write_text(content)
    path.parent.rmdir()
    path.parent.symlink_to(elsewhere)


def pipe(path, *_):
    os.mkfifo(path)


def device(path, *_):
    path.symlink_to("/dev/zero")


def listen(path, *_):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def fill_folder(path, *_):
    path.mkdir()


def huge(path, *_):
    with path.open("wb") as file:
        file.truncate(1 << 40)


TRAPS = (link, link_folder, pipe, device, listen, fill_folder)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("trap", [*TRAPS, huge], ids=lambda one: one.__name__)
@pytest.mark.parametrize("name", ["agent.jsonl", "rank-0.jsonl"])
def test_event_file_outside_or_endless_is_refused(tmp_path, monkeypatch, trap, name):
    run = tmp_path / "run"
    (run / "events").mkdir(parents=True)
    monkeypatch.chdir(run / "events")  # a socket's path must be short
    trap(run / "events" / name, tmp_path / "elsewhere", EVENT)
    with pytest.raises(StoreDenied, match=f"events/{name}` in .*was not read"):
        read_records([run])


@pytest.mark.timeout(20)
@pytest.mark.parametrize("trap", TRAPS, ids=lambda one: one.__name__)
def test_log_outside_or_endless_is_refused(tmp_path, trap):
    run = tmp_path / "run"
    (run / "logs" / "a").mkdir(parents=True)
    trap(run / "logs" / "a" / "rank-0.log", tmp_path / "elsewhere", STORED)
    with pytest.raises(StoreDenied, match=r"logs/a/rank-0.log` in .*was not read"):
        list(LogReader().read(find_sources(run)))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("trap", [link, pipe, device], ids=lambda one: one.__name__)
def test_agent_follows_no_event_file_outside(tmp_path, trap):
    events = tmp_path / "events"
    events.mkdir()
    trap(events / "rank-0.jsonl", tmp_path / "elsewhere", EVENT)
    with pytest.raises(StoreDenied, match="was not read"):
        EventFileTail(events).read()


def test_links_inside_the_folder_are_followed(tmp_path):
    run = tmp_path / "run"
    (run / "kept").mkdir(parents=True)
    (run / "kept" / "rank-0.jsonl").write_text(EVENT)
    (run / "events").symlink_to("kept")
    (tmp_path / "named").symlink_to(run)
    for folder in (run, tmp_path / "named", run / "events"):
        assert [one.event for one in read_records([folder])] == ["TrainingStarted"]


def test_line_without_an_end_is_passed_over(tmp_path):
    with (tmp_path / "rank-0.jsonl").open("w") as file:
        file.write(EVENT + "x" * (3 * LINE_BYTES_MAX) + EVENT.strip() + "\n" + EVENT)
    assert len(read_records([tmp_path])) == 2
