"""What a worker is started with: arguments, environment, path, and a store to meet at."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import resilient

BOOTSTRAP = Path(resilient.__file__).parent / "elastic" / "workers" / "bootstrap.py"
TELL = """
import json
note = {"argv": sys.argv, "path": sys.path[0], "name": __name__, "env": dict(os.environ)}
say("start", json.dumps(note))
"""
ARGUMENTS = ("--nproc-per-node", "9", "-m", "--", "--repo", "x y", "")


def starts(agent):
    assert agent.end() == 0, agent.err
    return [json.loads(line) for line in agent.said("start")]


@pytest.mark.smoke
def test_everything_after_the_script_belongs_to_it(train):
    (note,) = starts(train(TELL, arguments=ARGUMENTS))
    assert note["argv"] == ["worker.py", *ARGUMENTS]
    assert note["name"] == "__main__"


def test_a_module_gets_the_arguments_and_the_path_that_python_gives_it(train):
    agent = train(TELL, "-m", arguments=ARGUMENTS)
    (note,) = starts(agent)
    assert note["argv"] == [str(agent.folder / "worker.py"), *ARGUMENTS]
    assert note["path"] == str(agent.folder)


def test_two_dashes_before_the_script_end_our_options(train):
    (note,) = starts(train(TELL, "--", arguments=("--x",)))
    assert note["argv"] == ["worker.py", "--x"]


@pytest.mark.smoke
def test_workers_get_the_variables_of_torchrun_and_ours(train):
    options = ("--nproc-per-node", "2", "--repo", "here", "--resume", "never", "--single-writer")
    notes = starts(train(TELL, *options, environ={"OMP_NUM_THREADS": ""}))
    environs = sorted((note["env"] for note in notes), key=lambda env: env["RANK"])
    assert [env["RANK"] for env in environs] == ["0", "1"]
    for env in environs:
        expected = {
            "WORLD_SIZE": "2",
            "LOCAL_RANK": env["RANK"],
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_RANK": env["RANK"],
            "ROLE_NAME": "default",
            "ROLE_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "3",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "RESILIENT_REPO": "here",
            "RESILIENT_RESUME": "never",
            "RESILIENT_CAUSE": "start",
            "RESILIENT_SINGLE_WRITER": "1",
        }
        assert expected.items() <= env.items()
        assert env["MASTER_PORT"].isdecimal()
        assert env["RESILIENT_ATTEMPT"].startswith(env["TORCHELASTIC_RUN_ID"] + "-1-")
    assert len({env["RESILIENT_ATTEMPT"] for env in environs}) == 1


@pytest.mark.parametrize(("workers", "threads"), [("1", None), ("2", "1")])
def test_several_workers_get_one_thread_each_unless_told_otherwise(
    train, monkeypatch, workers, threads
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    notes = starts(train(TELL, "--nproc-per-node", workers))
    assert {note["env"].get("OMP_NUM_THREADS") for note in notes} == {threads}


def test_a_life_after_a_failure_knows_its_cause(train):
    notes = starts(train(TELL + "if life == 1: sys.exit(1)", "--resume", "never"))
    assert [note["env"]["RESILIENT_CAUSE"] for note in notes] == ["start", "failure"]
    assert [note["env"]["RESILIENT_RESUME"] for note in notes] == ["never", "never"]
    assert len({note["env"]["RESILIENT_START"] for note in notes}) == 1
    assert len({note["env"]["RESILIENT_ATTEMPT"] for note in notes}) == 2


def test_ranks_meet_at_the_store_of_the_agent_in_every_life(train):
    agent = train(
        """
import warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
from resilient.distributed.launch_env import read_launch
from resilient.distributed.torch_kv_store import connect, join_process_group
launch = read_launch(os.environ)
board = connect(launch.world, launch.host, launch.port, hosted=launch.hosted)
stale = board.peek(f"hello/{rank}")
board.post(f"hello/{rank}", b"x")
assert board.wait(["hello/0", "hello/1"], 60) is not None
join_process_group(board, launch.world, "gloo", launch.attempt, 60)
total = torch.tensor([rank + 1])
dist.all_reduce(total)
say("sum", f"{life} {int(total)} {stale}")
dist.barrier()
if life == 1 and rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
# A plain script, which knows only torch's variables, meets there as well.
dist.init_process_group("gloo")
dist.all_reduce(total)
say("plain", int(total))
dist.destroy_process_group()
""",
        *("--nproc-per-node", "2", "--max-restarts", "1"),
    )
    assert agent.end() == 0, agent.err
    assert sorted(agent.said("sum")) == ["1 3 None"] * 2 + ["2 3 None"] * 2
    assert set(agent.said("plain")) == {"6"}


def bootstrap(folder, *arguments, **environ):
    return subprocess.run(
        [sys.executable, str(BOOTSTRAP), *arguments],
        cwd=folder,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("pass", 0),
        ("raise SystemExit", 0),
        ("raise SystemExit(7)", 7),
        ("raise SystemExit(-1)", 255),
        ("raise SystemExit('last words')", 1),
        ("raise KeyboardInterrupt", 130),
        ("raise ValueError", 1),
        ("1 +", 1),
        ("import os; os._exit(9)", 9),
        ("from resilient.errors import StoreFull; raise StoreFull('full')", 73),
        ("import os, sys\nif os.fork(): os.wait()\nelse: raise ValueError", 0),
    ],
)
def test_a_program_ends_as_under_python_itself_and_errors_of_ours_with_their_code(
    tmp_path, program, code
):
    (tmp_path / "script.py").write_text(program, encoding="utf-8")
    error_file = tmp_path / "error.json"
    ended = bootstrap(tmp_path, "script.py", TORCHELASTIC_ERROR_FILE=str(error_file))
    assert ended.returncode == code, ended.stderr
    assert error_file.exists() == (code not in (0, 9))


def test_what_runs_at_the_exit_sees_the_error_that_ended_the_process(tmp_path):
    (tmp_path / "script.py").write_text(
        "import atexit, sys\n"
        "def tell():\n"
        "    print(sys.last_type.__name__, sys.last_value, sys.last_traceback.tb_lineno)\n"
        "atexit.register(tell)\n"
        "raise ValueError('boom')\n"
    )
    ended = bootstrap(tmp_path, "script.py")
    assert ended.stdout == "ValueError boom 5\n", ended.stderr


def test_the_bootstrap_imports_nothing_of_ours_and_shadows_nothing(tmp_path):
    (tmp_path / "decide.py").write_text("mine = True", encoding="utf-8")
    (tmp_path / "script.py").write_text(
        "import sys, decide\nassert decide.mine\n"
        "print([name for name in sys.modules if name.startswith(('torch', 'resilient'))])\n"
        f"print(sys.path[0], {str(BOOTSTRAP.parent)!r} in sys.path)",
        encoding="utf-8",
    )
    ended = bootstrap(tmp_path, "script.py")
    assert ended.stdout == f"[]\n{tmp_path} False\n", ended.stderr


def test_a_traceback_shows_the_script_and_none_of_our_frames(tmp_path):
    (tmp_path / "script.py").write_text("def f():\n    1 / 0\nf()\n", encoding="utf-8")
    error_file = tmp_path / "error.json"
    ended = bootstrap(tmp_path, "script.py", TORCHELASTIC_ERROR_FILE=str(error_file))
    assert ended.returncode == 1
    assert "bootstrap" not in ended.stderr
    assert "ZeroDivisionError" in ended.stderr
    record = json.loads(error_file.read_text(encoding="utf-8"))
    assert record["message"]["message"] == "ZeroDivisionError: division by zero"
    assert "in f" in record["message"]["extraInfo"]["py_callstack"]
    assert record["message"]["extraInfo"]["timestamp"].isdecimal()


def test_main_stays_in_place_for_exit_handlers_and_threads(tmp_path):
    (tmp_path / "script.py").write_text(
        "import atexit, pickle\n"
        "class Mine: pass\n"
        "atexit.register(lambda: print(type(pickle.loads(pickle.dumps(Mine()))).__name__))\n",
        encoding="utf-8",
    )
    ended = bootstrap(tmp_path, "script.py")
    assert ended.stdout == "Mine\n", ended.stderr


def test_spawned_processes_find_the_script(tmp_path):
    (tmp_path / "script.py").write_text(
        "import multiprocessing\n"
        "def double(x): return 2 * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(double, [21]))\n",
        encoding="utf-8",
    )
    for arguments in (("script.py",), ("-m", "script")):
        ended = bootstrap(tmp_path, *arguments)
        assert ended.stdout == "[42]\n", ended.stderr


@pytest.mark.parametrize("arguments", [("no.py",), ("-m", "no_such_module")])
def test_a_missing_target_is_not_worth_a_restart(tmp_path, arguments):
    assert bootstrap(tmp_path, *arguments).returncode == 66


def test_a_package_is_run_by_its_main(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "__main__.py").write_text("print(__package__)", encoding="utf-8")
    assert bootstrap(tmp_path, "-m", "package").stdout == "package\n"


def test_a_worker_whose_agent_died_before_it_started_ends_itself(tmp_path):
    (tmp_path / "script.py").write_text("print('ran')", encoding="utf-8")
    ended = bootstrap(tmp_path, "script.py", RESILIENT_AGENT_PID="1")
    assert ended.returncode == 128 + signal.SIGKILL
    assert ended.stdout == ""
