"""Every command of the tree has a transcript of its text and one of its JSON."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import resilient
from resilient_cli.command_tree import COMMANDS
from resilient_cli.commands import doctor
from resilient_cli.preemption_budget import Check
from tests.cli.conftest import TRANSCRIPTS, Outcome
from tests.cli.test_schemas import TRANSCRIPTS as IN_JSON
from tests.cli.test_schemas import leaves
from tests.cli.test_stopping import OBEYS, word
from tests.cli.test_ui import hear_ctrl_c
from tests.helpers.cli_repositories import write_usual_run
from tests.helpers.hf_runs import HERE
from tests.helpers.told import killed_run

TEXTS = {
    "ckpt.verify": "verify-all",
    "chaos.run": "chaos-verdict",
    "k8s.render": "k8s-render-job",
    "k8s.wait": "k8s-wait-failed",
    "k8s.delete": "k8s-delete-dry-run",
    "status": "status-training",
    "ckpt.prune": "prune-dry-run",
}
"""Where it is not the command's last words with a dash between."""

CALLS = {
    "sign": ("ckpt", "sign", "latest", "RUN"),
    "undo-moved": ("ckpt", "undo", "RUN"),
    "untag": ("ckpt", "untag", "release", "RUN"),
    "export": ("ckpt", "export", "latest", "THEIRS", "--out", "PLACE/out"),
    "import": ("ckpt", "import", "SOURCE", "PLACE/ours"),
    "completion": ("completion", "bash"),
    "config-schema": ("config", "schema"),
    "chaos-list": ("chaos", "list"),
    "version": ("version",),
    "train": (
        *["train", "--dry-run", "--nproc-per-node", "2", "--rdzv-id", "a", "--notice", "off"],
        "PLACE/train.py",
    ),
}


@pytest.fixture
def place(tmp_path, call, monkeypatch):
    """A run with a tag and a move to take back, and one that came from another tool."""
    monkeypatch.setenv("RESILIENT_SIGNING_KEY", "k" * 32)
    write_usual_run(tmp_path / "run")
    call("ckpt", "tag", "latest", "release", tmp_path / "run")
    call("ckpt", "rollback", "step:30", tmp_path / "run")
    source = HERE / "gpt2_all" / "run" / "checkpoint-8"
    call("ckpt", "import", source, tmp_path / "theirs")
    (tmp_path / "train.py").touch()
    return {
        "RUN": str(tmp_path / "run"),
        "THEIRS": str(tmp_path / "theirs"),
        "SOURCE": str(source),
        "PLACE": str(tmp_path),
    }


def told(outcome, place):
    """Return an answer without what differs from machine to machine."""
    text = outcome.transcript(place)
    text = text.replace(str(HERE), "/GOLDEN").replace(sys.executable, "PYTHON")
    text = text.replace(str(Path(resilient.__file__).parents[1]), "/SOURCES")
    text = re.sub(r"\b\d\d:\d\d:\d\d\b(?=  )", "CLOCK", text)
    text = re.sub(r"\b\d+\.\d+ s\b", "N s", text)
    text = re.sub(r"\b\d{4}-\d\d-\d\dT[\d:.]+Z", "TIME", text)
    return re.sub(r"\b\d+\.\d+\.\d+(?:[+.]\w+)*\b", "VERSION", text)


@pytest.mark.parametrize("form", ["", "-json"])
@pytest.mark.parametrize("name", CALLS)
def test_what_a_command_answers(name, form, place, call, tmp_path, matches):
    words = [
        re.sub("^(RUN|THEIRS|SOURCE|PLACE)", lambda one: place[one[0]], it) for it in CALLS[name]
    ]
    # What follows a script is the script's.
    at = 1 if name == "train" else len(words)
    words[at:at] = ["--json"] if form else []
    outcome = call(*words)
    assert outcome.status == 0, outcome.stderr

    class Told:
        """The same with what differs taken out."""

        def transcript(self, folder):
            return told(outcome, folder)

    matches(f"{name}{form}", Told(), tmp_path)


