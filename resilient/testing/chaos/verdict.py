"""Evidence -> guarantees kept or broken.

What was seen of a struck run, as values; what they mean is in `promises`.

What was seen -> promises kept and broken (pure).

Each promise is judged by itself, from all strikes that put it to the test.

What a run has left in its repository: what is whole, what is not, and how it differs.

Which exit codes of agents are right after a fault (pure).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING

from resilient.checkpoint.catalog import committed, lineage, read_manifest
from resilient.checkpoint.ledger_audit import audit
from resilient.checkpoint.ledger_segments import list_segments
from resilient.checkpoint.verify import verify
from resilient.errors import KeyNotFound, ResilientError
from resilient.format.keys import parse_checkpoint
from resilient.testing.chaos.job import MEETING_HOST
from resilient.testing.chaos.plan import FaultKind, PlannedFault, Target

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from resilient.format.keys import CheckpointId
    from resilient.storage.store import Store
    from resilient.testing.chaos.job import Job
    from resilient.testing.chaos.plan import Injection


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
class InjectionResult:
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

    strike: Injection
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
class RunResult:
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
class ExperimentResult:
    """Everything that was seen.

    Attributes:
        calm: the run that nothing happened to.
        ended: the struck one.
        struck: what was done to it, in order.
        missed: strikes whose step never came, for the run had ended.
    """

    calm: RunResult
    ended: RunResult
    struck: tuple[InjectionResult, ...] = ()
    missed: tuple[Injection, ...] = ()


def is_same_world(calm: RunResult, ended: RunResult) -> bool:
    """Whether both were made by the same number of ranks from beginning to end."""
    return set(calm.worlds) == set(ended.worlds) and len(set(ended.worlds)) <= 1


def is_comparable(calm: RunResult, ended: RunResult) -> bool:
    """Whether both must have the same bits: the same ranks made them, or any would have."""
    return is_same_world(calm, ended) or (calm.is_canonical and ended.is_canonical)


def ended_by(told: InjectionResult, what: str, code: int, *right: int) -> InjectionResult:
    """Return a strike that ended the job.

    Args:
        told: what is known of it.
        what: was done.
        code: with which the job ended.
        right: the codes that are right.
    """
    return replace(told, what=what, code=code, codes=right, is_new_life=code != 0)


_SHOWN_MAX = 3
_STOPPED = 75


class GuaranteeState(StrEnum):
    """What is known of a promise."""

    KEPT = "kept"
    BROKEN = "BROKEN"
    UNTESTED = "untested"


@dataclass(frozen=True, slots=True)
class GuaranteeResult:
    """One promise, judged.

    Attributes:
        name: in a word.
        text: what is promised.
        state: whether it was kept.
        why: what broke it, or why nothing tested it.
    """

    name: str
    text: str
    state: GuaranteeState
    why: str = ""


def evaluate_guarantees(evidence: ExperimentResult) -> tuple[GuaranteeResult, ...]:
    """Return all promises with what became of them."""
    return (
        _survival(evidence),
        _exit_codes(evidence),
        _atomic(evidence),
        _durable(evidence),
        _detection(evidence),
        _available(evidence),
        _bounded(evidence),
        _one_writer(evidence),
        _once(evidence),
        _exact(evidence),
    )


def is_proven(evidence: ExperimentResult, promises: Iterable[GuaranteeResult]) -> bool:
    """Whether every fault struck and no promise was broken."""
    return not evidence.missed and all(one.state is not GuaranteeState.BROKEN for one in promises)


def interval_steps(evidence: ExperimentResult) -> int:
    """Return the most steps between two saves of the undisturbed run, its beginning included."""
    steps = [0, *sorted(evidence.calm.steps)]
    return max((after - before for before, after in pairwise(steps)), default=0)


def bound_steps(struck: InjectionResult, interval: int) -> int:
    """Return how many steps a strike may cost.

    What stops in good order loses nothing. What dies loses what came after its last save, and
    one interval more if the next save was on its way; a damaged checkpoint costs one more.
    """
    if struck.code == _STOPPED:
        return 0
    return interval * (3 if struck.damaged and not struck.is_mended else 2)


def _survival(evidence: ExperimentResult) -> GuaranteeResult:
    problems = [f"{one.what}: {one.problem}" for one in evidence.struck if one.problem]
    ended = evidence.ended
    if not problems and (ended.problem or ended.code):
        problems.append(ended.problem or f"the run ended with {ended.code}")
    text = "after every fault the run goes on, and gets to its end"
    return _judged("survival", text, problems, 1, "")


def _exit_codes(evidence: ExperimentResult) -> GuaranteeResult:
    tested = [one for one in evidence.struck if one.code is not None or one.ends]
    wrong = [f"{one.what}: {said}" for one in tested for said in _wrong_codes(one)]
    text = "exit codes say why the job ended"
    return _judged("exit_codes", text, wrong, len(tested), "no fault ended the job")


def _wrong_codes(one: InjectionResult) -> list[str]:
    if one.ends:
        # Each host's for itself; the job's is one of them.
        return [
            f"host-{end.host} ended with {end.code} and not {_words(end.codes)}"
            for end in one.ends
            if not end.is_right
        ]
    is_wrong = one.code is not None and one.code not in one.codes
    return [f"{one.code} and not {_words(one.codes)}"] * is_wrong


def _atomic(evidence: ExperimentResult) -> GuaranteeResult:
    wrong = [f"{name}: {problem}" for name, problem in evidence.ended.damages.items()]
    text = "every checkpoint is whole or not there"
    return _judged("atomic", text, wrong, 1, "")


def _durable(evidence: ExperimentResult) -> GuaranteeResult:
    tested = [one for one in evidence.struck if one.before and not one.damaged and not one.problem]
    wrong = [
        f"{one.what}: {one.before} was committed, and then the newest was {one.after or 'none'}"
        for one in tested
        if one.after is None or one.before is None or one.after < one.before
    ]
    text = "what was committed stays, and the newest never becomes an older one"
    return _judged(
        "durable", text, wrong, len(tested), "no fault came after a save and left it undamaged"
    )


def _detection(evidence: ExperimentResult) -> GuaranteeResult:
    tested = [one for one in evidence.struck if one.damaged]
    wrong = [f"{one.what}: nobody found it" for one in tested if not one.is_found]
    text = "a changed bit is found before it is used"
    return _judged("detection", text, wrong, len(tested), "no fault changed a bit")


def _available(evidence: ExperimentResult) -> GuaranteeResult:
    tested = [one for one in evidence.struck if one.is_new_life and not one.problem]
    wrong = [
        f"{one.what}: began from {one.restored or 'scratch'}, and {due} was whole"
        for one in tested
        for due in (one.due or one.after,)
        if due and not one.is_mended and (one.restored is None or one.restored < due)
    ]
    text = "a new life begins from the newest checkpoint that is whole"
    return _judged("available", text, wrong, len(tested), "no fault ended a life")


def _bounded(evidence: ExperimentResult) -> GuaranteeResult:
    interval = interval_steps(evidence)
    tested = [one for one in evidence.struck if one.is_new_life and not one.problem]
    wrong = [
        f"{one.what}: {one.lost_steps} steps were lost, {bound_steps(one, interval)} at most may be"
        for one in tested
        if one.lost_steps > bound_steps(one, interval)
    ]
    text = f"little work is lost: saves are {interval} steps apart, and a stop loses none"
    return _judged("bounded", text, wrong, len(tested), "no fault ended a life")


def _one_writer(evidence: ExperimentResult) -> GuaranteeResult:
    tested = [one for one in evidence.struck if _ends_agent(one)]
    wrong = [f"{one.what}: {len(one.orphans)} ranks trained on" for one in tested if one.orphans]
    text = "no rank trains on when its agent is gone"
    return _judged("one_writer", text, wrong, len(tested), "no fault killed the agent")


def _ends_agent(one: InjectionResult) -> bool:
    fault = one.strike.fault
    return fault.kind is FaultKind.KILL and fault.target is Target.AGENT


def _once(evidence: ExperimentResult) -> GuaranteeResult:
    flaws = evidence.ended.flaws
    text = "no sample was lost and none trained on twice"
    why = "the script keeps no ledger: use resilient.Trainer"
    return _judged("exactly_once", text, flaws or (), 0 if flaws is None else 1, why)


def _exact(evidence: ExperimentResult) -> GuaranteeResult:
    calm, ended = evidence.calm, evidence.ended
    text = "the end is that of the undisturbed run, bit for bit"
    why = "the run did not get to its end"
    is_tested = not ended.code and not ended.problem
    if is_tested and not is_comparable(calm, ended):
        struck_by, calm_by = (", ".join(map(str, one.worlds)) for one in (ended, calm))
        is_tested = False
        why = (
            f"ranks were {struck_by}, and {calm_by} in the undisturbed run: only "
            'reduction="canonical" has the same bits then'
        )
    return _judged("exact", text, ended.differences, is_tested, why)


def _judged(name: str, text: str, wrong: Sequence[str], tested: int, why: str) -> GuaranteeResult:
    if not tested:
        return GuaranteeResult(name, text, GuaranteeState.UNTESTED, why)
    if not wrong:
        return GuaranteeResult(name, text, GuaranteeState.KEPT)
    more = len(wrong) - _SHOWN_MAX
    shown = "; ".join(wrong[:_SHOWN_MAX]) + (f"; and {more} more" if more > 0 else "")
    return GuaranteeResult(name, text, GuaranteeState.BROKEN, shown)


def _words(codes: Sequence[int | None]) -> str:
    return " or ".join(str(one) for one in codes if one is not None) or "to go on"


_DIFFERENCES_MAX = 20


def newest_whole(store: Store) -> CheckpointId | None:
    """Return the newest committed checkpoint of which every byte is what was committed."""
    return next((one for one in committed(store) if not _damage(store, one)), None)


def saved_steps(job: Job) -> tuple[int, ...]:
    """Return the steps of the checkpoints that a job has committed, in the order of time."""
    facts = (one for one in job.facts() if one["event"] == "CheckpointCommitted")
    found = (parse_checkpoint(one["checkpoint"]) for one in facts)
    return tuple(one.step for one in found if one)


def measure(job: Job, ended: RunResult) -> RunResult:
    """Return an end with what its bits depend on: how many ranks made it, and in which order."""
    newest = newest_whole(job.store)
    if newest is None:
        return ended
    manifest = read_manifest(job.store, newest)
    line = lineage(job.store).candidates
    has_ledger = bool(line) and bool(list_segments(job.store))
    worlds = audit(job.store, line).ranks if has_ledger else ()
    return replace(
        ended,
        worlds=worlds or job.worlds() or (int(manifest.world["size"]),),
        is_canonical=manifest.config.get("reduction") == "canonical",
    )


def examine(
    job: Job,
    ended: RunResult,
    struck: Sequence[InjectionResult],
    calm: RunResult,
    calm_store: Store,
) -> RunResult:
    """Return an end with what is left of it: damages, differences, what the ledger proves."""
    store = job.store
    newest = job.newest()
    done = not ended.code and not ended.problem
    ended = measure(job, ended)
    return replace(
        ended,
        step=newest.step if newest else 0,
        damages=_damages(store, {one.damaged for one in struck if one.damaged}),
        differences=_differences(calm_store, store, calm, ended) if done else (),
        flaws=_flaws(store),
    )


def _damages(store: Store, ours: set[CheckpointId]) -> dict[str, str]:
    """Return what is wrong with checkpoints that were not damaged on purpose."""
    found = {one.folder: _damage(store, one, ours) for one in committed(store) if one not in ours}
    return {name: problem for name, problem in found.items() if problem}


def _damage(store: Store, checkpoint: CheckpointId, ours: Collection[CheckpointId] = ()) -> str:
    folders = tuple(f"{one.folder}/" for one in ours)
    try:
        findings = verify(store, checkpoint)
    except KeyNotFound:
        return ""  # rotated away meanwhile
    hits = [
        one
        for one in findings
        if one.severity == "damaged" and not (folders and one.file.startswith(folders))
    ]
    return "; ".join(f"{one.file}: {one.problem}" for one in hits)


def _differences(
    calm: Store, struck: Store, calmly: RunResult, ended: RunResult
) -> tuple[str, ...]:
    # Torch takes seconds to load, and nobody else here needs it.
    from resilient.testing.run_equality import differences, ending

    if not is_comparable(calmly, ended):
        return ()
    # What each rank has of its own, other ranks have otherwise.
    with_own = is_same_world(calmly, ended)
    try:
        one, other = (ending(store, with_own=with_own) for store in (calm, struck))
        found = differences(one, other)
    except ResilientError as error:
        return (f"the end cannot be read: {error.message}",)
    more = len(found) - _DIFFERENCES_MAX
    return tuple(found[:_DIFFERENCES_MAX] + ([f"and {more} more"] if more > 0 else []))


def _flaws(store: Store) -> tuple[str, ...] | None:
    line = lineage(store).candidates
    if not line or not list_segments(store):
        return None
    return tuple(f"{one.key}: {one.problem}" for one in audit(store, line).flaws)


KILLED, STOPPED = 137, 75
UNREACHABLE, NOT_DURABLE = 69, 73
SAVE_FAILED = (UNREACHABLE, NOT_DURABLE)
_OF_ALL = {
    FaultKind.PREEMPT: (STOPPED,),
    FaultKind.NOTICE: (STOPPED,),
    FaultKind.BIT_FLIP: (KILLED,),
    FaultKind.STORAGE_ERROR: SAVE_FAILED,
    FaultKind.DISK_FULL: SAVE_FAILED,
}


def right_codes(fault: PlannedFault, struck: int | None, host: int) -> tuple[int, ...]:
    """Return the codes with which the agent of a host may end because of a fault.

    0 is not among them: it says that the run is over, whatever struck it. Where none is, the
    agent must go on.

    Args:
        fault: what went wrong.
        struck: the host that it was for; None: all of them, or none.
        host: the one of the agent.
    """
    if fault.kind is FaultKind.KILL and fault.target is Target.JOB:
        return (KILLED,)
    if struck is None or fault.kind in _OF_ALL:
        return _OF_ALL.get(fault.kind, ())
    # Where it served the rendezvous, the others have nobody left to meet at.
    others = (UNREACHABLE,) if struck == MEETING_HOST else ()
    if fault.kind is FaultKind.CUT:
        return (UNREACHABLE,) if host == struck else others
    if fault.kind is FaultKind.KILL and fault.is_of_host:
        return (KILLED,) if host == struck else others
    return ()
