"""``resilient completion``: what shells offer, asked by the shells themselves where they are."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from resilient.checkpoint.catalog import committed
from resilient.checkpoint.refs import create_tag
from resilient.clock import SystemClock
from resilient.storage.local import LocalStore
from resilient_cli.app import main
from resilient_cli.repositories import references
from tests.helpers.cli_repositories import write_usual_run


@pytest.fixture
def run(tmp_path):
    write_usual_run(tmp_path)
    store = LocalStore(tmp_path)
    create_tag(store, "release", committed(store)[-1], SystemClock())
    return tmp_path


@pytest.fixture
def offered(monkeypatch, capsys):
    """Return what our program offers a shell for a line that is being typed."""

    def ask(line, shell="zsh"):
        monkeypatch.setenv("_RESILIENT_COMPLETE", f"complete_{shell}")
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
        with pytest.raises(SystemExit) as ended:
            main([])
        assert ended.value.code == 0
        return capsys.readouterr().out

    return ask


def test_commands_and_what_they_do_are_offered(offered):
    said = offered("resilient ")
    assert '"train":"Run a training script' in said
    assert '"verify":' in offered("resilient ckpt v")
    assert '"--keep-last":' in offered("resilient ckpt prune --keep-l")


def test_a_repository_s_references_are_offered(offered, run, monkeypatch):
    said = offered(f"resilient ckpt inspect --repo {run} ")
    for one in committed(LocalStore(run)):
        assert f'"{one.folder}":' in said
    assert '"release":"tag"' in said
    assert '"latest":' not in offered(f"resilient ckpt inspect --repo {run} rel")
    monkeypatch.setenv("RESILIENT_REPO", str(run))
    assert '"release":"tag"' in offered("resilient ckpt tag rel")


@pytest.mark.parametrize("repo", ["", "nowhere", "s3://bucket/run?what", "nonsense://x"])
def test_a_repository_that_cannot_be_read_offers_nothing_and_says_nothing(repo, offered):
    option = f"--repo {repo} " if repo else ""
    assert '":"' not in offered(f"resilient ckpt inspect {option}lat")


def test_no_manifest_is_read(run):
    for one in committed(LocalStore(run)):
        (run / one.folder / "manifest.json").write_bytes(b"\0")
    assert len(references(LocalStore(run))) > 3


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "pwsh"])
def test_the_script_of_a_shell_calls_our_program(shell, call):
    outcome = call("completion", shell)
    assert outcome.status == 0
    assert "_RESILIENT_COMPLETE" in outcome.stdout
    assert call("completion", "tcsh").status == 2


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_takes_the_script(shell, call, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "script"
    script.write_text(call("completion", shell).stdout, encoding="utf-8")
    checked = subprocess.run(
        [shell, "-n", script], check=False, capture_output=True, text=True, timeout=60
    )
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_a_tag(call, run, tmp_path):
    program = tmp_path / "bin" / "resilient"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nexec {sys.executable} -m resilient_cli\n", encoding="utf-8")
    program.chmod(0o755)
    lines = [
        call("completion", "bash").stdout,
        "COMP_WORDS=(resilient ckpt inspect rel) COMP_CWORD=3",
        f"_resilient_completion {program}",
        'printf "%s\\n" "${COMPREPLY[@]}"',
    ]
    asked = subprocess.run(
        ["bash", "-c", f"export RESILIENT_REPO={run}\n" + "\n".join(lines)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert asked.stdout == "release\n"