class Masked:
    """An answer of a machine, or of a moment, with what only these know taken out."""

    def __init__(self, outcome, masks):
        self.outcome, self.masks = outcome, masks

    def transcript(self, folder):
        text = told(self.outcome, folder)
        for name, pattern in self.masks.items():
            text = re.sub(pattern, name, text)
        return text


@pytest.mark.parametrize("form", ["", "-json"])
def test_what_doctor_answers_on_a_machine_that_is_known(form, call, tmp_path, monkeypatch, matches):
    """The machine's facts are given, and those of the store are real, but for its speed."""
    facts = {
        "package": Check("package", is_ok=True, found="no other distribution named `resilient`"),
        "gpus": Check("gpus", is_ok=True, found="no NVIDIA driver: training is on the CPU"),
        "shared_memory": Check(
            "shared memory", is_ok=True, found="10834 MiB for staged checkpoints"
        ),
        "clock": Check(
            "clock", is_ok=False, found="not synchronised", hint="systemctl start chronyd"
        ),
        "signals": Check("signals", is_ok=True, found="SIGTERM arrives and ends a child"),
    }
    for name, fact in facts.items():
        monkeypatch.setattr(doctor, f"check_{name}", lambda fact=fact: fact)
    ended = call("doctor", "--repo", tmp_path, *(["--json"] if form else []))
    assert ended.status == 1
    masks = {
        "N ms for a small object, N at most": r"[\d.]+ ms for a small object, [\d.]+ at most",
        "N MiB/s for one object": r"[\d.]+ MiB/s for one object",
        "N MiB free": r"\d+ MiB free",
    }
    matches(f"doctor{form}", Masked(ended, masks), tmp_path)


@pytest.mark.parametrize("form", ["", "-json"])
def test_what_stop_answers_when_a_launcher_has_obeyed(form, call, tmp_path, matches):
    file = tmp_path / "agent.jsonl"
    end = word("RunEnded", "PID", later=60, exit_code=75, reason="preempted: 3 steps saved")
    command = [sys.executable, "-c", OBEYS, str(file), end]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        file.write_text(word("AgentStarted", process.pid) + "\n", encoding="utf-8")
        ended = call("stop", tmp_path, *(["--json"] if form else []))
    assert (ended.status, process.returncode) == (0, 75)
    masks = {"4242": rf"\b{process.pid}\b", '"began_ms": 0': r'"began_ms": \d+'}
    matches(f"stop{form}", Masked(ended, masks), tmp_path)


@pytest.mark.parametrize("form", ["", "-json"])
def test_what_ui_answers_until_it_is_interrupted(form, tmp_path, matches):
    (tmp_path / "events").mkdir()
    text = "\n".join(killed_run()) + "\n"
    (tmp_path / "events" / "agent.jsonl").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "resilient_cli", "ui", str(tmp_path)]
    process = subprocess.Popen(
        [*command, *(["--json"] if form else [])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_ctrl_c,  # noqa: PLW1509 - it takes no lock
    )
    lines = 1 if form else 2
    first = "".join(process.stdout.readline() for _ in range(lines))
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    ended = Outcome(process.returncode, first + rest, errors)
    masks = {"http://127.0.0.1:PORT/TOKEN": r"http://VERSION:\d+/[^\s\"]*"}
    matches(f"ui{form}", Masked(ended, masks), tmp_path)


def text_of(command):
    """Return the name of the transcript of a command's text."""
    return TEXTS.get(command, command.removeprefix("ckpt.").replace(".", "-"))


@pytest.mark.parametrize("command", sorted(leaves(COMMANDS)))
def test_every_command_has_both(command):
    text = TRANSCRIPTS / f"{text_of(command)}.txt"
    assert text.is_file()
    assert '"schema": "' not in text.read_text(encoding="utf-8")
    schema = f'"schema": "resilient/{command}@1"'
    assert any(schema in one for one in IN_JSON.values())
