from __future__ import annotations

import errno
import json

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


def test_a_line_that_only_fits_in_part_leaves_nothing(tmp_path):
    path = tmp_path / "lines.jsonl"
    events.LineFile(path).append("whole")

    class Full:
        """A file that takes half of what it is given."""

        def __init__(self):
            self.file = path.open("ab", buffering=0)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, line):
            return self.file.write(line[: len(line) // 2])

    class Nearly:
        parent = tmp_path

        def open(self, *_, **__):
            return Full()

    events.LineFile(Nearly()).append("in part")
    assert path.read_text() == "whole\n"


def test_a_folder_that_cannot_be_made_is_no_failure(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    Emitter(SystemClock(), (json_lines(tmp_path / "file" / "rank-0.jsonl"),))(
        RotationFailed("checkpoint-1-g1", "lost")
    )
    assert "cannot be written" in capsys.readouterr().err
