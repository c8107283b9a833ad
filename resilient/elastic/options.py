"""Options of the agent, the workers, the saver daemon and the metrics, importable without torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from resilient.distributed.start_identity import StartIdentity
from resilient.elastic.hang_detection import HangRule
from resilient.elastic.restart_policy import FailureLimits
from resilient.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts and limits of the agent.

    Attributes:
        interval_seconds: Time between two checks for nodes that want to join.
        grace_seconds: Time from SIGTERM to SIGKILL if the workers have something to save.
        survivor_seconds: Time from SIGTERM to SIGKILL after a failure. A save that a surviving
            worker persists itself may still be committed in this time.
        daemon_survivor_seconds: ``survivor_seconds`` if a saver daemon persists the staged bytes.
        barrier_seconds: Time that finished nodes wait for the others.
        hang: Rule for the time without progress.
        limits: Limits on failures.
    """

    interval_seconds: float = 0.1
    grace_seconds: float = 25.0
    survivor_seconds: float = 2.0
    daemon_survivor_seconds: float = 0.2
    barrier_seconds: float = 300.0
    hang: HangRule = field(default_factory=HangRule)
    limits: FailureLimits = field(default_factory=FailureLimits)

    def adjusted_for_daemon(self, *, has_daemon: bool) -> Timeouts:
        """Return the timeouts, with less time for surviving workers if there is a saver daemon."""
        seconds = self.daemon_survivor_seconds if has_daemon else self.survivor_seconds
        return replace(self, survivor_seconds=seconds)


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    """Start options of the saver daemon.

    Attributes:
        host_bytes_max: Memory of this host for staged bytes. With 0 the agent chooses by the
            machine; a negative number disables the daemon.
        listen: Address for the daemons of other hosts; empty for all interfaces.
        ranks: Number of ranks of this host that share the memory.
        is_auto: Whether the limit comes from the machine and not from the user.
        why_not: Reason why there is no daemon although the user wants one.
    """

    host_bytes_max: int = -1
    listen: str = "127.0.0.1"
    ranks: int = 1
    is_auto: bool = False
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Options passed to every worker; see :class:`resilient.distributed.launch_env.LaunchEnv`.

    The agent removes the folder ``notes`` when it exits. Without a name in ``notes`` the agent
    creates a folder. Unless ``is_warm``, the agent starts each worker as a new process. ``log_dir``
    is the folder for the workers' output. The agent passes ``resume`` to every attempt. The workers
    read the repository and choose the checkpoint.
    """

    repo: str = ""
    resume: str = "auto"
    events: str = ""
    single_writer: bool = False
    keeper: DaemonOptions = field(default_factory=DaemonOptions)
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    notes: str = ""
    require_signature: bool = False
    strict_resume: bool = False
    is_warm: bool = True
    every: str = ""
    until_step: int = 0
    log_dir: str = ""
    start: StartIdentity = field(default_factory=StartIdentity)


_PORT_MAX = 65535


@dataclass(frozen=True, slots=True)
class MetricsOptions:
    """Destinations of the metrics.

    Attributes:
        port: Port of the HTTP server; 0 lets the system choose, None disables the server.
        host: Address of the HTTP server.
        file: File for node_exporter's textfile collector; empty for none.
        every_seconds: Time between two writes of the file.
    """

    port: int | None = None
    host: str = "127.0.0.1"
    file: str = ""
    every_seconds: float = 15.0

    @property
    def is_on(self) -> bool:
        """True if any destination is configured."""
        return self.port is not None or bool(self.file)


def parse_port(text: str) -> int | None:
    """Parse a port option: None for ``0`` (off), 0 for ``auto``.

    Raises:
        ConfigError: The text is neither a port nor ``auto``.
    """
    word = text.strip().lower()
    if word == "auto":
        return 0
    if not (word.isascii() and word.isdecimal()) or int(word) > _PORT_MAX:
        raise ConfigError(
            f"--metrics-port {text!r} is not a port or auto",
            hint="0: no server, auto: a free port, which is printed",
        )
    return int(word) or None
