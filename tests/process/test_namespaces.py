"""Hosts that are network namespaces: who is on them, who reaches whom, and what is left of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from resilient.errors import ConfigError
from resilient.testing.chaos import netns
from resilient.testing.chaos.netns import kill_hosts, why_no_hosts
from resilient.testing.chaos.processes import is_running

ECHO = """
import socket, sys
with socket.create_server(("", 7000)) as server:
    print("up", flush=True)
    while True:
        server.accept()[0].close()
"""
ASK = "import socket, sys; socket.create_connection((sys.argv[1], 7000), 1).close()"
FAMILY = "import os, time; os.fork() and print('up', flush=True); time.sleep(600)"


def start(host, code):
    """Start a program on a host, and wait until it says that it is up."""
    command = [*host.inside, sys.executable, "-S", "-c", code]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    return process


def answers(network, asker, asked):
    command = [*network[asker].inside, sys.executable, "-S", "-c", ASK, network.address(asked)]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


@pytest.mark.smoke
def test_a_host_that_is_cut_off_is_reached_by_nobody_until_it_is_back(network):
    hosts = network(3)
    with start(hosts[1], ECHO), start(hosts[2], ECHO):
        assert answers(hosts, 0, 1)
        hosts.cut(1)
        assert not answers(hosts, 0, 1)
        assert not answers(hosts, 1, 2)
        assert answers(hosts, 0, 2)
        hosts.join(1)
        assert answers(hosts, 0, 1)
        kill_hosts([hosts[1], hosts[2]])


def test_whoever_is_on_a_host_is_found_and_killed_and_nobody_else(network):
    hosts = network(2)
    with start(hosts[0], FAMILY) as mine, start(hosts[1], FAMILY) as other:
        found = hosts[0].processes()
        assert len(found) == 2
        assert mine.pid in found
        hosts[0].kill()
        assert mine.wait(10) == -9
        assert hosts[0].processes() == []
        assert not any(map(is_running, found))
        assert is_running(other.pid)
        assert hosts[0].run("hostname") == "host-0\n"
        hosts[1].kill()


def test_hosts_end_with_whoever_made_them(can_make_hosts):
    code = (
        "import subprocess, sys, time\n"
        "from resilient.testing.chaos.netns import Network\n"
        "with Network(2) as hosts:\n"
        "    print(*(one.pid for one in (hosts.switch, *(hosts[nth] for nth in range(2)))))\n"
        "    sys.stdout.flush(); time.sleep(600)\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as maker:
        held = [int(one) for one in maker.stdout.readline().split()]
        assert len(held) == 3
        assert all(map(is_running, held))
        maker.kill()
    deadline = time.monotonic() + 10
    while any(map(is_running, held)):
        assert time.monotonic() < deadline, f"{held} hold their hosts"
        time.sleep(0.01)


def test_what_is_missing_is_told(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "which need root" in why_no_hosts()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(netns, "PROGRAMS", ("ip-that-is-nowhere",))
    assert "ip-that-is-nowhere, which is not installed" in why_no_hosts()


def test_hosts_that_the_kernel_refuses_say_why(monkeypatch, can_make_hosts):
    monkeypatch.setattr(netns, "_HOLDER_SCRIPT", "echo no such thing >&2; exit 1; {name}")
    with pytest.raises(ConfigError, match=r"cannot create a host: .*no such thing"):
        netns.Network(1).__enter__()
    assert "no such thing" in why_no_hosts()
