"""Programs that tests fork: to the test they are what a fresh interpreter would be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.process import forked

TELL = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "folder": os.getcwd(), "parent": os.getppid(), "session": os.getsid(0),
    "mine": os.environ.get("MINE"), "path": sys.path[0], "name": __name__,
    "threads": len(os.listdir("/proc/self/task")), "files": os.listdir("/proc/self/fd"),
    "is_forked": "torch" in sys.modules,
}))
"""
ENDS = {
    "sys.exit(7)": 7,
    "raise ValueError('boom')": 1,
    "os.kill(os.getpid(), signal.SIGKILL)": -signal.SIGKILL,
    "raise KeyboardInterrupt": -signal.SIGINT,
    "os._exit(75)": 75,
}


@pytest.fixture(autouse=True)
def forking(monkeypatch):
    """Fork programs in these tests."""
    if not forked.is_plain():
        pytest.skip("a signal is ignored here, and a forked program would not ignore it")
    monkeypatch.setattr(forked, "PLAIN", False)


def program(folder, text):
    path = folder / "program.py"
    path.write_text(f"import os, signal, sys\n{text}\n", encoding="utf-8")
    return [sys.executable, str(path)]


def told(run, command, folder, **options):
    done = run(
        [*command, "a", "b c"], cwd=folder, check=True, capture_output=True, text=True, **options
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("new_session", [False, True])
def test_a_forked_program_sees_what_a_fresh_one_sees(tmp_path, new_session):
    options = {"env": {**os.environ, "MINE": "1"}, "start_new_session": new_session}
    command = program(tmp_path, TELL)
    ours = told(forked.run, command, tmp_path, **options)
    theirs = told(subprocess.run, command, tmp_path, **options)
    assert (ours.pop("is_forked"), theirs.pop("is_forked")) == (True, False)
    own_session = [one.pop("session") not in (0, os.getsid(0)) for one in (ours, theirs)]
    assert own_session == [new_session, new_session]
    assert ours == theirs


@pytest.mark.parametrize("text", ENDS)
def test_the_end_of_a_forked_program_is_that_of_a_fresh_one(tmp_path, text):
    command = program(tmp_path, text)
    ours, theirs = (
        run(command, check=False, capture_output=True, text=True)
        for run in (forked.run, subprocess.run)
    )
    assert ours.returncode == theirs.returncode == ENDS[text]
    assert (ours.stdout, ours.stderr) == (theirs.stdout, theirs.stderr)


def test_a_forked_program_can_be_stopped_continued_and_terminated(tmp_path):
    command = program(tmp_path, "print('ready', flush=True)\nsignal.pause()")
    with forked.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        process.send_signal(signal.SIGCONT)
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM


def test_two_programs_in_a_row_have_other_hash_seeds(tmp_path):
    command = program(tmp_path, "print(hash('x'))")
    said = [forked.run(command, capture_output=True, text=True).stdout for _ in range(2)]
    assert said[0] != said[1]


def test_variables_that_imports_read_get_a_fresh_interpreter(tmp_path):
    forked.run(program(tmp_path, ""), check=True)
    environ = {**os.environ, "OMP_NUM_THREADS": "3"}
    assert not told(forked.run, program(tmp_path, TELL), tmp_path, env=environ)["is_forked"]


def test_workers_of_a_forked_agent_are_forked(tmp_path):
    """A worker that was not forked has not imported torch when its script begins."""
    text = "print(json.dumps(['torch' in sys.modules, sys.argv[1:], sys.path[0], __name__]))"
    (tmp_path / "script.py").write_text(f"import json, sys\n{text}\n", encoding="utf-8")
    command = [sys.executable, "-m", "resilient_cli", "train", "--nproc-per-node", "2"]
    done = forked.run(
        [*command, "script.py", "a"], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    lines = [line[line.index("[true") :] for line in done.stdout.splitlines() if "[true" in line]
    assert [json.loads(line) for line in lines] == [[True, ["a"], str(tmp_path), "__main__"]] * 2


def test_a_worker_that_would_import_other_things_is_not_forked(tmp_path):
    (tmp_path / "script.py").write_text("import sys\nprint('torch' in sys.modules)\n")
    command = [sys.executable, "-m", "resilient_cli", "train", "--nproc-per-node", "2"]
    environ = {name: one for name, one in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = forked.run(
        [*command, "script.py"],
        cwd=tmp_path, env=environ, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.count("False") == 2
