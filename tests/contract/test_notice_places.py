"""Notices of schedulers, files, URLs and calls: as told, garbled, and not there."""

from __future__ import annotations

import json
import os
import stat
import time
from datetime import datetime

import pytest

from resilient.clock import SystemClock
from resilient.elastic.preemption.local_sources import (
    FileSource,
    HookSource,
    PolledSource,
    SlurmSource,
)
from resilient.elastic.preemption.metadata_http import MetadataRequest, http_get
from resilient.elastic.preemption.notice import Notice, SourceGarbled, SourceLost, unix_seconds
from resilient.errors import ConfigError
from tests.helpers.metadata import Plain, serving

CLOCK = SystemClock()
TOKEN = "open-sesame"  # noqa: S105


def left(notice):
    return notice.at_seconds - unix_seconds(CLOCK)


@pytest.fixture
def plain():
    with serving(Plain()) as server:
        yield server


def scontrol(folder, text, status=0):
    path = folder / "scontrol"
    path.write_text(f"#!/bin/sh\n[ \"$*\" = 'show job -o 77' ] || exit 9\n{text}\nexit {status}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return str(path)


JOB = {"SLURM_JOB_ID": "77"}


def test_slurm_knows_the_end_of_the_job_and_of_one_that_was_extended(tmp_path):
    says = "echo 'JobId=77 JobState=RUNNING EndTime=2026-11-22T18:00:00 Deadline=N/A'"
    environ = {**JOB, "SLURM_JOB_END_TIME": "1000"}
    notice = SlurmSource(environ, scontrol(tmp_path, says)).look()
    expected = datetime.fromisoformat("2026-11-22T18:00:00").astimezone().timestamp()
    assert notice == Notice("slurm: end of job 77", expected, is_for_all=True)


def test_without_scontrol_the_environment_says_when_the_job_ends(tmp_path):
    environ = {**JOB, "SLURM_JOB_END_TIME": "1790000000"}
    for program in ("", scontrol(tmp_path, "", 1), str(tmp_path / "absent")):
        assert SlurmSource(environ, program).look().at_seconds == 1790000000


def test_a_job_without_an_end_is_no_notice(tmp_path):
    assert SlurmSource(JOB, scontrol(tmp_path, "echo JobId=77 EndTime=Unknown")).look() is None
    assert SlurmSource(JOB, "").look() is None


def test_slurm_that_does_not_answer_or_makes_no_sense(tmp_path):
    with pytest.raises(SourceLost, match="ended with 1"):
        SlurmSource(JOB, scontrol(tmp_path, "", 1)).look()
    for text in ("EndTime=soon", "nothing"):
        with pytest.raises(SourceGarbled):
            SlurmSource(JOB, scontrol(tmp_path, f"echo {text}")).look()
    with pytest.raises(SourceGarbled):
        SlurmSource({**JOB, "SLURM_JOB_END_TIME": "noon"}, "").look()
    with pytest.raises(ConfigError, match="not a SLURM job"):
        SlurmSource({})


def test_a_file_says_it_by_being_there(tmp_path):
    path = tmp_path / "stop"
    source = FileSource(str(path))
    assert source.look() is None
    path.touch()
    assert source.look() == Notice("file: asked to stop", None)
    path.write_text(json.dumps({"reason": "maintenance", "seconds": 90}))
    os.utime(path, (1000, 1000))
    assert source.look() == Notice("file: maintenance", 1090)
    path.write_text('{"at": "2026-11-22T18:00:00Z"}')
    assert source.look().at_seconds == datetime.fromisoformat("2026-11-22T18:00:00Z").timestamp()
    path.unlink()
    assert source.look() is None


@pytest.mark.parametrize("when", [{}, {"seconds": 5}, {"at": "2026-11-22T18:00:00Z"}])
def test_a_file_says_whether_it_is_for_this_host_or_the_whole_run(tmp_path, when):
    path = tmp_path / "stop"
    for is_for_all in (True, False):
        path.write_text(json.dumps({**when, "all": is_for_all}))
        assert FileSource(str(path)).look().is_for_all is is_for_all


@pytest.mark.parametrize(
    "text", ['{"sec', "[1]", '{"seconds": -1}', '{"at": "x"}', '{"seconds": true}', '{"all": 1}']
)
def test_a_file_that_is_half_written_or_nonsense_is_no_notice(tmp_path, text):
    (tmp_path / "stop").write_text(text)
    with pytest.raises(SourceGarbled):
        FileSource(str(tmp_path / "stop")).look()


def test_a_file_that_cannot_be_read_is_a_source_that_is_lost(tmp_path):
    with pytest.raises(SourceLost, match="cannot read"):
        FileSource(str(tmp_path)).look()


def test_a_url_says_it_with_200_and_its_seconds_count_from_the_first_time(plain):
    source = PolledSource(CLOCK, f"{plain.url}/notice?secret=1")
    assert source.look() is None
    plain.set(status=200, body='{"reason": "moving", "seconds": 60}')
    first = source.look()
    time.sleep(0.05)
    assert source.look() == first
    assert 59 < left(first) <= 60
    assert "secret" not in source.name
    plain.set(status=500)
    with pytest.raises(SourceLost, match="status 500"):
        source.look()


@pytest.fixture
def hook():
    source = HookSource(CLOCK, "127.0.0.1", 0, TOKEN)
    yield source
    source.close()


def call(source, method="POST", body=None, path="/stop", token=TOKEN):
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return http_get(
        MetadataRequest(f"http://127.0.0.1:{source.port}{path}", method, headers, body)
    ).status


def test_a_call_of_the_hook_is_a_notice(hook):
    assert hook.look() is None
    assert call(hook, body=b'{"reason": "drain", "seconds": 15}') == 202
    assert hook.look().reason == "http: drain"
    assert 13 < left(hook.look()) <= 15


def test_a_hook_of_kubernetes_can_only_get(hook):
    assert call(hook, "GET") == 202
    assert hook.look() == Notice("http: asked to stop", None)


@pytest.mark.parametrize(
    ("status", "given"),
    [
        (401, {"token": ""}),
        (401, {"token": "guess"}),
        (404, {"path": "/"}),
        (400, {"body": b"{"}),
        (400, {"body": b"[]"}),
        (400, {"body": b'{"seconds": "x"}'}),
    ],
)
def test_a_call_that_is_not_right_is_no_notice(hook, status, given):
    assert call(hook, **given) == status
    assert hook.look() is None


def test_a_port_that_is_taken_is_told_before_anything_starts(hook):
    with pytest.raises(ConfigError, match="cannot listen"):
        HookSource(CLOCK, "127.0.0.1", hook.port)
