from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from resilient import events
from resilient.clock import SystemClock, boot_name
from resilient.elastic.events import ResumeOptionRepeated
from resilient.errors import ConfigError
from resilient.events import Emitter, RetentionFailed, console, json_lines


def test_lines_that_cannot_be_written_are_counted_and_told_twice(tmp_path, capsys, monkeypatch):
    path = tmp_path / "events" / "rank-0.jsonl"
    emit = Emitter(SystemClock(), (json_lines(path),))
    emit(RetentionFailed("checkpoint-1-g1", "first"))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as during:
        during.setattr(events, "_append", full)
        for _ in range(3):
            emit(RetentionFailed("checkpoint-1-g1", "lost"))
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"`{path}` cannot be written, its lines are dropped: No space left" in said
    emit(RetentionFailed("checkpoint-1-g1", "last"))
    emit(RetentionFailed("checkpoint-1-g1", "very last"))
    assert capsys.readouterr().err == f"resilient: `{path}` is written again; lines dropped: 3\n"
    reasons = [json.loads(line)["reason"] for line in path.read_text().splitlines()]
    assert reasons == ["first", "last", "very last"]


def test_a_line_that_only_fits_in_part_leaves_nothing(tmp_path, monkeypatch):
    path, write = tmp_path / "lines.jsonl", os.write
    file = events.AppendOnlyLog(path)
    file.append("whole")
    with monkeypatch.context() as nearly_full:
        nearly_full.setattr(os, "write", lambda to, line: write(to, line[: len(line) // 2]))
        file.append("in part")
    assert path.read_text() == "whole\n"


def test_a_folder_that_cannot_be_made_is_no_failure(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    Emitter(SystemClock(), (json_lines(tmp_path / "file" / "rank-0.jsonl"),))(
        RetentionFailed("checkpoint-1-g1", "lost")
    )
    assert "cannot be written" in capsys.readouterr().err


def test_a_sink_that_raises_is_told_once_and_stops_nobody(capsys):
    heard, told = [], RetentionFailed("checkpoint-1-g1", "it was so")

    def dashboard(_record, event):
        heard.append(event)
        raise RuntimeError("the dashboard is down")

    emit = Emitter(SystemClock(), (dashboard, lambda _, event: heard.append(event)))
    for one in (emit, emit, emit.bind(run="r")):
        one(told)
    assert heard == [told] * 6
    said = capsys.readouterr().err
    assert said.count("RuntimeError: the dashboard is down") == 1
    assert "dashboard` of events raised" in said


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_ends_a_program_passes_through_a_sink(kind):
    def sink(_record, _event):
        raise kind

    with pytest.raises(kind):
        Emitter(SystemClock(), (sink,))(RetentionFailed("checkpoint-1-g1", "it was so"))


def test_no_secret_of_a_url_is_in_a_line_or_a_record(tmp_path, capsys):
    emit = Emitter(SystemClock(), (json_lines(tmp_path / "agent.jsonl"), console()))
    emit(ResumeOptionRepeated("az://account/run?sig=c4n4ry"))
    events.write_stderr("https://user:c4n4ry@host/x")
    events.say_error(ConfigError("no s3:/b/x?secret=c4n4ry", hint="az://a/x?sig=c4n4ry"))
    said = capsys.readouterr().err
    assert "--resume az://account/run?*** holds" in said
    assert "c4n4ry" not in said + (tmp_path / "agent.jsonl").read_text(encoding="utf-8")


def test_an_event_says_the_time_of_day_and_what_nobody_can_set():
    told = []
    emit = Emitter(SystemClock(), (lambda record, _event: told.append(record),))
    before = SystemClock().monotonic_seconds()
    emit(RetentionFailed("checkpoint-1-g1", "no"))
    (record,) = told
    assert before - 0.001 <= record["monotonic"] <= SystemClock().monotonic_seconds() + 0.001
    assert record["boot"] == boot_name()
    assert Path("/proc/sys/kernel/random/boot_id").read_text().startswith(boot_name())
    assert list(record)[:3] == ["at", "monotonic", "boot"]
