"""What the user asked for becomes a plan, and what the repository holds becomes progress."""

import subprocess
import sys

import pytest

from resilient.elastic.launcher import RendezvousOptions, TrainOptions, resolve
from resilient.elastic.restart_controller import (
    ProgressState,
    count_runs,
    find_newest,
    newest_committed,
)
from resilient.errors import ConfigError
from resilient.format.keys import CheckpointId
from resilient.testing.memory_store import MemoryStore


def plan(**rendezvous):
    return resolve(TrainOptions("train.py", rendezvous=RendezvousOptions(**rendezvous)))


def test_one_node_meets_nobody_under_a_name_of_its_own():
    first, second = plan(), plan()
    assert (first.backend, first.endpoint) == ("c10d", "localhost:0")
    assert first.run_id != second.run_id
    assert first.local_addr == "127.0.0.1"


def test_several_nodes_meet_where_they_are_told():
    found = plan(nnodes="2:4", endpoint="host:29400", run_id="job", conf="timeout=60, x=1")
    assert (found.nodes_min, found.nodes_max) == (2, 4)
    assert (found.endpoint, found.run_id, found.local_addr) == ("host:29400", "job", "")
    assert found.conf == {"timeout": "60", "x": "1"}


def test_the_static_rendezvous_takes_the_address_of_node_0_and_our_rank():
    found = plan(nnodes="2", backend="static", node_rank=1, master_addr="head")
    assert found.endpoint == "head:29500"
    assert found.conf["rank"] == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"nnodes": "0"},
        {"nnodes": "3:2"},
        {"nnodes": "two"},
        {"nnodes": ":2"},
        {"nnodes": "2"},
        {"nnodes": "2", "endpoint": "h:1", "standalone": True},
        {"conf": "timeout"},
        {"conf": "=1"},
    ],
)
def test_options_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ConfigError):
        plan(**wrong)


@pytest.mark.parametrize("text", ["0", "-1", "many", ""])
def test_a_number_of_workers_that_is_none_is_refused(text):
    with pytest.raises(ConfigError):
        resolve(TrainOptions("train.py", nproc_per_node=text))


def test_cpu_means_one_worker_per_processor():
    assert resolve(TrainOptions("train.py", nproc_per_node="cpu")).nproc >= 1


def test_only_a_manifest_makes_a_checkpoint_and_later_lives_come_first():
    store = MemoryStore()
    assert find_newest(store) is None
    for key in (
        "checkpoint-10-g1/manifest.json",
        "checkpoint-8-g2/manifest.json",
        "checkpoint-9-g2/model.r00000.safetensors",
        "checkpoint-99/manifest.json",
        "generations/g000003.json",
    ):
        store.put(key, b"x")
    assert find_newest(store) == CheckpointId(generation=2, step=8)


@pytest.mark.parametrize("url", ["", "no-such-protocol://x/y"])
def test_a_repository_that_cannot_be_asked_is_unknown_and_never_an_error(url):
    assert newest_committed(url) is ProgressState.UNKNOWN


@pytest.mark.parametrize("url", ["", "no-such-protocol://x/y"])
def test_launches_of_a_repository_that_cannot_be_asked_are_not_known(url):
    assert count_runs(url) is None


def test_without_time_nothing_is_asked(tmp_path):
    assert newest_committed(str(tmp_path), within_seconds=0.0) is ProgressState.UNKNOWN


def test_an_empty_folder_holds_no_checkpoint(tmp_path):
    assert newest_committed(str(tmp_path)) is None
    assert count_runs(str(tmp_path)) == 0


def test_a_plan_does_not_load_torch():
    probe = (
        "import sys\nfrom resilient.elastic.launcher import TrainOptions, resolve\n"
        "resolve(TrainOptions('train.py'))\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=60)


def test_a_stop_is_heard_before_torch_is_imported():
    program = (
        "import os, signal, sys\n"
        "from resilient.elastic import launcher\n"
        "def begin(options, stops, emit, wait_first_polls):\n"
        "    assert 'torch' not in sys.modules\n"
        "    with stops.interrupting():\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "launcher.build_agent = begin\n"
        "sys.exit(launcher.run_agent(launcher.TrainOptions('x.py')))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 75, ended.stderr
    assert "exit 75: stopped before the first attempt" in ended.stderr


def test_a_stop_that_another_thread_receives_ends_the_wait_for_the_rendezvous():
    # So does one that arrives just before the main thread waits: nothing wakes the wait.
    program = (
        "import signal, sys, threading, time\n"
        "from resilient.elastic import launcher\n"
        "def connect(plan):\n"
        "    time.sleep(0.2)\n"
        "    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)\n"
        "    time.sleep(50)\n"
        "launcher._connect_rendezvous = connect\n"
        "began = time.monotonic()\n"
        "code = launcher.run_agent(launcher.TrainOptions('x.py'))\n"
        "assert time.monotonic() - began < 40\n"
        "sys.exit(code)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 75, ended.stderr
    assert "exit 75: stopped before the first attempt" in ended.stderr
