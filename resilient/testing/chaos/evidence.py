"""What was seen of a struck run, as values; what they mean is in `promises`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.format.names import CheckpointId
    from resilient.testing.chaos.faults import Strike


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
    """

    code: int
    problem: str = ""
    step: int = 0
    steps: tuple[int, ...] = ()
    damages: Mapping[str, str] = field(default_factory=dict)
    differences: tuple[str, ...] = ()
    flaws: tuple[str, ...] | None = None


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
