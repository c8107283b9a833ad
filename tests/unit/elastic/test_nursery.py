"""What the process is asked before workers are forked from it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import resilient

FORK_SERVER = Path(resilient.__file__).parent / "elastic" / "workers" / "fork_server.py"
LOAD = f"""
import importlib.util, os, sys, threading, time
spec = importlib.util.spec_from_file_location("fork_server", {str(FORK_SERVER)!r})
fork_server = importlib.util.module_from_spec(spec)
sys.modules["fork_server"] = fork_server
spec.loader.exec_module(fork_server)
"""


def told(code, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", LOAD + code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_process_with_a_thread_that_no_fork_survives_is_unfit():
    start = "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    assert told("print(fork_server.unfit())") == ""
    assert "started 1 threads" in told(start + "print(fork_server.unfit())")


def test_a_process_with_an_open_device_is_unfit():
    device = "fork_server._DEVICES = ('/dev/null',)\nfile = open('/dev/null')\n"
    assert "has opened `/dev/null`" in told(device + "print(fork_server.unfit())")


@pytest.mark.parametrize("whole", [True, False])
def test_a_line_that_is_being_written_is_left_for_later(tmp_path, whole):
    notes = [{"name": "numpy", "variables": {"OMP_NUM_THREADS": "3"}}, {"name": "numpy.random"}]
    text = "".join(json.dumps(one) + "\n" for one in notes)
    (tmp_path / "imports").write_text(text if whole else text[:-5], encoding="utf-8")
    code = (
        "imports = fork_server.PreloadedImports(sys.argv[1])\nimports.look()\n"
        "print(len(imports._pending), imports.is_due())\n"
        "imports.step()\n"
        "print('numpy' in sys.modules, imports.seen, os.environ['OMP_NUM_THREADS'])\n"
    )
    first, second = told(code, str(tmp_path / "imports")).splitlines()
    assert first == f"{2 if whole else 1} False"
    assert second == "True {'numpy': {'OMP_NUM_THREADS': '3'}} 3"


AGAIN = """
import json
imports = fork_server.PreloadedImports(sys.argv[1])
fork_server._QUIET_SECONDS = 0.0

def hear(*names):
    with open(sys.argv[1], "a") as file:
        for name in names:
            variables = {"OMP_NUM_THREADS": sys.argv[2]}
            file.write(json.dumps({"name": name, "variables": variables}) + "\\n")
    imports.look()
    while imports.is_due():
        imports.step()

hear("numpy")
print(imports.is_to_settle, imports.seen)
imports.is_settled = True
sys.argv[2] = "5"
"""


def test_what_a_later_life_imports_again_leaves_it_ready(tmp_path):
    code = AGAIN + "hear('numpy')\nprint(imports.is_settled, imports.is_to_settle)\n"
    assert told(code, str(tmp_path / "imports"), "3").splitlines()[1] == "True False"
    code = AGAIN + "hear('numpy', 'numpy.testing')\nprint(imports.is_settled)\n"
    code += "print(imports.is_to_settle)\n"
    assert told(code, str(tmp_path / "more"), "3").splitlines()[1:] == ["False", "True"]


def test_a_package_counts_as_imported_under_the_variables_of_the_first_time(tmp_path):
    code = AGAIN + "hear('numpy')\nprint(imports.seen)\n"
    first, again = told(code, str(tmp_path / "imports"), "3").splitlines()
    assert first == "True {'numpy': {'OMP_NUM_THREADS': '3'}}"
    assert again == "{'numpy': {'OMP_NUM_THREADS': '3'}}"


def test_what_was_imported_is_looked_at_before_another_request_is_waited_for(tmp_path):
    (tmp_path / "imports").write_text('{"name": "numpy", "variables": {}}\n', encoding="utf-8")
    code = """
imports = fork_server.PreloadedImports(sys.argv[1])
fork_server._QUIET_SECONDS = 0.0
waits = []

def is_asked(channel, within_seconds):
    waits.append(within_seconds)
    return len(waits) > 3

fork_server.is_asked, fork_server.answer = is_asked, lambda *_: ["asked"]
print(fork_server.serve(None, imports), waits, imports.is_settled)
"""
    assert told(code, str(tmp_path / "imports")) == "['asked'] [0.5, 0.0, 0.5, 0.5] True"
