from __future__ import annotations

import errno
import json
import os

from resilient import events
from resilient.clock import SystemClock
from resilient.events import Emitter, RotationFailed, json_lines


def test_lines_that_cannot_be_written_are_counted_and_told_twice(tmp_path, capsys, monkeypatch):
    path = tmp_path / "events" / "rank-0.jsonl"
    emit = Emitter(SystemClock(), (json_lines(path),))
    emit(RotationFailed("checkpoint-1-g1", "first"))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as during:
        during.setattr(events, "_append", full)
        for _ in range(3):
            emit(RotationFailed("checkpoint-1-g1", "lost"))
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"`{path}` cannot be written, its lines are dropped: No space left" in said
    emit(RotationFailed("checkpoint-1-g1", "last"))
    emit(RotationFailed("checkpoint-1-g1", "very last"))
    assert capsys.readouterr().err == f"resilient: `{path}` is written again; lines dropped: 3\n"
    reasons = [json.loads(line)["reason"] for line in path.read_text().splitlines()]
    assert reasons == ["first", "last", "very last"]


def test_a_line_that_only_fits_in_part_leaves_nothing(tmp_path, monkeypatch):
    path, write = tmp_path / "lines.jsonl", os.write
    file = events.LineFile(path)
    file.append("whole")
    with monkeypatch.context() as nearly_full:
        nearly_full.setattr(os, "write", lambda to, line: write(to, line[: len(line) // 2]))
        file.append("in part")
    assert path.read_text() == "whole\n"


def test_a_folder_that_cannot_be_made_is_no_failure(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    Emitter(SystemClock(), (json_lines(tmp_path / "file" / "rank-0.jsonl"),))(
        RotationFailed("checkpoint-1-g1", "lost")
    )
    assert "cannot be written" in capsys.readouterr().err
