"""``resilient logs`` on what the ranks of a run printed."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time

import pytest

from resilient.elastic.worker_logs import ERR, OUT, RUN, LogLine
from resilient_cli.commands.logs import harmless

EVIL = "\x1b]0;owned\x07\x1b[2Jclean\u202e"


def append(folder, life, rank, *lines):
    path = folder / "logs" / f"job-{life}-ab" / f"rank-{rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for second, stream, text in lines:
            at = f"2026-11-24T03:0{life}:{second:02}.250Z"
            file.write(LogLine(at, stream, text).stored() + "\n")


@pytest.fixture
def run(tmp_path):
    """Write what two ranks printed in two lives."""
    begun = (0, RUN, "starts (start) on box")
    append(tmp_path, 1, 0, begun, (1, OUT, "loss 2.5"), (4, OUT, "saved to s3://me:pass@lab/run"))
    append(tmp_path, 1, 1, begun, (3, ERR, "RuntimeError: \u00e9 broke"))
    begun = (0, RUN, "starts (failure) on box")
    append(tmp_path, 2, 0, begun, (2, OUT, "loss 2.4\tlr 0.1"))
    append(tmp_path, 2, 1, begun)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("logs", ()),
        ("logs-json", ("--json", "--rank", "1")),
        ("logs-plain", ("--format", "plain", "--attempt", "-1")),
        ("logs-one", ("--attempt", "1", "--rank", "0")),
        ("logs-tail", ("--tail", "2", "--since", "2026-11-24T05:01:04+02:00")),
        ("logs-no-rank", ("--rank", "7", "--attempt", "2")),
        ("logs-since-what", ("--since", "yesterday")),
    ],
)
def test_what_ranks_printed(name, options, run, call, matches):
    matches(name, call("logs", run, *options), run)


def test_a_run_that_kept_nothing_says_how_to_keep_it(tmp_path, call, matches):
    matches("logs-none", call("logs", tmp_path), tmp_path)


def test_no_run_is_wrong_usage_and_the_environment_may_name_it(run, call, monkeypatch):
    assert call("logs").status == 2
    monkeypatch.setenv("RESILIENT_REPO", str(run))
    assert "loss 2.5" in call("logs").stdout


def test_a_length_of_time_is_measured_from_now(run, call, monkeypatch):
    class Now:
        def now_iso(self):
            return "2026-11-24T03:12:01.000Z"

    monkeypatch.setattr("resilient_cli.commands.logs.SystemClock", Now)
    assert "loss 2.4" not in call("logs", run, "--since", "9m").stdout
    assert "loss 2.4" in call("logs", run, "--since", "10m").stdout
    assert "loss 2.5" not in call("logs", run, "--since", "10m").stdout


def test_a_time_without_a_zone_is_utc(run, call, monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        outcome = call("logs", run, "--since", "2026-11-24T03:02:01")
    finally:
        monkeypatch.undo()
        time.tzset()
    assert outcome.stdout == "attempt 2 rank 0 | loss 2.4	lr 0.1\n"


def test_following_goes_over_to_the_next_life_until_it_is_interrupted(run, call, monkeypatch):
    steps = iter(
        [
            lambda: append(run, 2, 1, (5, OUT, "late")),
            lambda: append(run, 3, 0, (0, RUN, "starts (preemption) on box"), (1, OUT, "again")),
        ]
    )

    class Clock:
        def now_iso(self):
            return "2026-11-24T03:12:01.000Z"

        def sleep(self, seconds):
            step = next(steps, None)
            if step is None:
                raise KeyboardInterrupt
            step()

    monkeypatch.setattr("resilient_cli.commands.logs.SystemClock", Clock)
    outcome = call("logs", run, "--follow", "--tail", "1", "--json")
    assert outcome.status == 130
    said = [json.loads(one) for one in outcome.stdout.splitlines()]
    assert [(one["life"], one["rank"], one["text"]) for one in said] == [
        (2, 0, "loss 2.4\tlr 0.1"),
        (2, 1, "late"),
        (3, 0, "starts (preemption) on box"),
        (3, 0, "again"),
    ]


def test_what_is_no_letter_is_spelled():
    assert harmless(EVIL) == r"\x1b]0;owned\x07\x1b[2Jclean\u202e"
    assert harmless("a\tb \u00e9\x9b1m") == "a       b \u00e9\\x9b1m"


def logs_of(run, attempt, stdout):
    command = [sys.executable, "-m", "resilient_cli", "logs", str(run), "--attempt", attempt]
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE)


def test_a_terminal_is_not_obeyed(run):
    append(run, 3, 0, (1, OUT, EVIL))
    ours, theirs = pty.openpty()
    with logs_of(run, "-1", theirs) as process:
        assert process.wait() == 0
        shown = os.read(ours, 1000)
    os.close(theirs)
    os.close(ours)
    assert shown == rb"\x1b]0;owned\x07\x1b[2Jclean\u202e" + b"\r\n"


def test_a_reader_that_has_enough_is_no_error(run):
    append(run, 3, 0, *[(2, OUT, "x" * 99)] * 9000)
    with logs_of(run, "3", subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_no_torch_is_loaded(run):
    program = (
        "import sys; from resilient_cli.app import main; "
        "assert main(sys.argv[1:]) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", program, "logs", str(run)], check=True, capture_output=True
    )
