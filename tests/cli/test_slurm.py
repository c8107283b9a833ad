"""``resilient slurm``: the script that it renders, and what it refuses; real SLURM: tests/slurm."""

from __future__ import annotations

import json
import subprocess

import pytest

from resilient.errors import EXIT_CODES, PERMANENT
from resilient_cli.slurm.client import parse
from resilient_cli.slurm.script import SlurmJob, parse_nodes, parse_time, render

TRAIN = ("--", "train", "--repo", "s3://lab/run", "train.py")
ARRAY = ("--", "train", "--repo", "s3://lab/run-{task}", "train.py", "--seed", "{task}")
FULL = (
    *("--name", "gpt2", "--nodes", "2-4", "--time", "4:00:00", "--partition", "spot"),
    *("--gpus", "a100:8", "--cpus", "32", "--memory", "256G", "--logs", "logs/gpt2"),
    *("--env", "NCCL_DEBUG=it's so", "--env", "AWS_SECRET_ACCESS_KEY"),
    *("--setup", "source .venv/bin/activate", "--max-failures", "9"),
)
STATE = (
    "JobId=12 {task}JobName=gpt2 JobState={state} Reason={reason} Restarts=2 ExitCode={code} "
    "EndTime=2026-11-23T14:45:39 Partition=low NodeList={nodes} StdOut=/logs/gpt2-12.log Power= "
)


def state(state, reason="None", nodes="n1", code="0:0", task=""):
    return STATE.format(state=state, reason=reason, nodes=nodes, code=code, task=task)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Put programs into the place of SLURM's, which say what a test wants."""
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs), prepend=":")

    def program(name, text):
        path = programs / name
        path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        path.chmod(0o755)

    return program


@pytest.fixture
def seen(call, matches, tmp_path):
    """Call the program and hold what it says against a transcript."""

    def look(name, *arguments):
        ended = call(*arguments)
        matches(name, ended, tmp_path)
        return ended

    return look


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("slurm-render", TRAIN),
        ("slurm-render-full", (*FULL, *TRAIN)),
        ("slurm-render-array", ("--array", "0-7%2", *ARRAY)),
        ("slurm-render-json", ("--json", *TRAIN)),
    ],
)
def test_scripts_are_those_of_the_transcripts(name, options, seen):
    ended = seen(name, "slurm", "render", *options)
    script = json.loads(ended.stdout)["script"] if "--json" in options else ended.stdout
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_submit_dry_run_prints_what_render_does(call):
    rendered = call("slurm", "render", *FULL, *TRAIN).stdout
    assert call("slurm", "submit", "--dry-run", *FULL, *TRAIN).stdout == rendered


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        ((), 2, "slurm needs a training to run"),
        (("--setup", "curl -H 'Authorization: Bearer x' h", *TRAIN), 78, "Authorization"),
        (("--", "train"), 2, "slurm needs a training to run"),
        (("--", "report", "runs/x"), 2, "slurm needs a training to run"),
        (("--name", "a b", *TRAIN), 78, "--name 'a b' is not letters"),
        (("--name", "a\n#SBATCH --uid=0", *TRAIN), 78, "--name"),
        (("--partition", "x --uid=0", *TRAIN), 78, "--partition"),
        (("--gpus", "many", *TRAIN), 78, "--gpus 'many' is not N or TYPE:N"),
        (("--memory", "lots", *TRAIN), 78, "--memory 'lots' is not a size"),
        (("--nodes", "4-2", *TRAIN), 78, "at most 2 is less than at least 4"),
        (("--nodes", "0", *TRAIN), 78, "--nodes '0' is not N or MIN-MAX"),
        (("--time", "soon", *TRAIN), 78, "--time 'soon' is not MINUTES"),
        (("--time", "3", *TRAIN), 78, "the run exits 120 s before its end"),
        (("--time", "1", "--", "train", "--notice", "off", "t.py"), 78, "exits 30 s before"),
        (("--array", "a-b", *TRAIN), 78, "--array 'a-b' is not as for sbatch"),
        (("--array", "0-7", *TRAIN), 78, "all its tasks would write to one repository"),
        (ARRAY, 78, "and --array is missing"),
        (("--logs", "my logs", *TRAIN), 78, "--logs 'my logs' is not a folder without blanks"),
        (("--env", "A-B=1", *TRAIN), 78, "--env 'A-B' is not the name of a variable"),
        (("--env", "A=1", "--env", "A=2", *TRAIN), 78, "--env A is given twice"),
        (("--env", "HF_TOKEN=hf_x", *TRAIN), 78, "its value would be visible in the script"),
        (("--env", "PROXY=http://me:pw@x", *TRAIN), 78, "its value would be visible in the script"),
        (("--env", "A=1\nrm -r x", *TRAIN), 78, "has more than one line"),
        (("--setup", "a\nb", *TRAIN), 78, "--setup takes one line"),
        (("--setup", "export HF_TOKEN=pw", *TRAIN), 78, "--setup: the value of HF_TOKEN"),
        (("--setup", "cd x; API_KEY='pw' y", *TRAIN), 78, "--setup: the value of API_KEY"),
        ((*TRAIN, "--hf_token=pw"), 78, "--hf_token: its value would be visible in the script"),
        ((*TRAIN, "--api-key", "pw"), 78, "--api-key: its value would be visible in the script"),
        (
            ("--", "train", "--repo", "s3://me:pw@h/b", "t.py"),
            78,
            "a user, a password or a signature",
        ),
        (("--", "train", "--storage-options", "{}", "t.py"), 78, "the script would show them"),
        (
            ("--", "train", "--nnodes", "2", "t.py"),
            78,
            "train --nnodes: the batch script sets the rendezvous",
        ),
        (("--", "train", "--rdzv-id", "x", "t.py"), 78, "train --rdzv-id"),
        (("--", "train", "--requeue-exit-code", "99", "t.py"), 78, "after exit code 75"),
        (("--", "train", "--dry-run", "t.py"), 78, "use the option of `slurm submit`"),
        (("--notice", "20", *TRAIN), 78, "termination: --grace 25 s, SIGKILL 20 s after"),
    ],
)
def test_what_cannot_be_is_refused_and_located(options, status, said, call):
    ended = call("slurm", "render", *options)
    assert (ended.status, ended.stdout) == (status, ""), ended.stderr
    assert said in ended.stderr
    assert "pw" not in ended.stderr


