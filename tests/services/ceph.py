"""One S3 server for the tests: Ceph's RADOS Gateway over one monitor and one store in memory.

Everything listens on 127.0.0.1 and lives in one folder; no manager, no systemd, no keyring. The
order of the steps is that of Ceph's "manual deployment" pages (docs.ceph.com): monitor map,
monitor, OSD, user, gateway. Run it by hand with ``python -m tests.services.ceph FOLDER``.
"""

from __future__ import annotations

import http.client
import signal
import subprocess
import sys
import time
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from tests.services.debian import why_missing
from tests.services.ports import held_ports
from tests.services.tls import make_certificate

PACKAGES = ("ceph-mon", "ceph-osd", "radosgw", "ceph-common", "openssl")
PROGRAMS = ("openssl", "ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "ceph", "monmaptool")
KEY, SECRET = "canary-key-7f3a", "canary-secret-91bc"
READY_SECONDS = 60.0

CONFIGURATION = """
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{monitor},v1:127.0.0.1:{monitor_old}]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false
auth cluster required = none
auth service required = none
auth client required = none
# The gateway asks its monitor for a "secure" connection, which needs keys that nobody has here.
ms mon client mode = crc
ms client mode = crc
ms cluster mode = crc
ms service mode = crc
ms mon cluster mode = crc
ms mon service mode = crc
keyring = /dev/null
run dir = {folder}
admin socket =
pid file =
log file = {folder}/$name.log
crash dir = {folder}
# One copy, few placement groups and short rounds between monitors: ready in seconds.
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
mon data avail warn = 1
mon data avail crit = 1
paxos propose interval = 0.05
paxos min wait = 0.01
osd objectstore = memstore
memstore device bytes = {memory_bytes}
osd memory target = 1073741824
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{gateway} {tls} tcp_nodelay=1
rgw thread pool size = 64
rgw enable apis = s3, admin
rgw enable usage log = false
# Without a cache nobody waits until a killed gateway would have heard of a new bucket.
rgw cache enabled = false
rgw enable ops log = false
# What was overwritten is freed after seconds, not hours: it lies in memory.
rgw gc obj min wait = {free_seconds}
rgw gc processor period = {free_seconds}
"""


def why_impossible() -> str:
    """Return why this machine cannot run the server, or nothing after installing what is missing.

    Installs from Debian only as root, and only if apt is there.
    """
    return why_missing(PROGRAMS, PACKAGES)


class Ceph:
    """A server with its daemons; stops only what it started.

    Args:
        folder: empty; everything is kept there. Below ``root`` if there is one.
        memory_bytes: what it may hold; when it is full it only waits.
        free_seconds: after so long the memory of what was overwritten or deleted is given back.
        root: of another Debian in which the programs are; this machine's own by default.

    Attributes:
        port: of the S3 endpoint, the same after a restart.
        tls_port: of the same over https.
        certificate: what it shows there, and whom to trust for it.
    """

    def __init__(
        self,
        folder: Path,
        memory_bytes: int = 4 << 30,
        free_seconds: int = 5,
        root: Path = Path("/"),
    ) -> None:
        self._folder, self._root = folder, root
        # As the daemons see it.
        inside = self._inside = Path("/") / folder.relative_to(root)
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._ports = ExitStack()
        self.port, self.tls_port, monitor, monitor_old = self._ports.enter_context(held_ports(4))
        self.certificate = make_certificate(folder / "tls")
        self._fsid = str(uuid.uuid4())
        self._monitors = f"[v2:127.0.0.1:{monitor},v1:127.0.0.1:{monitor_old}]"
        (folder / "ceph.conf").write_text(
            CONFIGURATION.format(
                fsid=self._fsid,
                monitor=monitor,
                monitor_old=monitor_old,
                folder=inside,
                memory_bytes=memory_bytes,
                free_seconds=free_seconds,
                gateway=self.port,
                tls=f"ssl_endpoint=127.0.0.1:{self.tls_port} "
                f"ssl_certificate={inside / 'tls' / self.certificate.certificate.name} "
                f"ssl_private_key={inside / 'tls' / self.certificate.key.name}",
            )
        )

    @property
    def endpoint(self) -> str:
        """The URL of the S3 endpoint."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def tls_endpoint(self) -> str:
        """The URL of the same over https."""
        return f"https://127.0.0.1:{self.tls_port}"

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        data = {name: self._inside / name for name in ("mon", "osd")}
        for name in data:
            (self._folder / name).mkdir()
        osd, where = str(uuid.uuid4()), f"{self._inside}/monmap"
        monitor = ("-i", "a", "--mon-data", f"{data['mon']}")
        storage = ("-i", "0", "--osd-data", f"{data['osd']}")
        self._run(
            "monmaptool", "--create", "--fsid", self._fsid, "--addv", "a", self._monitors, where
        )
        self._run("ceph-mon", *monitor, "--mkfs", "--monmap", where)
        self._spawn("ceph-mon", "-f", *monitor)
        self._run("ceph", "osd", "new", osd)
        self._run("ceph-osd", *storage, "--mkfs", "--osd-uuid", osd)
        self._spawn("ceph-osd", "-f", *storage)
        user = (
            "--uid=test",
            "--display-name=test",
            f"--access-key={KEY}",
            f"--secret-key={SECRET}",
        )
        self._run("radosgw-admin", "-n", "client.rgw", "user", "create", *user)
        self.start_gateway()

    def start_gateway(self) -> None:
        """Bring the S3 endpoint up and wait until it answers."""
        self._spawn("radosgw", "-f", "-n", "client.rgw")
        deadline = time.monotonic() + READY_SECONDS
        while not _answers(self.port):
            alive = self._daemons["radosgw"].poll() is None
            assert alive, f"radosgw died: {self._said('radosgw')}"
            assert time.monotonic() < deadline, f"radosgw is silent: {self._said('radosgw')}"
            time.sleep(0.05)

    def kill_gateway(self) -> None:
        """Take the endpoint away with SIGKILL; what is stored stays."""
        self._daemons["radosgw"].send_signal(signal.SIGKILL)
        self._daemons.pop("radosgw").wait()

    def free(self) -> None:
        """Give the memory back now of all that was overwritten or deleted, and wait for it."""
        self._run("radosgw-admin", "-n", "client.rgw", "gc", "process", "--include-all")

    def stop(self) -> None:
        """End every daemon that this object started; nothing in memory is worth a clean end."""
        for daemon in reversed(self._daemons.values()):
            daemon.kill()
            daemon.wait()
        self._daemons.clear()
        self._ports.close()

    def _run(self, program: str, *arguments: str) -> None:
        configured = program != "monmaptool"
        command = self._command(program, *arguments, configured=configured)
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, f"{program}: {done.stdout} {done.stderr}"

    def _spawn(self, program: str, *arguments: str) -> None:
        with (self._folder / f"{program}.out").open("ab") as said:
            self._daemons[program] = subprocess.Popen(
                self._command(program, *arguments),
                stdout=said,
                stderr=said,
                # Signals to the terminal's group are for the tests, not for their server.
                start_new_session=True,
            )

    def _command(self, program: str, *arguments: str, configured: bool = True) -> list[str]:
        elsewhere = () if self._root == Path("/") else ("chroot", str(self._root))
        given = ("-c", f"{self._inside}/ceph.conf") if configured else ()
        return [*elsewhere, program, *given, *arguments]

    def _said(self, program: str) -> str:
        return (self._folder / f"{program}.out").read_text()[-500:]


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status < 500
    except OSError:
        return False
    finally:
        connection.close()


def main() -> None:
    """Install, start, say where, and stay until interrupted; or only install."""
    problem = why_impossible()
    if problem or len(sys.argv) < 2:
        sys.exit(problem or None)
    # Blocked, so that a signal ends the wait below and not this process before its daemons.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    with Ceph(Path(sys.argv[1])) as server:
        sys.stdout.write(f"{server.endpoint} {KEY} {SECRET}\n")
        sys.stdout.write(f"{server.tls_endpoint} {server.certificate.authority}\n")
        sys.stdout.flush()
        signal.sigwait({signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    main()
