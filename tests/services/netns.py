"""Several hosts on this machine: the network namespaces of chaos runs, and what tests need more.

Needs root, and ``ip`` and ``tc``, which are installed if they are missing.
"""

from __future__ import annotations

import os

from resilient.testing.chaos import netns
from resilient.testing.chaos.netns import PROGRAMS, link_of, why_no_hosts
from tests.services.debian import why_missing

PACKAGES = ("iproute2", "util-linux")


def why_impossible() -> str:
    """Return why this machine cannot have such hosts, or nothing after installing what is missing.

    Installs from Debian only as root, and only if apt is there.
    """
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    return why_missing((*PROGRAMS, "tc"), PACKAGES) or why_no_hosts()


class Network(netns.Network):
    """Hosts whose links can be slow."""

    def slow(self, number: int, rate: str) -> None:
        """Let no more than ``rate`` (as ``256kbit``) pass, each way; the queue holds a second."""
        shape = ("root", "tbf", "rate", rate, "burst", "4kb", "latency", "1s")
        self.switch.run("tc", "qdisc", "replace", "dev", link_of(number), *shape)
        self[number].run("tc", "qdisc", "replace", "dev", "eth0", *shape)


def main() -> None:
    """Install what is missing, and say whether hosts can be made here."""
    raise SystemExit(why_impossible() or None)


if __name__ == "__main__":
    main()
