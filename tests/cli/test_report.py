"""``resilient report`` and ``resilient status`` on the events of a run."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from datetime import UTC, datetime
from html.parser import HTMLParser

import pytest

from resilient_cli.commands.ui import version_of
from tests.helpers.cli_repositories import truncate_file, write_usual_run
from tests.helpers.told import BEGAN, killed_run


class Later:
    """A clock so many seconds after the beginning of the run, that counts how often it waits."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.slept = 0

    def now_iso(self):
        return datetime.fromtimestamp(BEGAN + self.seconds, UTC).isoformat()

    def sleep(self, seconds):
        self.slept += 1
        self.then()

    def then(self):
        """Do nothing meanwhile."""


@pytest.fixture
def run(tmp_path):
    """Write that many lines of the run, all if nothing is said; return its folder."""

    def write(lines=None):
        (tmp_path / "events").mkdir(exist_ok=True)
        text = "\n".join(killed_run()[:lines])
        (tmp_path / "events" / "agent.jsonl").write_text(text + "\n", encoding="utf-8")
        return tmp_path

    return write


@pytest.fixture
def at(monkeypatch):
    def set_clock(seconds):
        clock = Later(seconds)
        monkeypatch.setattr("resilient_cli.commands.report.SystemClock", lambda: clock)
        return clock

    return set_clock


@pytest.mark.parametrize(
    ("name", "options"),
    [("report", ()), ("report-json", ("--json",)), ("report-plain", ("--format", "plain"))],
)
def test_where_the_time_went(name, options, run, call, matches):
    folder = run()
    matches(name, call("report", folder, *options), folder)


@pytest.mark.parametrize(
    ("name", "when"),
    [("status-training", (9, 15)), ("status-silent", (9, 900)), ("status-done", (None, 999))],
)
def test_where_the_run_is(name, when, run, at, call, matches):
    lines, seconds = when
    folder = run(lines)
    at(seconds)
    matches(name, call("status", folder), folder)


def test_status_in_json_is_one_object(run, at, call, matches):
    at(15)
    folder = run(9)
    outcome = call("status", folder, "--json")
    matches("status-json", outcome, folder)
    said = json.loads(outcome.stdout)
    assert said["schema"] == "resilient/status@1"
    assert (said["state"], said["step"], said["risk_steps"]) == ("training", 8, 3)


