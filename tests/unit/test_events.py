from __future__ import annotations

import errno
import importlib
import json
import os
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from string import Formatter
from typing import ClassVar

import pytest

import resilient
from resilient import events
from resilient.clock import SystemClock, boot_name
from resilient.elastic.events import ResumeOptionRepeated
from resilient.elastic.stack_dump import RankStacks
from resilient.errors import ConfigError
from resilient.events import Emitter, Event, RetentionFailed, console, json_lines
from resilient.state_dict.changes import StateChange
from resilient.train.arguments.resume_rules import Change, Rule

SAMPLES = {
    "Mapping[str, Any]": {"loss": 1.23456, "epoch": 2},
    "Mapping[str, Change]": {"lr": Change(1, 2, Rule("free", "it changes"))},
    "Mapping[str, Sequence[str]]": {"checkpoint-1-g1": ["the newest"]},
    "Mapping[str, int]": {"pad": 1},
    "Mapping[str, object]": {"fsdp": True},
    "Sequence[int]": [0, 1],
    "Sequence[str]": ["a", "b"],
    "bool": True,
    "float": 1234.56789,
    "float | None": 1.23456,
    "int": 3,
    "list[RankStacks]": [RankStacks(1, "in a read", "File a.py", is_answered=True)],
    "list[int]": [1, 2, 3, 4],
    "list[str]": ["a", "b"],
    "str": "a {brace} and a 'quote'",
    "tuple[StateChange, ...]": (StateChange("model", "one layer more"),),
    "tuple[str, ...]": ("a", "b"),
    "tuple[tuple[str, int], ...]": (("step", 3),),
}
"""A value for each type of a field of an event."""
WORDS = {("FinalSavePlanned", "tier"): "NEAR", ("SaveScheduleChosen", "bound"): "overhead"}
"""Values of text fields that take certain words only."""


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
    assert f"`{path}` cannot be written, and its lines are dropped: No space left" in said
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
    assert "dashboard` raised" in said


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


@cache
def event_classes():
    """Return all event classes of the library."""
    library = Path(resilient.__file__).parent
    for path in sorted(library.rglob("*.py")):
        # To import all modules takes 10 s longer, because of the libraries that they wrap.
        if "(Event):" in path.read_text(encoding="utf-8"):
            name = path.relative_to(library.parent).with_suffix("")
            importlib.import_module(".".join(name.parts))
    found, left = [], [Event]
    while left:
        below = left.pop().__subclasses__()
        left += below
        # A dataclass with slots replaces its class: the first one is garbage.
        found += [one for one in below if is_current(one)]
    return found


def is_current(kind):
    module = importlib.import_module(kind.__module__)
    return module.__name__.startswith("resilient.") and getattr(module, kind.__name__) is kind


def sample(kind):
    return kind(
        *(WORDS.get((kind.__name__, one.name), SAMPLES[str(one.type)]) for one in fields(kind))
    )


def wrong_fields(kind):
    """Return the names that the template of a class uses and that are no fields of the class."""
    used = {name for _, name, _, _ in Formatter().parse(kind.template) if name is not None}
    return used - {one.name for one in fields(kind)}


def test_every_event_makes_its_message_from_its_fields():
    assert len(event_classes()) > 100
    for kind in event_classes():
        shown = sample(kind).message()
        assert shown, kind
        # Only a message() of its own, or no template at all, may leave the fallback text.
        assert not kind.template or not shown.startswith(kind.__name__)


def test_every_template_names_only_fields_of_its_class():
    assert {kind.__name__: found for kind in event_classes() if (found := wrong_fields(kind))} == {}


def test_no_event_has_both_a_template_and_a_message():
    both = {kind for kind in event_classes() if {"template", "message"} <= vars(kind).keys()}
    assert both == set()


def test_records_of_events_hold_no_template():
    assert [kind for kind in event_classes() if "template" in sample(kind).fields()] == []


def test_message_without_template_lists_the_fields():
    told = RetentionFailed("checkpoint-1-g1", "disk full")
    assert told.message() == "RetentionFailed checkpoint=checkpoint-1-g1 reason=disk full"


@dataclass(frozen=True, slots=True)
class DiskFilled(Event):
    """A disk is nearly full."""

    template: ClassVar[str] = "{path} is {part:.0%} full"
    path: str
    part: float


def test_message_with_template_formats_the_fields():
    assert DiskFilled("/data {x}", 0.987).message() == "/data {x} is 99% full"


def test_a_template_with_a_foreign_field_is_found():
    class DiskLost(DiskFilled):
        template = "{disk} is lost"

    assert wrong_fields(DiskLost) == {"disk"}


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "folder"])
def test_lines_never_leave_the_folder_through_a_link_or_a_pipe(tmp_path, capsys, kind):
    path, outside = tmp_path / "log.jsonl", tmp_path / "outside"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        if kind == "link":
            outside.write_text("mine")
        path.symlink_to(outside)
    events.AppendOnlyLog(path).append("line")
    assert "it is not a regular file" in capsys.readouterr().err
    assert not outside.exists() or outside.read_text() == "mine"
