"""Verdict of a chaos experiment: observations of the faulted run, and guarantees kept or broken.

Each guarantee is judged separately, from all injections that test this guarantee. The functions
that judge guarantees are pure. Only the functions that inspect a repository read files.
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
    """Exit of an agent of one of several hosts.

    Attributes:
        host: Number of the host.
        code: Exit code as a shell shows it.
        codes: Correct exit codes.
    """

    host: int
    code: int
    codes: tuple[int, ...] = ()

    @property
    def is_right(self) -> bool:
        """True if the code is correct; 0, the end of the run, always is."""
        return self.code in (0, *self.codes)


@dataclass(frozen=True, slots=True)
class InjectionResult:
    """One injection and its consequences.

    Attributes:
        strike: The injection.
        what: Readable description of the fault.
        step: Last step that a rank had finished.
        code: Exit code of the job as a shell shows it, None if it continued by itself.
        codes: Correct exit codes; None among them if the job may continue.
        is_new_life: Whether ranks were started again.
        before: Newest checkpoint committed before the fault.
        after: Newest committed and undamaged checkpoint at the start of a new attempt.
        damaged: Checkpoint that was damaged.
        is_found: Whether verification found the damage.
        is_reconstructed: Whether resume reconstructed the damaged data.
        restored: Checkpoint from which the new attempt began; None for the very beginning.
        seconds: Time from the end of the fault, or from the following restart, to the next step.
        orphans: Processes of ranks that continued training without their agent.
        problem: Reason why the job did not continue; empty if it did.
        host: Host that was hit; None for all hosts, and for a single host.
        ends: Exits of the agents of several hosts.
        due: Oldest correct start of the new attempt by the events; None for ``after``.
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
    is_reconstructed: bool = False
    restored: CheckpointId | None = None
    seconds: float = 0.0
    orphans: tuple[int, ...] = ()
    problem: str = ""
    host: int | None = None
    ends: tuple[HostEnd, ...] = ()
    due: CheckpointId | None = None

    @property
    def lost_steps(self) -> int:
        """Number of steps that had to be trained again."""
        if not self.is_new_life:
            return 0
        return max(0, self.step - (self.restored.step if self.restored else 0))