def test_grace_and_lead_come_from_what_saves_took(tmp_path, call):
    lines = [
        json.dumps({"event": "CheckpointCommitted", "commit_seconds": one})
        for one in (*([20.0] * 19), 61.5)
    ]
    lines.append(json.dumps({"event": "CheckpointPromoted", "took_seconds": 30.2}))
    (tmp_path / "rank-0.jsonl").write_text("\n".join(lines), encoding="utf-8")
    by_events = ("slurm", "render", "--events", tmp_path, "--json")
    document = json.loads(call(*by_events, *TRAIN).stdout)
    # 95 of 100 saves take 20 s or less.
    assert (document["grace_seconds"], document["lead_seconds"]) == (56, 61)
    assert "--signal=B:USR1@61\n" in document["script"]
    short = call(*by_events, "--", "train", "--grace", "40", "t.py")
    assert short.status == 78
    assert "55.2 s of --grace 40 s" in short.stderr
    told = call("slurm", "render", "--events", tmp_path / "nothing", *TRAIN)
    assert "no event files in" in told.stderr


def test_a_grace_of_the_command_stands_once(call):
    script = call("slurm", "render", "--", "train", "--grace", "40", "t.py").stdout
    assert script.count("--grace") == 1
    assert "--signal=B:USR1@45\n" in script


def test_each_code_of_the_table_is_answered_as_the_table_says():
    script = render(SlurmJob("x", ("t.py",)))
    said = [one for one in script.splitlines() if "another start would fail" in one]
    assert {int(one) for one in said[0].split(")")[0].split("|")} == set(PERMANENT)
    told = {one.number for one in EXIT_CODES if one.scheduler.startswith("fail")}
    assert told == set(PERMANENT) == {2, 3, 65, 66, 70, 77, 78}


