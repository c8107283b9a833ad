"""Where the agent's events go when nobody said so: beside those of its workers, and in order."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from resilient.clock import SystemClock
from resilient.distributed.launch_env import publish_event_file, publish_repository, read_launch
from resilient.elastic.run_dir import PENDING_EVENTS_MAX, EventFile
from resilient.events import Emitter, Event


@dataclass(frozen=True, slots=True)
class Told(Event):
    """Has a number."""

    number: int


def numbers(folder):
    lines = (folder / "agent.jsonl").read_text().splitlines()
    return [json.loads(line)["number"] for line in lines]


@pytest.fixture
def notes(tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    return folder


@pytest.fixture
def launch(notes):
    """Return what a worker of an agent with these notes is told."""
    return read_launch({"RESILIENT_NOTES": str(notes)})


def test_what_is_told_before_the_workers_said_where_is_written_first(tmp_path, notes, launch):
    file = EventFile("")
    emit = Emitter(SystemClock(), (file,))
    emit(Told(1))
    file.check_event_folder(notes)
    emit(Told(2))
    assert list(tmp_path.iterdir()) == [notes]
    publish_event_file(launch, tmp_path / "run" / "events")
    file.check_event_folder(notes)
    assert numbers(tmp_path / "run" / "events") == [1, 2]
    emit(Told(3))
    assert numbers(tmp_path / "run" / "events") == [1, 2, 3]


def test_the_next_event_finds_what_was_said_since_the_last_look(tmp_path, notes, launch):
    file = EventFile("")
    emit = Emitter(SystemClock(), (file,))
    file.check_event_folder(notes)
    publish_event_file(launch, tmp_path)
    emit(Told(1))
    assert numbers(tmp_path) == [1]


def test_a_folder_of_the_command_line_waits_for_nobody(tmp_path, notes, launch):
    publish_event_file(launch, tmp_path / "theirs")
    file = EventFile(str(tmp_path / "told"))
    Emitter(SystemClock(), (file,))(Told(1))
    file.check_event_folder(notes)
    assert numbers(tmp_path / "told") == [1]
    assert not (tmp_path / "theirs").exists()


def test_events_lie_beside_the_checkpoints_of_a_loop_of_its_own(tmp_path, notes, launch):
    publish_repository(launch, str(tmp_path))
    file = EventFile("")
    file.check_event_folder(notes)
    Emitter(SystemClock(), (file,))(Told(1))
    assert numbers(tmp_path / "events") == [1]


def test_a_bucket_is_no_folder_of_this_host(tmp_path, monkeypatch, notes, launch):
    monkeypatch.chdir(tmp_path)
    publish_repository(launch, "s3://lab/run")
    file = EventFile("")
    file.check_event_folder(notes)
    Emitter(SystemClock(), (file,))(Told(1))
    assert list(tmp_path.iterdir()) == [notes]


def test_only_so_many_wait(tmp_path, notes, launch):
    file = EventFile("")
    emit = Emitter(SystemClock(), (file,))
    for number in range(PENDING_EVENTS_MAX + 2):
        emit(Told(number))
    publish_event_file(launch, tmp_path)
    file.check_event_folder(notes)
    assert numbers(tmp_path) == list(range(2, PENDING_EVENTS_MAX + 2))