@dataclass(frozen=True, slots=True)
class RunResult:
    """Result of a run.

    Attributes:
        code: Exit code of the last start as a shell shows it.
        problem: Reason of an early end; empty without one.
        step: Step of the newest checkpoint.
        steps: Steps of the committed checkpoints, in the order of time.
        damages: Problems of checkpoints without injected damage, by name.
        differences: Differences from the end of the undisturbed run.
        flaws: Reasons why the ledger does not show that each sample was trained once; None
            without a ledger.
        worlds: World sizes of the run, in order.
        is_canonical: Whether the bits are independent of the number of ranks.
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
    """All observations of an experiment.

    Attributes:
        calm: Result of the undisturbed run.
        ended: Result of the faulted run.
        struck: Injections in order.
        missed: Injections whose step never came, because the run had ended.
    """

    calm: RunResult
    ended: RunResult
    struck: tuple[InjectionResult, ...] = ()
    missed: tuple[Injection, ...] = ()


def is_same_world(calm: RunResult, ended: RunResult) -> bool:
    """Return whether both runs had the same number of ranks from beginning to end."""
    return set(calm.worlds) == set(ended.worlds) and len(set(ended.worlds)) <= 1


def is_comparable(calm: RunResult, ended: RunResult) -> bool:
    """Return whether both runs must have the same bits: equal ranks, or canonical reduction."""
    return is_same_world(calm, ended) or (calm.is_canonical and ended.is_canonical)


def ended_by(result: InjectionResult, subject: str, code: int, *right: int) -> InjectionResult:
    """Return an injection that ended the job.

    Args:
        result: Known facts of the injection.
        subject: Description of the fault.
        code: Exit code of the job.
        right: Correct exit codes.
    """
    return replace(result, what=subject, code=code, codes=right, is_new_life=code != 0)


_SHOWN_MAX = 3
_STOPPED = 75


class GuaranteeState(StrEnum):
    """State of a guarantee."""

    KEPT = "kept"
    BROKEN = "BROKEN"
    UNTESTED = "untested"


@dataclass(frozen=True, slots=True)
class GuaranteeResult:
    """Judged guarantee.

    Attributes:
        name: Name in one word.
        text: Text of the guarantee.
        state: State of the guarantee.
        why: Reason of a broken guarantee, or why no fault tested it.
    """

    name: str
    text: str
    state: GuaranteeState
    why: str = ""


def evaluate_guarantees(evidence: ExperimentResult) -> tuple[GuaranteeResult, ...]:
    """Return all guarantees with their states."""
    return (
        _survival(evidence),
        _exit_codes(evidence),
        _atomic(evidence),
        _durable(evidence),
        _detection(evidence),
        _available(evidence),
        _bounded(evidence),
        _judge_single_writer(evidence),
        _once(evidence),
        _exact(evidence),
    )


def is_proven(evidence: ExperimentResult, promises: Iterable[GuaranteeResult]) -> bool:
    """Return whether every fault was injected and no guarantee was broken."""
    return not evidence.missed and all(
        guarantee.state is not GuaranteeState.BROKEN for guarantee in promises
    )


def interval_steps(evidence: ExperimentResult) -> int:
    """Return the most steps between two saves of the undisturbed run, its beginning included."""
    steps = [0, *sorted(evidence.calm.steps)]
    return max((after - before for before, after in pairwise(steps)), default=0)


def bound_steps(struck: InjectionResult, interval: int) -> int:
    """Return the number of steps that an injection may cost.

    A graceful stop loses nothing. A death loses the steps since the last save, and one interval
    more if the next save was in flight. A damaged checkpoint costs one interval more.
    """
    if struck.code == _STOPPED:
        return 0
    return interval * (3 if struck.damaged and not struck.is_reconstructed else 2)


def _survival(evidence: ExperimentResult) -> GuaranteeResult:
    problems = [f"{result.what}: {result.problem}" for result in evidence.struck if result.problem]
    run_result = evidence.ended
    if not problems and (run_result.problem or run_result.code):
        problems.append(run_result.problem or f"the run ended with {run_result.code}")
    text = "after every fault the run continues, and reaches its end"
    return _judged("survival", text, problems, 1, "")


def _exit_codes(evidence: ExperimentResult) -> GuaranteeResult:
    tested = [result for result in evidence.struck if result.code is not None or result.ends]
    problems = [
        f"{result.what}: {problem}" for result in tested for problem in _wrong_codes(result)
    ]
    text = "exit codes name the cause of each end"
    return _judged("exit_codes", text, problems, len(tested), "no fault ended the job")


def _wrong_codes(result: InjectionResult) -> list[str]:
    if result.ends:
        # Judge each host's code. The job's code is one of them.
        return [
            f"host-{end.host} ended with {end.code} and not {_format_codes(end.codes)}"
            for end in result.ends
            if not end.is_right
        ]
    is_wrong = result.code is not None and result.code not in result.codes
    return [f"{result.code} and not {_format_codes(result.codes)}"] * is_wrong


def _atomic(evidence: ExperimentResult) -> GuaranteeResult:
    problems = [f"{name}: {problem}" for name, problem in evidence.ended.damages.items()]
    text = "every checkpoint is either complete or absent"
    return _judged("atomic", text, problems, 1, "")


def _durable(evidence: ExperimentResult) -> GuaranteeResult:
    tested = [
        result
        for result in evidence.struck
        if result.before and not result.damaged and not result.problem
    ]
    problems = [
        f"{result.what}: {result.before} was committed, but the newest was "
        f"{result.after or 'none'} afterwards"
        for result in tested
        if result.after is None or result.before is None or result.after < result.before
    ]
    text = "committed checkpoints stay, and the newest never becomes older"
    return _judged(
        "durable", text, problems, len(tested), "no fault came after a save without damage to it"
    )


def _detection(evidence: ExperimentResult) -> GuaranteeResult:
    tested = [result for result in evidence.struck if result.damaged]
    problems = [
        f"{result.what}: the damage was not found" for result in tested if not result.is_found
    ]
    text = "a flipped bit is found before its data is used"
    return _judged("detection", text, problems, len(tested), "no fault flipped a bit")


def _available(evidence: ExperimentResult) -> GuaranteeResult:
    tested = [result for result in evidence.struck if result.is_new_life and not result.problem]
    problems = [
        f"{result.what}: started from {result.restored or 'scratch'}, but {due_name} was intact"
        for result in tested
        for due_name in (result.due or result.after,)
        if due_name
        and not result.is_reconstructed
        and (result.restored is None or result.restored < due_name)
    ]
    text = "a new attempt starts from the newest intact checkpoint"
    return _judged("available", text, problems, len(tested), "no fault ended an attempt")


def _bounded(evidence: ExperimentResult) -> GuaranteeResult:
    interval = interval_steps(evidence)
    tested = [result for result in evidence.struck if result.is_new_life and not result.problem]
    problems = [
        f"{result.what}: {result.lost_steps} steps were lost, more than the limit of "
        f"{bound_steps(result, interval)}"
        for result in tested
        if result.lost_steps > bound_steps(result, interval)
    ]
    text = f"few steps are lost: saves are {interval} steps apart, and a stop loses none"
    return _judged("bounded", text, problems, len(tested), "no fault ended an attempt")


def _judge_single_writer(evidence: ExperimentResult) -> GuaranteeResult:
    tested = [result for result in evidence.struck if _ends_agent(result)]
    problems = [
        f"{result.what}: {len(result.orphans)} ranks continued to train"
        for result in tested
        if result.orphans
    ]
    text = "no rank trains after its agent has ended"
    return _judged("one_writer", text, problems, len(tested), "no fault killed the agent")


def _ends_agent(result: InjectionResult) -> bool:
    fault = result.strike.fault
    return fault.kind is FaultKind.KILL and fault.target is Target.AGENT


def _once(evidence: ExperimentResult) -> GuaranteeResult:
    flaws = evidence.ended.flaws
    text = "no sample was lost, and no sample was trained twice"
    reason = "the script keeps no ledger: use resilient.Trainer"
    return _judged("exactly_once", text, flaws or (), 0 if flaws is None else 1, reason)


def _exact(evidence: ExperimentResult) -> GuaranteeResult:
    calm, ended = evidence.calm, evidence.ended
    text = "the end is that of the run without faults, bit for bit"
    reason = "the run did not reach its end"
    is_tested = not ended.code and not ended.problem
    if is_tested and not is_comparable(calm, ended):
        struck_by, calm_by = (", ".join(map(str, result.worlds)) for result in (ended, calm))
        is_tested = False
        reason = (
            f"the ranks were {struck_by} under faults and {calm_by} without: only "
            'reduction="canonical" gives the same bits then'
        )
    return _judged("exact", text, ended.differences, is_tested, reason)


def _judged(name: str, text: str, wrong: Sequence[str], tested: int, why: str) -> GuaranteeResult:
    if not tested:
        return GuaranteeResult(name, text, GuaranteeState.UNTESTED, why)
    if not wrong:
        return GuaranteeResult(name, text, GuaranteeState.KEPT)
    hidden_count = len(wrong) - _SHOWN_MAX
    text_shown = "; ".join(wrong[:_SHOWN_MAX]) + (
        f"; and {hidden_count} more" if hidden_count > 0 else ""
    )
    return GuaranteeResult(name, text, GuaranteeState.BROKEN, text_shown)


def _format_codes(codes: Sequence[int | None]) -> str:
    return " or ".join(str(code) for code in codes if code is not None) or "to continue"


_DIFFERENCES_MAX = 20


def newest_intact(store: Store) -> CheckpointId | None:
    """Return the newest committed checkpoint without any damaged byte."""
    return next(
        (checkpoint for checkpoint in committed(store) if not _damage(store, checkpoint)), None
    )


def saved_steps(job: Job) -> tuple[int, ...]:
    """Return the steps of the committed checkpoints of a job, in the order of time."""
    facts = (event for event in job.facts() if event["event"] == "CheckpointCommitted")
    checkpoints = (parse_checkpoint(event["checkpoint"]) for event in facts)
    return tuple(checkpoint.step for checkpoint in checkpoints if checkpoint)


def measure(job: Job, ended: RunResult) -> RunResult:
    """Return a result with the facts that its bits depend on: the world sizes in order."""
    newest = newest_intact(job.store)
    if newest is None:
        return ended
    manifest = read_manifest(job.store, newest)
    lineage_checkpoints = lineage(job.store).candidates
    has_ledger = bool(lineage_checkpoints) and bool(list_segments(job.store))
    worlds = audit(job.store, lineage_checkpoints).ranks if has_ledger else ()
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
    """Return a result with the state of the repository: damages, differences, ledger flaws."""
    store = job.store
    newest = job.newest()
    is_complete = not ended.code and not ended.problem
    ended = measure(job, ended)
    return replace(
        ended,
        step=newest.step if newest else 0,
        damages=_damages(store, {result.damaged for result in struck if result.damaged}),
        differences=_differences(calm_store, store, calm, ended) if is_complete else (),
        flaws=_ledger_flaws(store),
    )


def _damages(store: Store, injected_damage: set[CheckpointId]) -> dict[str, str]:
    """Return the problems of checkpoints without injected damage."""
    damage_by_folder = {
        checkpoint.folder: _damage(store, checkpoint, injected_damage)
        for checkpoint in committed(store)
        if checkpoint not in injected_damage
    }
    return {name: problem for name, problem in damage_by_folder.items() if problem}


def _damage(
    store: Store, checkpoint: CheckpointId, injected_damage: Collection[CheckpointId] = ()
) -> str:
    folders = tuple(f"{result.folder}/" for result in injected_damage)
    try:
        findings = verify(store, checkpoint)
    except KeyNotFound:
        return ""  # Retention deleted the checkpoint meanwhile.
    hits = [
        finding
        for finding in findings
        if finding.severity == "damaged" and not (folders and finding.file.startswith(folders))
    ]
    return "; ".join(f"{damage.file}: {damage.problem}" for damage in hits)


def _differences(
    calm: Store, struck: Store, calm_result: RunResult, ended: RunResult
) -> tuple[str, ...]:
    # Import here: torch takes seconds to load, and nothing else in this module needs it.
    from resilient.testing.run_equality import differences, ending

    if not is_comparable(calm_result, ended):
        return ()
    # State that belongs to one rank differs for other ranks.
    with_own = is_same_world(calm_result, ended)
    try:
        calm_ending, struck_ending = (ending(store, with_own=with_own) for store in (calm, struck))
        problems = differences(calm_ending, struck_ending)
    except ResilientError as error:
        return (f"the end cannot be read: {error.message}",)
    hidden_count = len(problems) - _DIFFERENCES_MAX
    return tuple(
        problems[:_DIFFERENCES_MAX] + ([f"and {hidden_count} more"] if hidden_count > 0 else [])
    )


def _ledger_flaws(store: Store) -> tuple[str, ...] | None:
    lineage_checkpoints = lineage(store).candidates
    if not lineage_checkpoints or not list_segments(store):
        return None
    return tuple(f"{flaw.key}: {flaw.problem}" for flaw in audit(store, lineage_checkpoints).flaws)


KILLED, STOPPED = 137, 75
UNREACHABLE, NOT_DURABLE = 69, 73
SAVE_FAILED = (UNREACHABLE, NOT_DURABLE)
_CODES_BY_KIND = {
    FaultKind.PREEMPT: (STOPPED,),
    FaultKind.NOTICE: (STOPPED,),
    FaultKind.BIT_FLIP: (KILLED,),
    FaultKind.STORAGE_ERROR: SAVE_FAILED,
    FaultKind.DISK_FULL: SAVE_FAILED,
}


def correct_codes(fault: PlannedFault, struck: int | None, host: int) -> tuple[int, ...]:
    """Return the exit codes with which the agent of a host may end because of a fault.

    Code 0 is not included, because it means a complete run after any fault. An empty result means
    that the agent must continue.

    Args:
        fault: The fault.
        struck: Host that was hit; None for all hosts or none.
        host: Host of the agent.
    """
    if fault.kind is FaultKind.KILL and fault.target is Target.JOB:
        return (KILLED,)
    if struck is None or fault.kind in _CODES_BY_KIND:
        return _CODES_BY_KIND.get(fault.kind, ())
    # If the host served the rendezvous, the others cannot join again.
    other_host_codes = (UNREACHABLE,) if struck == MEETING_HOST else ()
    if fault.kind is FaultKind.CUT:
        return (UNREACHABLE,) if host == struck else other_host_codes
    if fault.kind is FaultKind.KILL and fault.is_of_host:
        return (KILLED,) if host == struck else other_host_codes
    return ()
