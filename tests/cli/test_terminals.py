"""What is written where: pipes that close, locales without UTF-8, narrow terminals, no terminal."""

from __future__ import annotations

import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from fcntl import ioctl
from io import StringIO

import pytest

from resilient_cli.app import load
from resilient_cli.command_tree import COMMANDS, LazyCommand
from resilient_cli.output import KeyValues, Progress, Table, Waiting, _human_lines
from tests.helpers.cli_repositories import TickingClock, write_usual_run

PROGRAM = (sys.executable, "-m", "resilient_cli")


@pytest.fixture
def repo(tmp_path):
    folder = tmp_path / "run"
    write_usual_run(folder)
    return folder


def run(*arguments, **more):
    words = [str(one) for one in (*PROGRAM, *arguments)]
    return subprocess.run(words, check=False, timeout=60, stderr=subprocess.PIPE, **more)


def in_terminal(columns, *arguments):
    """Run the program in a terminal of so many columns; return what it showed."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {name: one for name, one in os.environ.items() if name != "COLUMNS"}
    words = [str(one) for one in (*PROGRAM, *arguments, "--no-color")]
    with subprocess.Popen(words, stdout=theirs, stdin=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        try:
            while data := os.read(ours, 4096):
                shown += data
        except OSError:  # Linux says so when the other side is closed
            pass
        finally:
            os.close(ours)
        assert process.wait(60) == 0
    return shown.decode().replace("\r\n", "\n")


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(("ckpt", "ls"), 0), (("help", "json", "ckpt.ls"), 0), (("--help",), 0),
     (("ckpt", "verify", "--all"), 1)],
    ids=lambda one: " ".join(one) if isinstance(one, tuple) else "",
)  # fmt: skip
def test_a_pipe_that_closes_early_changes_no_exit_code_and_says_nothing(arguments, status, repo):
    (repo / "checkpoint-25-g2" / "state.json").unlink()
    read, write = os.pipe()
    os.close(read)
    named = arguments[0] == "ckpt"
    done = run(*arguments, *(("--repo", repo) if named else ()), stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (status, b"")


def test_a_locale_without_a_letter_shows_it_as_an_escape(tmp_path):
    folder = tmp_path / "l\u00e4uft"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = run("init", folder, stdout=subprocess.PIPE, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"l\\xe4uft" in done.stdout


def test_a_name_that_is_no_utf8_is_shown_all_the_same(tmp_path):
    done = run("ckpt", "ls", os.fsdecode(os.fsencode(tmp_path) + b"/\xff"), stdout=subprocess.PIPE)
    assert done.returncode == 66
    assert b"Traceback" not in done.stderr


def test_forty_columns_are_enough(repo):
    shown = in_terminal(40, "ckpt", "ls", repo)
    lines = shown.splitlines()
    assert max(len(one) for one in lines if " checkpoints, " not in one) <= 40
    assert "STATE  ok\nID     checkpoint-35-g2\n" in shown
    assert "STARTED FROM  checkpoint-20-g1\n" in shown


def _every_command(table=COMMANDS, *path):
    for name, lazy in table.items():
        yield (*path, name)
        more = lazy.commands
        if lazy.attribute == "app":
            more = dict.fromkeys(load(name, lazy).commands, LazyCommand("", "", ""))
        yield from _every_command(more, *path, name)


EVERY_COMMAND = [(), *_every_command()]


def test_every_command_is_asked_for_its_help():
    assert {("ckpt", "ls"), ("k8s", "apply"), ("train",)} < set(EVERY_COMMAND)


@pytest.mark.parametrize("command", EVERY_COMMAND, ids=" ".join)
def test_no_line_of_a_help_is_wider_than_the_terminal_and_no_word_is_cut(
    command, call, monkeypatch
):
    shown = {}
    for columns in (40, 60, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        outcome = call(*command, "--help")
        assert outcome.status == 0
        assert max(map(len, outcome.stdout.splitlines())) <= columns
        # Only the strokes of a choice are places to go on below.
        shown[columns] = re.sub(r"(?<=\|)\s+", "", outcome.stdout).split()
    assert shown[40] == shown[60] == shown[80]
    assert not [one for one in shown[80] if re.fullmatch(r"[a-z]+,?\.\.\.", one)], "cut short"


def test_a_last_column_goes_on_below_itself_and_what_can_be_copied_is_whole(repo):
    rows = (("1", "an error that is long enough to be folded", ""), ("22", "short", ""))
    table = Table(("N", "NOTE"), tuple(row[:2] for row in rows))
    assert list(_human_lines([table], is_colored=False, width=24)) == [
        "N   NOTE",
        "1   an error that is",
        "    long enough to be",
        "    folded",
        "22  short",
    ]
    facts = KeyValues((("undo", "resilient ckpt undo file:///a/long/path/that/is/one/word"),))
    assert list(_human_lines([facts], is_colored=False, width=20)) == [
        "undo  resilient ckpt",
        "      undo",
        "      file:///a/long/path/that/is/one/word",
    ]


def test_a_wide_terminal_and_no_terminal_have_the_whole_table(repo):
    wide = in_terminal(200, "ckpt", "ls", repo)
    done = run("ckpt", "ls", repo, stdout=subprocess.PIPE)
    assert done.stdout.decode() == wide


def test_the_bar_fits_a_narrow_terminal(monkeypatch):
    class Terminal(StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("COLUMNS", "30")
    stream = Terminal()
    with Progress("reading", TickingClock(), stream) as told:
        told._clock.sleep(1)
        told(1 << 30, 2 << 30)
    assert "reading 50 %" in stream.getvalue()
    assert "[" not in stream.getvalue()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_has_no_known_end_says_how_long_it_goes_on(is_terminal, monkeypatch):
    stream = StringIO()
    stream.isatty = lambda: is_terminal
    monkeypatch.setattr("resilient_cli.output.SILENT_SECONDS", 0.05)
    told = threading.Event()
    stream.flush = told.set
    with Waiting("importing", TickingClock(), stream):
        assert told.wait(10)
    assert "importing for " in stream.getvalue()
    # Of a terminal it is taken away again.
    assert stream.getvalue().endswith("\r" if is_terminal else "\n")


def test_what_ends_at_once_says_nothing():
    stream = StringIO()
    with Waiting("importing", TickingClock(), stream):
        pass
    assert stream.getvalue() == ""


def test_no_input_asks_nobody(repo):
    """In a terminal too."""
    ours, theirs = pty.openpty()
    words = [*PROGRAM, "ckpt", "prune", str(repo), "--keep-last", "1", "--no-input"]
    done = subprocess.run(
        words, check=False, timeout=60, stdin=theirs, stderr=theirs, stdout=subprocess.PIPE
    )
    os.close(theirs)
    said = os.read(ours, 4096).decode()
    os.close(ours)
    assert done.returncode == 2
    assert "no terminal is there to confirm it" in said


@pytest.mark.parametrize("closed", ["1", "2"])
def test_a_command_without_a_stream_does_its_work(repo, closed):
    words = " ".join([*PROGRAM, "ckpt", "tag", "latest", f"kept-{closed}", str(repo)])
    script = f"exec {closed}>&-; {words}"
    done = subprocess.run(["sh", "-c", script], check=False, timeout=60)
    assert done.returncode == 0
    assert f"kept-{closed}" in run("ckpt", "ls", repo, stdout=subprocess.PIPE).stdout.decode()
