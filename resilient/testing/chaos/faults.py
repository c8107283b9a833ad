"""The faults of a plan, and the strikes that a seed makes of them: the same seed, the same ones."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from random import Random


class Kind(StrEnum):
    """What goes wrong."""

    KILL = "kill"
    """SIGKILL to a rank, to an agent, to every process of a host, or of the job."""
    STOP = "stop"
    """SIGSTOP to a rank, and SIGCONT after ``seconds``."""
    SLOW = "slow"
    """A rank gets a tenth of its time for ``seconds``."""
    PREEMPT = "preempt"
    """SIGTERM to the job, which is started again once it has ended."""
    NOTICE = "notice"
    """A file says that the host goes in ``seconds``; the job is started again."""
    BIT_FLIP = "bit_flip"
    """The job is killed and one bit of its newest checkpoint changes."""
    STORAGE_ERROR = "storage_error"
    """Nothing can be made durable (EIO from fsync) for ``seconds``, or until a save has failed."""
    DISK_FULL = "disk_full"
    """No byte is free where checkpoints lie for ``seconds``, or until a save has failed."""
    CLOCK_SKEW = "clock_skew"
    """The wall clock of the job jumps by ``seconds`` and stays there."""
    CUT = "cut"
    """The link of a host is down for ``seconds``, and comes back."""


class Target(StrEnum):
    """Whom a ``kill`` is for."""

    RANK = "rank"
    AGENT = "agent"
    HOST = "host"
    JOB = "job"


@dataclass(frozen=True, slots=True)
class Planned:
    """One entry of a plan.

    Attributes:
        kind: what goes wrong.
        target: whom a ``kill`` is for.
        in_save: whether it waits until a checkpoint is being written.
        at: the part of the run in which it comes, as two shares of its steps.
        count: how often.
        seconds: how long it lasts, how far a clock jumps, or how long a killed host is away.
    """

    kind: Kind
    target: Target = Target.RANK
    in_save: bool = False
    at: tuple[float, float] = (0.1, 0.9)
    count: int = 1
    seconds: float = 0.0

    @property
    def needs_hosts(self) -> bool:
        """Whether it is about one host of several."""
        is_kill = self.kind is Kind.KILL and self.target is Target.HOST
        return is_kill or self.kind is Kind.CUT

    @property
    def is_of_host(self) -> bool:
        """Whether it is for one host rather than for a rank of any, or for all."""
        is_agent = self.kind is Kind.KILL and self.target is Target.AGENT
        return self.needs_hosts or is_agent or self.kind is Kind.NOTICE


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """A file of faults.

    Attributes:
        name: of the file.
        description: what it is for, in a line.
        faults: its entries.
    """

    name: str
    description: str
    faults: tuple[Planned, ...] = ()

    def has(self, kind: Kind) -> bool:
        """Whether any of the faults is of this kind."""
        return any(one.kind is kind for one in self.faults)

    @property
    def needs_hosts(self) -> bool:
        """Whether any of the faults is about one host of several."""
        return any(one.needs_hosts for one in self.faults)


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault at its place.

    Attributes:
        fault: what goes wrong.
        share: of the run's steps, where it comes.
        victim: which of the ranks or hosts, as a share of their number.
        draw: decides what else is open: which bit is flipped.
    """

    fault: Planned
    share: float
    victim: float
    draw: int

    def step(self, steps: int) -> int:
        """Return the step at which it comes, in a run of so many; never the last."""
        return min(max(1, round(self.share * steps)), max(1, steps - 1))

    def rank(self, ranks: int) -> int:
        """Return which of so many ranks it is for."""
        return min(int(self.victim * ranks), ranks - 1)

    def host(self, hosts: int) -> int:
        """Return which of so many hosts it is for."""
        return self.rank(hosts)


def draw_strikes(plan: ChaosPlan, seed: int) -> tuple[Strike, ...]:
    """Return the strikes of a plan in the order of the run; equal for equal plans and seeds.

    Each is drawn by itself, so that an entry more at the end of a plan moves none of the others.
    """
    strikes = []
    for number, fault in enumerate(plan.faults):
        for nth in range(fault.count):
            random = Random(f"{seed}/{number}/{nth}")  # noqa: S311 - repeatable is the point
            share = random.uniform(*fault.at)
            strikes.append(Strike(fault, share, random.random(), random.randrange(1 << 32)))
    return tuple(sorted(strikes, key=lambda one: one.share))
