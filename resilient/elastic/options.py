"""AgentOptions, WorkerOptions, Timeouts, MetricsOptions.

What the user may ask of the agent and of the workers; values without torch.

What the user may ask of metrics.
"""

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
    """How long the agent waits for what.

    Attributes:
        interval_seconds: between two questions whether nodes want to join.
        grace_seconds: from SIGTERM to SIGKILL when the workers have something to save.
        survivor_seconds: the same after a failure, when it is saved or lost already; a save
            that a survivor persists by itself may land in that time.
        kept_survivor_seconds: the same when a keeper persists what is staged.
        barrier_seconds: how long finished nodes wait for the others.
        hang: how long workers may show no progress.
        limits: how often they may fail.
    """

    interval_seconds: float = 0.1
    grace_seconds: float = 25.0
    survivor_seconds: float = 2.0
    kept_survivor_seconds: float = 0.2
    barrier_seconds: float = 300.0
    hang: HangRule = field(default_factory=HangRule)
    limits: FailureLimits = field(default_factory=FailureLimits)

    def beside(self, *, has_keeper: bool) -> Timeouts:
        """Return the patience with survivors: what a keeper has needs no time of theirs."""
        seconds = self.kept_survivor_seconds if has_keeper else self.survivor_seconds
        return replace(self, survivor_seconds=seconds)


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    """How the keeper of staged checkpoints is started.

    Attributes:
        host_bytes_max: memory of this host for staged bytes; 0 leaves it to the machine,
            negative means no keeper.
        listen: address for the keepers of other hosts; empty for all interfaces.
        ranks: of this host, which share that memory.
        is_auto: whether the bound is the machine's and not the user's.
        why_not: why there is no keeper though one was wanted.
    """

    host_bytes_max: int = -1
    listen: str = "127.0.0.1"
    ranks: int = 1
    is_auto: bool = False
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What every worker is told; see :class:`resilient.distributed.launch_env.LaunchEnv`.

    The agent removes the folder ``notes`` when it leaves; empty lets it make one. Unless
    ``is_warm``, it starts each worker from nothing. In the folder ``log_dir`` it keeps what they
    print. ``resume`` holds in every attempt: the workers read the repository and decide.
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
    """Where figures go.

    Attributes:
        port: to serve them at; 0 lets the system choose, None serves none.
        host: address to serve them at.
        file: for node_exporter's textfile collector; empty for none.
        every_seconds: between two writes of it.
    """

    port: int | None = None
    host: str = "127.0.0.1"
    file: str = ""
    every_seconds: float = 15.0

    @property
    def is_on(self) -> bool:
        """Whether anybody wants figures."""
        return self.port is not None or bool(self.file)


def parse_port(text: str) -> int | None:
    """Return the port that a user asks for: None for ``0`` (off), 0 for ``auto``.

    Raises:
        ConfigError: it is neither a port nor ``auto``.
    """
    word = text.strip().lower()
    if word == "auto":
        return 0
    if not (word.isascii() and word.isdecimal()) or int(word) > _PORT_MAX:
        raise ConfigError(
            f"--metrics-port {text!r} is neither a port nor auto",
            hint="0 serves none, auto takes a free one and prints it",
        )
    return int(word) or None
