"""`resilient train` and notices that its host will be taken away; workers without torch."""

from __future__ import annotations

import json
import time

import pytest

from tests.helpers.agent_harness import wait_until
from tests.helpers.metadata import Aws, Azure, Gcp, iso, serving

SAVES = """
import json

def stop(number, frame):
    told = os.path.join(os.environ["RESILIENT_NOTES"], "stop")
    word = json.load(open(told)) if os.path.exists(told) else {}
    if word:
        word["left"] = word["deadline_seconds"] - time.monotonic()
    say("word", json.dumps(word))
    time.sleep(0.3)
    sys.exit(75)

signal.signal(signal.SIGTERM, stop)
say("ready")
while not os.path.exists("finish"):
    time.sleep(0.02)
"""
TWO = ("--nproc-per-node", "2", "--host-bytes-max", "none")


def words(agent):
    return [json.loads(line) for line in agent.said("word")]


def test_an_interruption_of_a_spot_machine_reaches_every_worker_with_its_deadline(train):
    with serving(Aws()) as aws:
        agent = train(SAVES, *TWO, "--notice", f"aws={aws.url}")
        agent.wait_for("ready", 2)
        aws.set(action={"action": "terminate", "time": iso(60)})
        assert agent.end() == 75, agent.err
    assert [word["reason"] for word in words(agent)] == ["aws: spot terminate"] * 2
    assert all(40 < word["left"] < 60 for word in words(agent))
    assert "notice: aws: spot terminate, this host stops in" in agent.err


@pytest.mark.smoke
def test_a_preemption_of_gcp_is_heard_at_once(train):
    with serving(Gcp()) as gcp:
        agent = train(SAVES, *TWO, "--notice", f"gcp={gcp.url}")
        agent.wait_for("ready", 2)
        wait_until(lambda: any("wait_for_change" in one for one in gcp.asked), "a poll", agent)
        said_at = time.monotonic()
        gcp.set(preempted="TRUE")
        agent.wait_for("word", 1)
        assert time.monotonic() - said_at < 2
        assert agent.end() == 75, agent.err
    assert words(agent)[0]["left"] == pytest.approx(27, abs=2)


def test_azure_is_told_only_when_all_is_saved(train):
    with serving(Azure()) as azure:
        agent = train(SAVES, *TWO, "--notice", f"azure+ack={azure.url}")
        agent.wait_for("ready", 2)
        azure.set(events=[azure.event(seconds=30)])
        agent.wait_for("word", 2)
        assert azure.acknowledged == []
        assert agent.end() == 75, agent.err
    assert len(azure.acknowledged) == 1


def test_an_order_that_leaves_less_time_is_passed_on(train):
    patient = SAVES.replace("sys.exit(75)", "")
    with serving(Aws()) as aws:
        agent = train(patient, "--notice", f"aws={aws.url}", "--grace", "2", *TWO[2:])
        agent.wait_for("ready", 1)
        aws.set(action={"action": "terminate", "time": iso(100)})
        agent.wait_for("word", 1)
        agent.send(15)
        asked = time.monotonic()
        assert agent.end() == 140, agent.err
        assert time.monotonic() - asked < 10
    long, short = words(agent)
    assert long["left"] > 60
    assert short["left"] < 2.1
    assert short["reason"] == "aws: spot terminate, SIGTERM"


def test_a_file_stops_the_run_and_one_that_was_there_before_does_too(train, tmp_path):
    path = tmp_path / "please-stop"
    agent = train(SAVES, *TWO, "--notice", f"file:{path}")
    agent.wait_for("ready", 2)
    path.write_text('{"reason": "rack 7 goes down", "seconds": 40}')
    assert agent.end() == 75, agent.err
    assert words(agent)[0]["reason"] == "file: rack 7 goes down"
    agent = train(SAVES, *TWO, "--notice", f"file:{path}")
    assert agent.end() == 75, agent.err


def test_metadata_that_never_answers_holds_up_neither_start_nor_end(train):
    with serving(Aws()) as aws:
        aws.set(hop_seconds=30.0)
        agent = train(SAVES, *TWO, "--notice", f"aws={aws.url},gcp=http://127.0.0.1:9")
        agent.wait_for("ready", 2)
        wait_until(lambda: "are unavailable" in agent.err, "the report of the loss", agent)
        (agent.folder / "finish").touch()
        began = time.monotonic()
        assert agent.end() == 0, agent.err
        assert time.monotonic() - began < 10


def test_a_notice_before_the_workers_start_ends_with_75_and_starts_none(train):
    with serving(Aws()) as aws:
        aws.set(action={"action": "terminate", "time": iso(60)}, hop_seconds=0.8)
        agent = train(SAVES, *TWO, "--notice", f"aws={aws.url}")
        assert agent.end() == 75, agent.err
    assert "stopped before" in agent.err
    assert not agent.said("ready")


def test_a_user_signal_uses_all_of_what_the_scheduler_left(train):
    """As with ``--signal=USR1@90`` of SLURM: the job's end says how long that is."""
    end = str(time.time_ns() // 10**9 + 3600)
    environ = {"SLURM_JOB_ID": "1", "SLURM_JOB_END_TIME": end}
    agent = train(SAVES, *TWO, "--notice", "slurm", environ=environ)
    agent.wait_for("ready", 2)
    wait_until(lambda: "training continues for" in agent.err, "the end of the job", agent)
    agent.send(10)
    assert agent.end() == 75, agent.err
    assert {word["reason"] for word in words(agent)} == {"SIGUSR1"}
    assert words(agent)[0]["left"] > 3000


@pytest.mark.parametrize("notice", ["amazon", "aws=nowhere", "slurm"])
def test_a_source_that_makes_no_sense_is_refused_before_anything_starts(train, notice):
    agent = train(SAVES, "--notice", notice, environ={"SLURM_JOB_ID": ""})
    assert agent.end() == 78
    assert "--notice" in agent.err
    assert agent.said("pid") == []
