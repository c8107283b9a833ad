"""``resilient ckpt verify --sample --max-duration``: some of the bytes, and what is said of it."""

from __future__ import annotations

import json
from random import Random

import pytest

from resilient.clock import parse_length
from resilient_cli import survey
from resilient_cli.durations import parse_duration, parse_percentage
from tests.helpers.cli_repositories import flip_bit, truncate_file, write_usual_run


@pytest.fixture
def repo(tmp_path):
    folder = tmp_path / "run"
    write_usual_run(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("sample", ("--sample", "50%")), ("sample-json", ("--sample", "1/1000", "--json")),
     ("sample-time", ("--max-duration", "1h"))],
)  # fmt: skip
def test_it_reads_as_in_the_transcript(name, arguments, repo, call, matches, monkeypatch):
    monkeypatch.setattr(survey, "SystemRandom", lambda: Random(3))
    matches(name, call("ckpt", "verify", "--all", repo, *arguments), repo)


def test_damage_is_found_when_it_is_among_what_is_read(repo, call):
    flip_bit(repo / "checkpoint-25-g2" / "model.r00000.safetensors")
    outcome = call("ckpt", "verify", "--all", repo, "--max-duration", "1h")
    assert outcome.status == 1
    assert "content is not what was committed" in outcome.stdout
    assert "fix: resilient ckpt verify checkpoint-25-g2" in outcome.stdout
    found = json.loads(call("ckpt", "verify", "latest", repo, "--sample", "5%", "--json").stdout)
    assert (found["damaged"], found["sample"]["chunks"]) == (0, 1)


def test_what_is_short_is_found_whatever_is_read_and_told_once(repo, call):
    truncate_file(repo / "checkpoint-25-g2" / "model.r00000.safetensors", 100)
    outcome = call("ckpt", "verify", "step:25", repo, "--max-duration", "1h", "--json")
    (one,) = json.loads(outcome.stdout)["checkpoints"]
    assert [it["file"] for it in one["findings"]] == ["model.r00000.safetensors"]


def test_it_stops_when_the_time_is_over(repo, call, monkeypatch):
    class Clock:
        """Takes ten seconds whenever it is asked."""

        seconds = 0.0

        def monotonic_seconds(self):
            self.seconds += 10.0
            return self.seconds

    monkeypatch.setattr(survey, "SystemClock", Clock)
    outcome = call("ckpt", "verify", "--all", repo, "--max-duration", "35s", "--json")
    found = json.loads(outcome.stdout)["sample"]
    assert (outcome.status, found["is_over"]) == (0, True)
    assert 0 < found["chunks"] < found["of"]
    said = call("ckpt", "verify", "--all", repo, "--max-duration", "35s").stdout
    assert "then the time limit was reached" in said


@pytest.mark.parametrize(
    "arguments",
    [("--sample", "0%"), ("--sample", "101%"), ("--sample", "1/0"), ("--sample", "some"),
     ("--max-duration", "0s"), ("--max-duration", "10"),
     ("--sample", "5%", "--level", "quick"), ("--sample", "5%", "--level", "deep")],
)  # fmt: skip
def test_what_is_no_share_and_no_length_is_refused(arguments, repo, call):
    outcome = call("ckpt", "verify", "--all", repo, *arguments)
    assert (outcome.status, outcome.stdout) == (2, "")


def test_lengths_and_shares_are_as_they_are_spelt():
    assert [parse_length(one) for one in ("30s", "1.5 m", "2H", "1d", "5", "m")] == [
        30.0, 90.0, 7200.0, 86400.0, None, None,
    ]  # fmt: skip
    assert parse_duration("10m", "--x") == 600
    shares = [parse_percentage(one, "--x") for one in ("5%", "1/20", "100 %")]
    assert shares == [0.05, 0.05, 1.0]
