"""What was seen of a struck run, as values; what they mean is in `promises`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.format.names import CheckpointId
    from resilient.testing.chaos.faults import Strike


@dataclass(frozen=True, slots=True)
class HostEnd:
    """An agent of one of several hosts that ended.

    Attributes:
        host: the number of the host.
        code: its exit code, as a shell shows it.
        codes: those that are right.
    """

    host: int
    code: int
    codes: tuple[int, ...] = ()

    @property
    def is_right(self) -> bool:
        """Whether the code says what happened; the end of the run itself always may come."""
        return self.code in (0, *self.codes)


@dataclass(frozen=True, slots=True)
class Struck:
    """One strike, and what came of it.

    Attributes:
        strike: which one.
        what: what was done, for people.
        step: the last one that a rank had finished.
        code: exit code of the job as a shell shows it, None if it went on by itself.
        codes: those that are right; None among them if the job may go on.
        is_new_life: whether ranks were started anew.
        before: the newest checkpoint that was committed when it struck.
        after: the newest committed and undamaged one when a new life began.
        damaged: the checkpoint that was damaged.
        is_found: whether the damage was found by whoever looks.
        is_mended: whether resume computed back what was damaged.
        restored: where the new life began; None for the very beginning.
        seconds: from the end of the strike, or the new start after it, to the next step.
        orphans: processes of ranks that trained on without their agent.
        problem: why it did not go on; empty if it did.
        host: which of several was struck; None for all of them, and where there is one.
        ends: of the agents of several hosts.
        due: where the new life had to begin at least, as far as was told; None: at ``after``.
    """

    strike: Strike
    what: str
    step: int
    code: int | None = None
    codes: tuple[int | None, ...] = (None,)
    is_new_life: bool = False
    before: CheckpointId | None = None
    after: CheckpointId | None = None
    damaged: CheckpointId | None = None
    is_found: bool = False
    is_mended: bool = False
    restored: CheckpointId | None = None
    seconds: float = 0.0
    orphans: tuple[int, ...] = ()
    problem: str = ""
    host: int | None = None
    ends: tuple[HostEnd, ...] = ()
    due: CheckpointId | None = None

    @property
    def lost_steps(self) -> int:
        """Steps that had to be trained once more."""
        if not self.is_new_life:
            return 0
        return max(0, self.step - (self.restored.step if self.restored else 0))


@dataclass(frozen=True, slots=True)
class Ended:
    """What a run left.

    Attributes:
        code: exit code of its last start as a shell shows it.
        problem: why it ended before its time; empty if it did not.
        step: of its newest checkpoint.
        steps: of the checkpoints that it committed, in the order of time.
        damages: what is wrong with checkpoints that nobody damaged, by name.
        differences: where its end differs from that of the undisturbed run.
        flaws: why its ledger does not prove that each sample was trained once; None if it has none.
        worlds: numbers of ranks that made it, one after the other.
        is_canonical: whether its bits are those of any number of ranks.
    """

    code: int
    problem: str = ""
    step: int = 0
    steps: tuple[int, ...] = ()
    damages: Mapping[str, str] = field(default_factory=dict)
    differences: tuple[str, ...] = ()
    flaws: tuple[str, ...] | None = None
    worlds: tuple[int, ...] = ()
    is_canonical: bool = False


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that was seen.

    Attributes:
        calm: the run that nothing happened to.
        ended: the struck one.
        struck: what was done to it, in order.
        missed: strikes whose step never came, for the run had ended.
    """

    calm: Ended
    ended: Ended
    struck: tuple[Struck, ...] = ()
    missed: tuple[Strike, ...] = ()


def is_same_world(calm: Ended, ended: Ended) -> bool:
    """Whether both were made by the same number of ranks from beginning to end."""
    return set(calm.worlds) == set(ended.worlds) and len(set(ended.worlds)) <= 1


def is_comparable(calm: Ended, ended: Ended) -> bool:
    """Whether both must have the same bits: the same ranks made them, or any would have."""
    return is_same_world(calm, ended) or (calm.is_canonical and ended.is_canonical)


def ended_by(told: Struck, what: str, code: int, *right: int) -> Struck:
    """Return a strike that ended the job.

    Args:
        told: what is known of it.
        what: was done.
        code: with which the job ended.
        right: the codes that are right.
    """
    return replace(told, what=what, code=code, codes=right, is_new_life=code != 0)
