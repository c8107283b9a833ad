"""What ranks print: cut into lines, kept beside where it was going, and read from the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

import resilient
from resilient.clock import SystemClock
from resilient.elastic.worker_logs import (
    TEXT_BYTES_MAX,
    LogLine,
    LogReader,
    Splitter,
    WorkerLogCapture,
    find_sources,
    offset_of_last,
    offset_since,
    parse_line,
)

BOOTSTRAP = Path(resilient.__file__).parent / "elastic" / "workers" / "bootstrap.py"
PRINTS = """
import os, signal, sys
print("out", os.environ.get("RESILIENT_OUTPUT"))
print("err", file=sys.stderr)
os.system("echo child")
for nth in range(3): print("bar", nth, end="\\r")
print("", "no end", sep="\\n", end="")
os.kill(os.getpid(), signal.SIGKILL)
"""


def at(second):
    return f"2026-11-24T03:{second // 60:02}:{second % 60:02}.000Z"


def write(folder, life, rank, seconds):
    path = folder / life / f"rank-{rank}.log"
    path.parent.mkdir(exist_ok=True, parents=True)
    lines = [LogLine(at(one), "out", f"at {one} of {rank}").stored() + "\n" for one in seconds]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def texts(printed):
    return [one.line.text for one in printed]


def test_lines_are_cut_wherever_the_bytes_were():
    data = "one\ntwo \u00e9\nbar 1\rbar 2\r\n\nrest".encode()
    for size in (1, 2, 3, 7, 100):
        splitter = Splitter()
        parts = [data[at : at + size] for at in range(0, len(data), size)]
        found = [text for part in parts for text in splitter.feed(part)]
        assert [*found, *splitter.last()] == ["one", "two \u00e9", "bar 2", "", "rest"]
        assert splitter.last() == []


def test_a_line_without_an_end_is_held_in_pieces_and_a_bar_by_its_newest_state():
    splitter = Splitter()
    assert splitter.feed(b"bar\r" * TEXT_BYTES_MAX + b"newest") == []
    assert splitter.last() == ["newest"]
    pieces = splitter.feed(b"x" * (3 * TEXT_BYTES_MAX + 5))
    assert [len(one) for one in [*pieces, *splitter.last()]] == [TEXT_BYTES_MAX] * 3 + [5]
    (whole,) = splitter.feed(b"y" * TEXT_BYTES_MAX + b"\n")
    assert len(whole) == TEXT_BYTES_MAX


def test_a_line_is_read_as_it_was_kept_and_a_stranger_s_is_a_text():
    line = LogLine(at(5), "err", "a b\tout \x1b[1m")
    assert parse_line(line.stored().encode() + b"\n") == line
    assert parse_line(b"what\xff is it\n") == LogLine("", "out", "what\ufffd is it")


@pytest.fixture
def outputs(tmp_path):
    kept = WorkerLogCapture(str(tmp_path / "logs"), tmp_path, SystemClock())
    yield kept
    kept.end()


def start(folder, told, script):
    (folder / "worker.py").write_text(script, encoding="utf-8")
    environ = {**os.environ, **told}
    command = [sys.executable, "-u", str(BOOTSTRAP), str(folder / "worker.py")]
    return subprocess.run(command, env=environ, check=False, capture_output=True)


def test_all_that_a_worker_prints_is_kept_and_goes_on_the_last_words_of_a_killed_one_too(
    outputs, tmp_path, capfd
):
    outputs.begin("run/1-ab", "start", {0: 7})
    ended = start(tmp_path, outputs.pipe_environ(0), PRINTS)
    outputs.end()
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGKILL, b"", b"")
    (source,) = find_sources(tmp_path)
    assert (source.life, source.attempt, source.rank) == (1, "run%2F1-ab", 7)
    lines = [one.line for one in LogReader().read([source])]
    assert lines[0].stream == "run"
    assert lines[0].text.startswith("starts (start) on ")
    assert [one.text for one in lines if one.stream == "out"] == [
        "out None", "child", "bar 2", "no end"
    ]  # fmt: skip
    assert [one.text for one in lines if one.stream == "err"] == ["err"]
    shown = capfd.readouterr()
    assert shown.out == "out None\nchild\nbar 0\rbar 1\rbar 2\r\nno end"
    assert shown.err == "err\n"
    assert outputs.pipe_environ(0) == {}


def test_more_than_a_pipe_holds_goes_through(outputs, tmp_path, capfd):
    outputs.begin("one", "start", {0: 0})
    start(tmp_path, outputs.pipe_environ(0), "for nth in range(40000): print('line', nth)")
    outputs.end()
    found = texts(LogReader().read(find_sources(tmp_path / "logs")))[1:]
    assert found == [f"line {nth}" for nth in range(40000)] == capfd.readouterr().out.splitlines()


def test_a_file_that_cannot_be_written_costs_the_worker_nothing(tmp_path, capfd):
    (tmp_path / "logs").write_text("in the way")
    outputs = WorkerLogCapture(str(tmp_path / "logs"), tmp_path, SystemClock())
    outputs.begin("one", "start", {0: 0})
    assert start(tmp_path, outputs.pipe_environ(0), "print('it goes on')").returncode == 0
    outputs.end()
    shown = capfd.readouterr()
    assert shown.out == "it goes on\n"
    assert "cannot be written, and its lines are dropped" in shown.err


def test_without_a_folder_a_worker_prints_where_it_always_did(tmp_path):
    outputs = WorkerLogCapture("", tmp_path, SystemClock())
    outputs.begin("one", "start", {0: 0})
    assert start(tmp_path, outputs.pipe_environ(0), "print('mine')").stdout == b"mine\n"
    outputs.end()


def test_lives_follow_each_other_and_their_ranks_go_by_time(tmp_path):
    # The names of lives are in another order than their beginnings.
    write(tmp_path, "b", 0, [1, 4])
    write(tmp_path, "b", 1, [2, 3])
    write(tmp_path, "a", 0, [9])
    sources = find_sources(tmp_path)
    assert [(one.life, one.attempt, one.rank) for one in sources] == [
        (1, "b", 0), (1, "b", 1), (2, "a", 0)
    ]  # fmt: skip
    everything = ["at 1 of 0", "at 2 of 1", "at 3 of 1", "at 4 of 0", "at 9 of 0"]
    assert texts(LogReader().read(sources)) == everything
    for tail in range(6):
        assert texts(LogReader(tail).read(sources)) == everything[len(everything) - min(tail, 5) :]
    assert texts(LogReader(since=at(3)).read(sources)) == everything[2:]


@pytest.mark.parametrize("lines", [0, 1, 2, 3000, 9000])
def test_the_place_to_begin_at_is_found_in_a_file_of_any_length(lines, tmp_path):
    path = write(tmp_path, "a", 0, range(lines))
    ends = [0]
    for one in path.read_bytes().splitlines(keepends=True):
        ends.append(ends[-1] + len(one))
    with path.open("rb") as file:
        for last in {0, 1, 2, lines // 2, lines, lines + 5}:
            assert offset_of_last(file, last) == ends[max(0, lines - last)]
        for second in {0, 1, lines // 3, lines - 1, lines, lines + 9}:
            # Before the hundredth minute times are in order as texts.
            if 0 <= second < 6000 and lines < 6000:
                assert offset_since(file, at(second)) == ends[min(second, lines)]


def test_the_end_of_a_long_file_costs_no_memory_of_its_length(tmp_path):
    path = tmp_path / "a" / "rank-0.log"
    path.parent.mkdir()
    with path.open("wb") as file:
        file.write(LogLine(at(0), "out", "first").stored().encode() + b"\n")
        file.seek(8 << 30)  # no byte of it is on the disk
        file.write(b"\n" + LogLine(at(9), "out", "last").stored().encode() + b"\n")
    tracemalloc.start()
    try:
        assert texts(LogReader(tail=1).read(find_sources(tmp_path))) == ["last"]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_what_comes_later_is_read_once_and_no_half_of_a_line(tmp_path):
    path = write(tmp_path, "a", 0, [1])
    reader = LogReader(tail=0)
    assert texts(reader.read(find_sources(tmp_path))) == []
    with path.open("a", encoding="utf-8") as file:
        file.write(LogLine(at(2), "out", "new").stored() + "\n" + at(3))
        file.flush()
        assert texts(reader.read_on(find_sources(tmp_path))) == ["new"]
        assert reader.read_on(find_sources(tmp_path)) == []
        file.write(" out whole\n")
    write(tmp_path, "b", 0, [5])
    assert texts(reader.read_on(find_sources(tmp_path))) == ["whole", "at 5 of 0"]
