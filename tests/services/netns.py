"""Several hosts on this machine: network namespaces on a bridge, each with an address and a name.

The namespaces have no name in the file system. Each lives as long as a process in it, and the one
that holds it ends with the test process, however that ends. Needs root, and ``ip`` and ``tc``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Self

from tests.services.debian import why_missing

PACKAGES = ("iproute2", "util-linux")
PROGRAMS = ("ip", "tc", "nsenter", "unshare")
_GONE_SECONDS = 30.0
# The end of its input ends it: nobody else holds that pipe.
_HOLD = "echo {name} > /proc/sys/kernel/hostname && echo ready && exec cat > /dev/null"


def why_impossible() -> str:
    """Return why this machine cannot have such hosts, or nothing after installing what is missing.

    Installs from Debian only as root, and only if apt is there.
    """
    problem = _install()
    if problem:
        return problem
    try:
        with Network(1):
            return ""
    except subprocess.CalledProcessError as error:
        return f"`{' '.join(map(str, error.cmd))}` failed: {error.stderr.strip()[-200:]}"


def _install() -> str:
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    return why_missing(PROGRAMS, PACKAGES)


class Namespace:
    """A network namespace with a host name of its own; gone with the last process in it."""

    def __init__(self, name: str) -> None:
        command = ["unshare", "--net", "--uts", "sh", "-c", _HOLD.format(name=name)]
        self.name = name
        self._holder = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        if self._holder.stdout.readline() != "ready\n":
            _, said = self._holder.communicate()
            raise subprocess.CalledProcessError(self._holder.returncode, command, "", said)

    @property
    def pid(self) -> int:
        """A process in it."""
        return self._holder.pid

    @property
    def inside(self) -> tuple[str, ...]:
        """What to put before a command that shall run in it; no process is added."""
        return ("nsenter", f"--target={self.pid}", "--net", "--uts", "--")

    def run(self, *command: str) -> str:
        """Run a command in it, insist on success, and return what it said."""
        whole = (*self.inside, *command)
        return subprocess.run(whole, check=True, capture_output=True, text=True).stdout

    def processes(self) -> list[int]:
        """Return the processes that were started in it."""
        mine = _namespace_of(self.pid)
        found = (int(one.name) for one in Path("/proc").iterdir() if one.name.isdecimal())
        return [pid for pid in found if pid != self.pid and _namespace_of(pid) == mine]

    def kill(self) -> None:
        """End everything that was started in it, by SIGKILL, until nothing is left."""
        deadline = time.monotonic() + _GONE_SECONDS
        while left := self.processes():
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            assert time.monotonic() < deadline, f"{left} of {self.name} cannot be killed"
            time.sleep(0.01)

    def close(self) -> None:
        """End everything in it, and with that the namespace."""
        self.kill()
        self._holder.communicate("")


class Network:
    """Hosts ``a``, ``b``, ... at 10.0.0.1, 10.0.0.2, ...: namespaces whose links meet in a bridge.

    Args:
        hosts: how many.
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
                self._hosts.append(Namespace("abcdefgh"[number]))
                self._connect(number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for one in (*self._hosts, *filter(None, (self._switch,))):
            one.close()

    def __getitem__(self, number: int) -> Namespace:
        return self._hosts[number]

    @staticmethod
    def address(number: int) -> str:
        """Return the address of a host."""
        return f"10.0.0.{number + 1}"

    def cut(self, number: int) -> None:
        """Take the cable out: what is sent is lost without a word, in both directions."""
        self._switch.run("ip", "link", "set", f"to-{number}", "down")

    def join(self, number: int) -> None:
        """Put the cable in again."""
        self._switch.run("ip", "link", "set", f"to-{number}", "up")

    def slow(self, number: int, rate: str) -> None:
        """Let no more than ``rate`` (as ``256kbit``) pass, each way; the queue holds a second."""
        shape = ("root", "tbf", "rate", rate, "burst", "4kb", "latency", "1s")
        self._switch.run("tc", "qdisc", "replace", "dev", f"to-{number}", *shape)
        self._hosts[number].run("tc", "qdisc", "replace", "dev", "eth0", *shape)

    def _connect(self, number: int) -> None:
        host, link = self._hosts[number], f"to-{number}"
        peer = ("peer", "name", "eth0", "netns", str(host.pid))
        self._switch.run("ip", "link", "add", link, "type", "veth", *peer)
        self._switch.run("ip", "link", "set", link, "master", "bridge", "up")
        host.run("ip", "link", "set", "lo", "up")
        host.run("ip", "address", "add", f"{self.address(number)}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")


def _namespace_of(pid: int) -> int:
    """Return the network namespace of a process; 0 if it has ended."""
    try:
        return Path(f"/proc/{pid}/ns/net").stat().st_ino
    except OSError:
        return 0


def main() -> None:
    """Install what is missing, and say whether hosts can be made here."""
    raise SystemExit(why_impossible() or None)


if __name__ == "__main__":
    main()
