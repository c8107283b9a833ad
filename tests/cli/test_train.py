"""`resilient train`: its options, and its plan as text and as JSON."""

import json
import socket

import pytest


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("", encoding="utf-8")
    return path


def test_the_plan_is_one_json_document(call, script):
    ended = call("train", "--dry-run", "--json", "--nproc-per-node", "2", "--rdzv-id", "a", script)
    assert ended.status == 0, ended.stderr
    plan = json.loads(ended.stdout)
    assert (plan["schema"], plan["type"]) == ("resilient/train@1", "plan")
    assert plan["workers_per_node"] == 2
    assert plan["rendezvous"] == {"backend": "c10d", "endpoint": "localhost:0", "run_id": "a"}
    assert plan["repository"] is None
    assert plan["limits"]["preemptions_max"] is None
    assert {
        "ended": "succeeded",
        "how": "all workers ended with 0",
        "follows": "finish with 0",
    } in (plan["reactions"])


def test_the_plan_is_text_for_people(call, script):
    ended = call("train", "--dry-run", "--repo", "https://user:secret@host/run", script)
    assert "workers     1 per node" in ended.stdout
    assert "budget      3 restarts in 3600 s, any number of preemptions" in ended.stdout
    assert "restart on another host: exit here with 71" in ended.stdout
    assert "secret" not in ended.stdout
    assert "saves       decided by the script" in ended.stdout


def test_the_plan_says_how_often_it_saves(call, script):
    ended = call("train", "--dry-run", "--every", "5m", script)
    assert "saves       every 5m" in ended.stdout
    assert json.loads(call("train", "--dry-run", "--json", script).stdout)["every"] is None


def test_the_plan_says_who_gives_notice_and_how_long_ranks_have(call, script, tmp_path):
    options = ("--notice", f"file:{tmp_path}/notice", "--grace", "40")
    ended = call("train", "--dry-run", *options, script)
    assert f"notices     file {tmp_path}/notice; 40 s to exit" in ended.stdout
    plan = json.loads(call("train", "--dry-run", "--json", *options, script).stdout)
    assert (len(plan["notices"]), plan["grace_seconds"]) == (1, 40.0)
    ended = call("train", "--dry-run", "--notice", "http:0", script)
    assert "notices     http 127.0.0.1:" in ended.stdout
    ended = call("train", "--dry-run", "--notice", "off", script)
    assert "notices     none" in ended.stdout


def test_the_plan_says_after_which_step_it_ends(call, script):
    ended = call("train", "--dry-run", "--until-step", "500", script)
    assert "ends        after step 500" in ended.stdout
    ended = call("train", "--dry-run", "--json", "--until-step", "500", script)
    assert json.loads(ended.stdout)["until_step"] == 500
    assert call("train", "--dry-run", "--until-step", "0", script).status == 2


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--max-preemptions", "some"), "neither a number nor unlimited"),
        (("--hang-deadline", "soon"), "is not auto, off"),
        (("--notice", "bogus"), "--notice takes auto, off"),
        (("--every", "soon"), "--every 'soon' is not accepted: use 500steps"),
        (("--metrics-port", "free"), "not a port or auto"),
    ],
)
def test_a_plan_is_checked_before_it_is_printed(call, script, options, why):
    ended = call("train", "--dry-run", *options, script)
    assert ended.status == 78
    assert why in ended.stderr
    assert ended.stdout == ""


def test_torchruns_underscores_are_understood_and_the_scripts_own_are_kept(call, script):
    options = ("--nproc_per_node=3", "--rdzv_backend", "c10d", "--max_restarts", "1")
    ended = call("train", "--dry-run", "--json", *options, script, "--my_option", "a_b")
    assert ended.status == 0, ended.stderr
    plan = json.loads(ended.stdout)
    assert plan["workers_per_node"] == 3
    assert plan["command"].endswith("--my_option a_b")


@pytest.mark.parametrize(("options", "most"), [((), 3), (("--max-no-progress", "0"), 0)])
def test_how_many_lives_without_progress_are_a_crash_loop_is_said(call, script, options, most):
    ended = call("train", "--dry-run", "--json", *options, script)
    plan = json.loads(ended.stdout)
    assert plan["limits"]["no_progress_lives_max"] == most
    assert {
        "ended": "failed",
        "how": "a rank that trained was killed from outside",
        "follows": "restart in place, one restart less",
    } in plan["reactions"]


@pytest.mark.parametrize(
    ("option", "name"),
    [("--tee", "--tee"), ("--logs_specs", "--logs-specs"), ("--redirects", None)],
)
def test_an_option_that_only_torchrun_has_is_named_as_such(call, script, option, name):
    ended = call("train", option, "3", script)
    assert ended.status == 2
    assert f"no option `{name or option}`: it exists only in torchrun" in ended.stderr
    assert "hint: resilient train --log-dir FOLDER" in ended.stderr
    assert "Did you mean" not in ended.stderr


def test_a_metrics_port_that_is_taken_is_told_before_anything_starts(call, script, tmp_path):
    script.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')", encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = call("train", "--metrics-port", taken.getsockname()[1], script)
    assert ended.status == 78
    assert "--metrics-port: cannot listen at 127.0.0.1:" in ended.stderr
    assert "--metrics-port auto" in ended.stderr
    assert not (tmp_path / "ran").exists()


def test_a_metrics_file_that_cannot_be_written_is_told_before_anything_starts(call, script):
    ended = call("train", "--metrics-file", script / "run.prom", script)
    assert ended.status == 78
    assert "--metrics-file: cannot write" in ended.stderr


def test_a_program_that_is_no_python_is_run_as_it_is(call, script, tmp_path):
    ended = call("train", "--dry-run", "--json", "--no-python", "sh", "-c", "true")
    assert ended.status == 0, ended.stderr
    assert json.loads(ended.stdout)["command"].endswith("bootstrap.py --exec sh -c true")
    for options, status, why in (
        (("--no-python", tmp_path / "no"), 66, "no program"),
        (("--no-python", script), 66, "no program"),
        (("-m", "--no-python", "sh"), 2, "-m contradicts --no-python"),
    ):
        ended = call("train", "--dry-run", *options)
        assert (ended.status, why in ended.stderr) == (status, True)


@pytest.mark.parametrize(
    ("code", "options", "status"),
    [(75, (), 75), (75, ("--requeue-exit-code", "99"), 99), (70, ("--requeue-exit-code", "99"), 70),
     (0, ("--requeue-exit-code", "99"), 0)],
)  # fmt: skip
def test_other_schedulers_call_requeue_by_another_number(
    code, options, status, call, script, monkeypatch
):
    monkeypatch.setattr("resilient.elastic.launcher.run_agent", lambda _options, _heard: code)
    assert call("train", *options, script).status == status


@pytest.mark.parametrize("code", ["0", "256", "-1"])
def test_a_number_that_no_process_can_end_with_is_refused(code, call, script):
    assert call("train", "--dry-run", "--requeue-exit-code", code, script).status == 2


@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_resume_is_refused_with_both_choices(call, script, value):
    outcome = call("train", "--resume", value, script)
    assert outcome.status == 78
    assert "--resume auto" in outcome.stderr
    assert "--resume never" in outcome.stderr
