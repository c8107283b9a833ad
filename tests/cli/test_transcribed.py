"""Every command of the tree has a transcript of its text and one of its JSON."""

from __future__ import annotations

import re

import pytest
from cli_repositories import write_usual_run
from hf_runs import HERE
from test_schemas import TRANSCRIPTS as IN_JSON
from test_schemas import leaves

from resilient_cli.tree import COMMANDS
from tests.cli.conftest import TRANSCRIPTS

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

UNTOLD = {
    "train": "it says what its ranks say; test_train.py holds its plan",
    "ui": "a port and a token of this moment; test_ui.py holds its line",
    "stop": "a process of this moment; test_stopping.py holds both answers",
    "doctor": "what this machine is; test_doctor.py holds it",
}
"""What no two machines answer alike; the test that is named holds the answer itself."""

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
    return {
        "RUN": str(tmp_path / "run"),
        "THEIRS": str(tmp_path / "theirs"),
        "SOURCE": str(source),
        "PLACE": str(tmp_path),
    }


def told(outcome, place):
    """Return an answer without what differs from machine to machine."""
    text = outcome.transcript(place)
    text = text.replace(str(HERE), "/GOLDEN")
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
    outcome = call(*words, *(["--json"] if form else []))
    assert outcome.status == 0, outcome.stderr

    class Told:
        """The same with what differs taken out."""

        def transcript(self, folder):
            return told(outcome, folder)

    matches(f"{name}{form}", Told(), tmp_path)


def text_of(command):
    """Return the name of the transcript of a command's text."""
    return TEXTS.get(command, command.removeprefix("ckpt.").replace(".", "-"))


@pytest.mark.parametrize("command", sorted({*leaves(COMMANDS)} - {*UNTOLD}))
def test_every_command_has_both(command):
    text = TRANSCRIPTS / f"{text_of(command)}.txt"
    assert text.is_file()
    assert '"schema": "' not in text.read_text(encoding="utf-8")
    schema = f'"schema": "resilient/{command}@1"'
    assert any(schema in one for one in IN_JSON.values())


def test_what_has_none_is_in_the_tree_and_says_why():
    assert {*UNTOLD} < {*leaves(COMMANDS)}
    for why in UNTOLD.values():
        file = re.search(r"test_\w+\.py", why)
        assert (TRANSCRIPTS.parent / file[0]).is_file()
