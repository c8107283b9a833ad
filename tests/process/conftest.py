"""Started agents and keepers, and a small file system of its own."""

import os
import shutil
import signal
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.helpers.agent_harness import Agent, wait_until
from tests.helpers.keepers import Keeper
from tests.process.host_jobs import HostAgent
from tests.services.netns import Network, why_impossible
from tests.services.presence import require

HELD = Path(__file__).parents[1] / "helpers" / "held"
HANDLERS = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}


@pytest.fixture(scope="session", autouse=True)
def signals_are_heard():
    """Undo a nohup or an ampersand around the tests: what they start would rightly obey it."""
    for number, handler in HANDLERS.items():
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture
def train(tmp_path):
    """Start `resilient train` with a worker script; everything is killed at the end."""
    started = []

    def start(script, *options, arguments=(), environ=()):
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(Agent(folder, script, options, arguments, environ))
        return started[-1]

    yield start
    for agent in started:
        agent.kill()


@pytest.fixture
def node(train):
    """Start an agent that meets the others of this test."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    started = []

    def is_served():
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    def start(script, nnodes, *options):
        if started and started[0].process.poll() is None:
            # Whoever comes first serves the rendezvous.
            wait_until(is_served, "the first node to listen", started[0])
        agent = train(
            script,
            *("--nnodes", nnodes, "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "test"),
            *("--rdzv-conf", "last_call_timeout=1", "--local-addr", "127.0.0.1", *options),
        )
        started.append(agent)
        return agent

    return start


@pytest.fixture
def start(tmp_path):
    """Start keepers, each in a folder; all are killed at the end."""
    started = []

    def one(*options, folder="keeper"):
        started.append(Keeper(tmp_path / folder, *options))
        return started[-1]

    yield one
    for keeper in started:
        keeper.kill()


@pytest.fixture
def gate(tmp_path, monkeypatch):
    """Hold the shards of checkpoint-1 in the keeper until a file appears."""
    folder = tmp_path / "gate"
    folder.mkdir()
    monkeypatch.setenv("HELD_FOLDER", str(folder))
    monkeypatch.setenv("HELD_PREFIX", "checkpoint-1-g1")
    monkeypatch.setenv("PYTHONPATH", f"{HELD}:{os.environ.get('PYTHONPATH', '')}")
    return folder


@pytest.fixture
def small_disk(tmp_path):
    """Mount file systems of a given size; skip where that is not allowed."""
    mounted = []

    def mount(size_bytes):
        if os.geteuid() != 0 or shutil.which("mount") is None:
            pytest.skip("only root may mount a small file system")
        folder = tmp_path / f"small-{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("this machine does not let root mount a tmpfs")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(scope="session")
def can_make_hosts():
    """Skip where no network namespaces can be made; `make services` says why."""
    require("netns", why_impossible())


@pytest.fixture
def network(can_make_hosts):
    """Make a number of hosts that reach each other; they and all in them end with the test."""
    with ExitStack() as made:
        yield lambda hosts: made.enter_context(Network(hosts))


@pytest.fixture
def on_host(network):
    """Start agents on hosts; whatever of them still runs ends with the hosts."""
    started = []

    def start(*arguments, **options):
        started.append(HostAgent(*arguments, **options))
        return started[-1]

    yield start
    for one in started:
        one.close()