@pytest.mark.parametrize(("writes", "requeues"), [(True, 2), (False, 0)])
def test_a_failure_that_cannot_be_counted_is_the_last(writes, requeues, tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {
        "srun": "exit 9",
        "scontrol": f'[ "$1" = show ] || echo "$*" >> {tmp_path}/said; echo JobState=RUNNING',
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    logs = tmp_path / "logs"
    logs.mkdir() if writes else logs.write_text("no folder")
    script = render(SlurmJob("x", ("t.py",), logs=str(logs), failures_max=3))
    environ = {"PATH": f"{programs}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "x"}
    for _ in range(3):
        done = subprocess.run(
            ["bash", "-c", script],
            env={**environ, "SLURM_JOB_NODELIST": "n1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
        assert done.returncode == 9, done.stderr
    said = tmp_path / "said"
    asked = said.read_text().splitlines() if said.exists() else []
    assert asked == ["requeue 7"] * requeues
    assert ("cannot be written: job 7 is not requeued" in done.stderr) is not writes


def test_a_value_of_the_environment_is_only_text():
    value = "a $(touch x) `y` 'z' \"w\" \\"
    script = render(SlurmJob("x", ("t.py",), environment=(("TRICK", value),)))
    line = next(one for one in script.splitlines() if one.startswith("export TRICK="))
    done = subprocess.run(
        ["bash", "-c", f'{line}\nprintf %s "$TRICK"'], capture_output=True, text=True, check=True
    )
    assert done.stdout == value


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("90", 5400), ("90:30", 5430), ("4:00:00", 14400)),
        *(("1-0", 86400), ("1-12", 129600), ("1-12:30", 131400), ("1-12:30:05", 131405)),
    ],
)
def test_times_are_read_as_slurm_reads_them(text, seconds):
    assert parse_time(text) == seconds


def test_nodes_are_read_with_either_sign():
    assert parse_nodes("2-4") == parse_nodes("2:4") == (2, 4)
    assert parse_nodes("3") == (3, 3)


def test_submit_makes_the_folder_for_logs_and_tells_the_number(slurm, call, tmp_path, seen):
    slurm("sbatch", f"cat > {tmp_path}/given; echo '12;cluster'")
    slurm("scontrol", f"echo '{state('PENDING', nodes='(null)')}'")
    logs = ("--logs", tmp_path / "new" / "logs")
    assert seen("slurm-submit", "slurm", "submit", *logs, *TRAIN).status == 0
    assert (tmp_path / "new" / "logs").is_dir()
    assert seen("slurm-submit-json", "slurm", "submit", "--json", *logs, *TRAIN).status == 0
    assert (tmp_path / "given").read_text() == call("slurm", "render", *logs, *TRAIN).stdout


@pytest.mark.parametrize("words", ["echo 'Unable to contact slurm' >&2; exit 1", "exit 1"])
def test_a_job_that_was_submitted_is_told_though_slurm_says_no_more(words, slurm, call, tmp_path):
    slurm("sbatch", "cat > /dev/null; echo 12")
    slurm("scontrol", words)
    ended = call("slurm", "submit", "--logs", tmp_path, "-q", *TRAIN)
    assert (ended.status, ended.stdout) == (0, "12\n"), ended.stderr


@pytest.mark.parametrize(
    "options",
    [
        ("--setup", "export HF_TOKEN=$(cat ~/.token)", *TRAIN),
        ("--setup", 'export API_KEY="$OTHER"', *TRAIN),
        (*TRAIN, "--max_new_tokens", "5", "--pad_token", "x", "--tokenizer_name=y"),
    ],
)
def test_what_only_sounds_like_a_secret_is_rendered(options, call):
    ended = call("slurm", "render", *options)
    assert ended.status == 0, ended.stderr


@pytest.mark.parametrize(
    ("program", "status", "said"),
    [
        ("echo 'sbatch: error: invalid partition specified: x' >&2; exit 1", 78, "invalid part"),
        ("echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1", 69, "answer"),
    ],
)
def test_what_slurm_refuses_is_told(program, status, said, slurm, call, tmp_path):
    slurm("sbatch", program)
    ended = call("slurm", "submit", "--logs", tmp_path, *TRAIN)
    assert (ended.status, ended.stdout) == (status, "")
    assert said in ended.stderr


def test_a_machine_without_slurm_says_so(monkeypatch, call, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    ended = call("slurm", "status", "12")
    assert ended.status == 78
    assert "no scontrol on this machine" in ended.stderr


@pytest.mark.parametrize(
    ("name", "options", "status", "lines"),
    [
        ("slurm-status", (), 0, [state("RUNNING")]),
        ("slurm-status-json", ("--json",), 1, [state("FAILED", "NonZeroExitCode", code="70:0")]),
        (
            "slurm-status-array",
            (),
            1,
            [
                state("COMPLETED", task="ArrayJobId=11 ArrayTaskId=0 "),
                state("FAILED", "NonZeroExitCode", code="0:9", task="ArrayJobId=11 ArrayTaskId=1 "),
                state("PENDING", "Resources", "(null)", task="ArrayJobId=11 ArrayTaskId=2 "),
            ],
        ),
    ],
)
def test_states_are_those_of_the_transcripts(name, options, status, lines, slurm, seen):
    slurm("scontrol", "\n".join(f"echo '{one}'" for one in lines))
    assert seen(name, "slurm", "status", "12", *options).status == status


def test_a_job_that_slurm_does_not_know_is_66_and_a_word_is_no_job(slurm, call):
    slurm("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    ended = call("slurm", "status", "12")
    assert ended.status == 66
    assert "sacct -j 12" in ended.stderr
    assert call("slurm", "status", "12;ls").status == 78


def test_tasks_that_still_wait_together_have_the_number_of_the_array():
    assert parse(state("PENDING", task="ArrayJobId=12 ArrayTaskId=3-7 ")).job == "12"