def test_what_a_dead_launcher_no_longer_does_is_no_training(tmp_path, at, call):
    child = subprocess.Popen(["true"])
    child.wait()
    lines = killed_run(f"{socket.gethostname()}:{child.pid}")[:9]
    (tmp_path / "agent.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    told = []
    for seconds in (15, 45):
        at(seconds)
        told.append(json.loads(call("status", tmp_path, "--json").stdout))
    assert {one["state"] for one in told} == {"dead"}
    trained = [one["goodput"] * one["wall_ms"] for one in told]
    assert trained[0] == pytest.approx(trained[1])
    said = call("status", tmp_path).stdout
    assert "its launcher died" in said
    assert " left" not in said


def test_watching_ends_with_the_run(run, at, call):
    folder, clock = run(9), at(15)
    clock.then = run
    outcome = call("status", folder, "--watch", "--json")
    states = [json.loads(one)["state"] for one in outcome.stdout.splitlines()]
    assert states == ["training", "done"]
    assert clock.slept == 1


def test_no_events_are_not_found(tmp_path, call):
    outcome = call("report", tmp_path)
    assert outcome.status == 66
    assert "--events FOLDER" in outcome.stderr


VOID = ("meta", "input", "path", "rect", "circle", "wbr")


class Page(HTMLParser):
    """Collects what a page refers to, and that its elements are closed."""

    def __init__(self):
        super().__init__()
        self.open, self.referred, self.seen = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.referred += [value for name, value in attrs if name in ("src", "href", "srcset")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


def test_the_page_needs_nothing_beside_it_and_says_what_happened(run, call, tmp_path):
    path = tmp_path / "run.html"
    assert call("report", run(), "-o", path).status == 0
    text = path.read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert page.open == []
    assert all(one.startswith("#") for one in page.referred)
    assert page.seen.count("svg") == 2
    assert not {"link", "img", "iframe"} & set(page.seen)
    assert page.seen.count("script") == 1
    assert "connect-src" not in text
    assert "default-src 'none'" in text  # not even itself may be asked for anything
    assert not re.search(r"url\(|@import|https?:", text)
    for word in ("36.7 %", "aws: spot terminate", "signal 9", "checkpoint-5-g1", "rolled back"):
        assert word in text
    assert "prefers-color-scheme:dark" in text


def test_the_page_lists_what_is_there_now_how_large_and_in_which_state(run, call, tmp_path):
    folder = run()
    write_usual_run(folder)
    truncate_file(folder / "checkpoint-35-g2" / "model.r00000.safetensors", 300)
    before = version_of([folder])
    assert call("report", folder, "-o", tmp_path / "run.html").status == 0
    text = re.sub(r"<[^>]*>", "|", (tmp_path / "run.html").read_text(encoding="utf-8"))
    assert "5 checkpoints, 3.7 KiB. Training would resume from checkpoint-25-g2." in text
    about = r"\|+2026-01-01 [0-9:]{8}\|+764 B\|+764 B\|+764 B\|+1\|+(\w+)"
    rows = re.findall(rf"(checkpoint-\d+-g\d)(?: \|+next)?{about}", text)
    assert rows == [
        ("checkpoint-35-g2", "DAMAGED"), ("checkpoint-25-g2", "ok"),
        ("checkpoint-30-g1", "abandoned"), ("checkpoint-20-g1", "ok"), ("checkpoint-10-g1", "ok"),
    ]  # fmt: skip
    assert "model.r00000.safetensors: 300 bytes, committed with 376" in text
    # A page that is served is made anew when one of them is damaged.
    truncate_file(folder / "checkpoint-25-g2" / "model.r00000.safetensors", 300)
    assert version_of([folder]) != before


def test_what_others_wrote_into_events_is_no_part_of_the_page(run, call, tmp_path):
    folder = run()
    file = folder / "events" / "agent.jsonl"
    evil = "<script>alert(1)</script>"
    spoiled = file.read_text().replace("aws: spot terminate", evil)
    file.write_text(spoiled.replace("checkpoint-5-g1", f"checkpoint-5-{evil}"))
    assert call("report", folder, "-o", tmp_path / "run.html").status == 0
    text = (tmp_path / "run.html").read_text()
    assert "&lt;script&gt;alert" in text
    assert text.count("<script") == 1


def test_a_page_that_cannot_be_written_is_an_error(run, call, tmp_path):
    outcome = call("report", run(), "-o", tmp_path / "no" / "run.html")
    assert "cannot write" in outcome.stderr
    assert outcome.status != 0


def test_no_torch_is_loaded(run):
    program = (
        "import sys; from resilient_cli.app import main; "
        "assert main(sys.argv[1:]) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, "report", str(run())], check=True)


@pytest.fixture
def eventless(tmp_path):
    folder = tmp_path / "run"
    write_usual_run(folder)
    return folder


@pytest.mark.parametrize("command", ["report", "status"])
@pytest.mark.parametrize("form", ["text", "json"])
def test_a_repository_whose_run_kept_no_events_says_what_it_holds(
    eventless, at, call, matches, command, form
):
    # An hour after its last checkpoint.
    clock = at(0)
    clock.now_iso = lambda: "2026-01-01T01:07:00+00:00"
    more = ["--json"] if form == "json" else []
    matches(f"{command}-eventless-{form}", call(command, eventless, *more), eventless)


def test_watching_what_never_says_that_it_ends_looks_once(eventless, at, call):
    clock = at(0)
    clock.then = lambda *_: pytest.fail("it would wait for ever")
    told = call("status", eventless, "--watch", "--json")
    assert told.status == 0
    assert [json.loads(one)["state"] for one in told.stdout.splitlines()] == ["unknown"]


def test_watching_waits_for_the_first_event(eventless, run, at, call, tmp_path):
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "agent.jsonl").touch()
    at(15).then = run
    told = call("status", eventless, tmp_path, "--watch", "--json")
    assert [json.loads(one)["state"] for one in told.stdout.splitlines()] == ["unknown", "done"]


def test_the_page_of_such_a_repository_shows_its_checkpoints(eventless, call, tmp_path):
    assert call("report", eventless, "-o", tmp_path / "run.html", "--verify").status == 0
    page = (tmp_path / "run.html").read_text()
    assert "The run wrote no events here" in page
    assert "1970" not in page
    for one in eventless.glob("checkpoint-*"):
        assert one.name in page


def test_what_is_no_repository_either_is_refused(tmp_path, call):
    told = call("report", tmp_path)
    assert told.status == 66
    assert "no event files" in told.stderr


def test_a_repository_without_events_goes_with_events_that_are_elsewhere(eventless, run, call):
    told = json.loads(call("report", eventless, run(), "--json").stdout)
    assert "events" not in told
    assert told["steps"] == 15
