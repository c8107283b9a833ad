"""One SLURM for the tests: munge, a controller, and two nodes that are this machine.

Everything listens on 127.0.0.1 and lives in one folder; no systemd, no control groups, no
accounting. Run it by hand with ``python -m tests.services.slurm FOLDER``.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from tests.services.debian import why_missing
from tests.services.ports import held_ports

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
READY_SECONDS = 60.0

CONFIGURATION = """
ClusterName=box
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# What is requeued may start again after five seconds, not after the usual 120.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait={kill_seconds}
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2 State=UNKNOWN
PartitionName=low Nodes=n[1-2] Default=YES PriorityTier=1 GraceTime={grace_seconds} State=UP
PartitionName=high Nodes=n[1-2] PriorityTier=10 PreemptMode=OFF State=UP
"""


def why_impossible() -> str:
    """Return why this machine cannot run SLURM, or nothing after installing what is missing."""
    if os.geteuid() != 0:
        return "SLURM's daemons start jobs as other users, which only root can"
    return why_missing(PROGRAMS, PACKAGES)


class Slurm:
    """A cluster of two nodes with its daemons; stops only what it started.

    Args:
        folder: empty; everything is kept there.
        grace_seconds: what a preempted job of the partition ``low`` is given.
        kill_seconds: what a job is given that is requeued or cancelled.
    """

    def __init__(self, folder: Path, grace_seconds: int = 20, kill_seconds: int = 20) -> None:
        self._folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._ports = ExitStack()
        controller, first, second = self._ports.enter_context(held_ports(3))
        self.configuration = folder / "slurm.conf"
        self.configuration.write_text(
            CONFIGURATION.format(
                host=socket.gethostname().partition(".")[0],
                folder=folder,
                controller=controller,
                first=first,
                second=second,
                grace_seconds=grace_seconds,
                kill_seconds=kill_seconds,
            )
        )
        self.environment = {**os.environ, "SLURM_CONF": str(self.configuration)}

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, program: str, *arguments: str, given: str = "") -> str:
        """Run one of SLURM's programs and return what it says."""
        done = subprocess.run(
            [program, *arguments],
            env=self.environment,
            input=given,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, f"{program} {arguments}: {done.stdout} {done.stderr}"
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """Return what ``scontrol show job`` says of a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", "-o", number)))

    def stop(self) -> None:
        """End every job and every daemon that this object started."""
        if self._daemons:
            self._cancel_all()
        # Nothing that they know is worth a clean end.
        for daemon in reversed(self._daemons):
            daemon.kill()
            daemon.wait()
        self._daemons.clear()
        self._ports.close()

    def _cancel_all(self) -> None:
        """End what jobs run; whatever fails here, the daemons end next."""
        self._try("scancel", "--full", "--signal=KILL", "--user=root")
        self._try("scancel", "--user=root")
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and self._try("squeue", "--noheader"):
            time.sleep(0.1)

    def _try(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False, timeout=60
        )
        return done.stdout

    def _start(self) -> None:
        (self._folder / "state").mkdir()
        private = self._folder / "munge"
        private.mkdir(mode=0o700)
        key = private / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        files = ("log-file", "pid-file", "seed-file")
        self._spawn(
            *("munged", "--foreground", "--force", f"--key-file={key}"),
            f"--socket={self._folder}/munge.socket",
            *(f"--{one}={private}/{one}" for one in files),
        )
        self._wait((self._folder / "munge.socket").exists)
        self._spawn("slurmctld", "-D", "-c", "-f", str(self.configuration))
        for node in ("n1", "n2"):
            self._spawn("slurmd", "-D", "-N", node, "-f", str(self.configuration))
        self._wait(self._is_ready)

    def _is_ready(self) -> bool:
        found = self._try("sinfo", "--noheader", "--format=%D %T", "--partition=high")
        return found.split() == ["2", "idle"]

    def _wait(self, is_so) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not is_so():
            for daemon in self._daemons:
                assert daemon.poll() is None, f"{daemon.args} died: {self._said()}"
            assert time.monotonic() < deadline, f"SLURM is silent: {self._said()}"
            time.sleep(0.1)

    def _spawn(self, program: str, *arguments: str) -> None:
        with (self._folder / "daemons.out").open("ab") as said:
            self._daemons.append(
                subprocess.Popen(
                    [program, *arguments],
                    env=self.environment,
                    stdout=said,
                    stderr=said,
                    start_new_session=True,
                )
            )

    def _said(self) -> str:
        return (self._folder / "daemons.out").read_text()[-1000:]


def main() -> None:
    """Install, start, say where, and stay until interrupted; or only install."""
    problem = why_impossible()
    if problem or len(sys.argv) < 2:
        sys.exit(problem or None)
    with Slurm(Path(sys.argv[1])) as cluster:
        # Not before: the daemons, and every job of theirs, would have it from here.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        sys.stdout.write(f"export SLURM_CONF={cluster.configuration}\n")
        sys.stdout.flush()
        signal.sigwait({signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    main()
