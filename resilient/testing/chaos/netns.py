"""Simulated hosts: network namespaces on a bridge, each with its own address and host name.

The namespaces have no name in the file system, and this machine's own network is unchanged. A
holder process keeps each namespace alive, and ends at the latest when this process ends. The
namespace ends with the last process in it. The hosts can connect only to each other. The module
needs root, ``ip``, ``nsenter`` and ``unshare``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from resilient.errors import ConfigError
from resilient.testing.chaos.processes import kill_together

if TYPE_CHECKING:
    from collections.abc import Collection

HOSTS_MAX = 32
PROGRAMS = ("ip", "nsenter", "unshare")
_KILL_SECONDS = 30.0
_SLICE_SECONDS = 0.01
_COMMAND_SECONDS = 60.0
# The holder ends when its input ends, because no other process has that pipe.
_HOLDER_SCRIPT = "echo {name} > /proc/sys/kernel/hostname && echo ready && exec cat > /dev/null"


def why_no_hosts() -> str:
    """Return the reason why this machine cannot create hosts, empty if it can."""
    if sys.platform != "linux":
        return f"hosts are network namespaces of Linux, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "hosts are network namespaces, which need root"
    missing_programs = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing_programs:
        return (
            f"hosts need {', '.join(missing_programs)}, which is not installed (in Debian: "
            "apt-get install iproute2 util-linux)"
        )
    try:
        with Network(1):
            return ""
    except ConfigError as error:
        return error.message


class Namespace:
    """Network namespace with its own host name.

    Args:
        name: Name of the host.

    Attributes:
        name: Name of the host.

    Raises:
        ConfigError: The namespace cannot be created.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        command = ["unshare", "--net", "--uts", "sh", "-c", _HOLDER_SCRIPT.format(name=name)]
        self._holder = subprocess.Popen(  # noqa: S603 - a fixed program
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._holder.stdout is not None, "it is a pipe"  # noqa: S101
        if self._holder.stdout.readline() != "ready\n":
            _, output = self._holder.communicate()
            raise _creation_error(command, output)
        # Keep the file open, so that no other namespace gets this number during a search.
        self._file = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self._number = os.fstat(self._file).st_ino

    @property
    def pid(self) -> int:
        """Process id of a process in the namespace."""
        return self._holder.pid

    @property
    def inside(self) -> tuple[str, ...]:
        """Prefix that runs a command in the namespace, without an additional process."""
        return ("nsenter", f"--target={self.pid}", "--net", "--uts", "--")

    def run(self, *command: str) -> str:
        """Run a command in the namespace and return its output.

        Raises:
            ConfigError: The command failed.
        """
        process = subprocess.run(  # noqa: S603 - programs of the system
            (*self.inside, *command),
            check=False,
            capture_output=True,
            text=True,
            timeout=_COMMAND_SECONDS,
        )
        if process.returncode:
            raise _creation_error(command, process.stderr)
        return process.stdout

    def processes(self) -> list[int]:
        """Return the processes started in the namespace."""
        return processes_in((self,))

    def kill(self) -> None:
        """Kill all processes started in the namespace at one moment."""
        kill_hosts((self,))

    def close(self) -> None:
        """End all processes in the namespace, and thereby the namespace."""
        self.kill()
        self._holder.communicate("")
        os.close(self._file)

    @property
    def number(self) -> int:
        """Number of the namespace in /proc."""
        return self._number


class Network:
    """Hosts ``host-0``, ... at 10.0.0.1, ...: namespaces connected by a bridge.

    The hosts and all their processes end with the block.

    Args:
        hosts: Number of hosts.

    Raises:
        ConfigError: The hosts cannot be created.
    """

    def __init__(self, hosts: int) -> None:
        self._count = hosts
        self._switch: Namespace | None = None
        self._hosts: list[Namespace] = []

    def __enter__(self) -> Self:
        try:
            self._switch = Namespace("switch")
            self._switch.run("ip", "link", "add", "bridge", "type", "bridge")
            self._switch.run("ip", "link", "set", "bridge", "up")
            for number in range(self._count):
                self._hosts.append(Namespace(f"host-{number}"))
                self._connect(number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in (*self._hosts, *filter(None, (self._switch,))):
            host.close()

    def __getitem__(self, number: int) -> Namespace:
        return self._hosts[number]

    def __len__(self) -> int:
        return self._count

    @staticmethod
    def address(number: int) -> str:
        """Return the address of a host."""
        return f"10.0.0.{number + 1}"

    @property
    def switch(self) -> Namespace:
        """Namespace with the bridge and the links of all hosts."""
        assert self._switch is not None, "made on entry"  # noqa: S101
        return self._switch

    def cut(self, number: int) -> None:
        """Set a host's link down: packets in both directions are lost silently."""
        self.switch.run("ip", "link", "set", link_of(number), "down")

    def join(self, number: int) -> None:
        """Set a host's link up again."""
        self.switch.run("ip", "link", "set", link_of(number), "up")

    def _connect(self, number: int) -> None:
        host, link = self._hosts[number], link_of(number)
        peer = ("peer", "name", "eth0", "netns", str(host.pid))
        self.switch.run("ip", "link", "add", link, "type", "veth", *peer)
        self.switch.run("ip", "link", "set", link, "master", "bridge", "up")
        host.run("ip", "link", "set", "lo", "up")
        host.run("ip", "address", "add", f"{self.address(number)}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")


def link_of(number: int) -> str:
    """Return the name of a host's link in the switch; in the host the link is ``eth0``."""
    return f"to-{number}"


def processes_in(hosts: Collection[Namespace]) -> list[int]:
    """Return the processes started in any of these hosts, without the holder processes."""
    numbers, holders = {host.number for host in hosts}, {host.pid for host in hosts}
    pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())
    return [pid for pid in pids if pid not in holders and _number_of(pid) in numbers]


def kill_hosts(hosts: Collection[Namespace]) -> None:
    """Kill all processes started in any of these hosts at one moment.

    The function returns once no process is left. The wait for processes stuck in the kernel ends
    after 30 s.
    """
    deadline_seconds = time.monotonic() + _KILL_SECONDS
    while processes_in(hosts) and time.monotonic() < deadline_seconds:
        kill_together(lambda: processes_in(hosts))
        time.sleep(_SLICE_SECONDS)


def _number_of(pid: int) -> int:
    """Return the network namespace of a process; 0 if the process has ended."""
    try:
        return Path(f"/proc/{pid}/ns/net").stat().st_ino
    except OSError:
        return 0


def _creation_error(command: Collection[str], output: str) -> ConfigError:
    return ConfigError(f"cannot create a host: `{' '.join(command)}`: {output.strip()[-200:]}")
