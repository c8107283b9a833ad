"""Resume policy: start checkpoint of an attempt, and refusal to start while a run still writes.

Each decision is a pure function of facts. The coordinator (rank 0) reads the facts, so all ranks
reach the same decision.

A resume option other than ``auto`` applies in every attempt until a checkpoint of this run exists.

The writer is the process of the newest attempt in the repository. A manual start is refused while
the writer is alive. If the writer ran on this host, the start checks the process of the writer. A
writer on another host is alive if its heartbeat changes while the start waits. A start is never
refused because of a dead writer, or because of the starting process itself. A writer of the same
scheduler job blocks a start only if its process is alive on this host. A restart by an agent, which
manages the workers of a host, is never refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from resilient.checkpoint.catalog import folders_of
from resilient.checkpoint.events import WriterAwaited, WriterSilent
from resilient.checkpoint.generations import list_marks, list_numbers, read_generation
from resilient.checkpoint.writer_heartbeat import HeartbeatWatch
from resilient.distributed.launch_env import HEARTBEAT_SECONDS
from resilient.errors import IntegrityError, KeyNotFound, NoIntactCheckpoint, WriterAlive
from resilient.format.keys import MANIFEST, CheckpointId
from resilient.processes import is_released
from resilient.redaction import shell_quote

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from resilient.checkpoint.context import CheckpointContext
    from resilient.checkpoint.generations import Generation
    from resilient.distributed.start_identity import StartIdentity
    from resilient.processes import ProcessIdentity
    from resilient.storage.store import Store

AUTO = "auto"
NEVER = "never"


@dataclass(frozen=True, slots=True)
class GenerationFacts:
    """One generation of the repository, as far as the resume policy needs it.

    Attributes:
        number: Number of the generation.
        is_of_this_run: Whether this run began the generation; None if its record cannot be read.
        parent: Checkpoint that the generation began from; None for a start from scratch.
        has_checkpoint: Whether a committed checkpoint of the generation exists.
        has_mark: Whether its mark shows that it committed a checkpoint.
    """

    number: int
    is_of_this_run: bool | None
    parent: CheckpointId | None = None
    has_checkpoint: bool = False
    has_mark: bool = False


@dataclass(frozen=True, slots=True)
class ResumeFacts:
    """Facts that decide where an attempt begins.

    Attributes:
        resume_option: ``auto``, ``never``, a reference or a folder.
        is_first: Whether no earlier attempt of this start can have written to the repository.
        generations: Generations of the repository, oldest first.
    """

    resume_option: str
    is_first: bool
    generations: tuple[GenerationFacts, ...] = ()


@dataclass(frozen=True, slots=True)
class ResumeDecision:
    """Reference that an attempt begins from, or a refusal.

    Attributes:
        reference: ``auto``, ``never``, a reference or a folder; empty for a refusal.
        reason: Reason if the reference differs from the option, or for the refusal.
    """

    reference: str
    reason: str = ""


def decide_resume(facts: ResumeFacts) -> ResumeDecision:
    """Decide where an attempt begins."""
    if facts.resume_option == AUTO:
        return ResumeDecision(AUTO)
    own_generations = [generation for generation in facts.generations if generation.is_of_this_run]
    saved_generations = [
        generation.number for generation in own_generations if generation.has_checkpoint
    ]
    if saved_generations:
        return ResumeDecision(
            AUTO, f"generation {saved_generations[-1]} of this run has saved a checkpoint"
        )
    if refusal := _refusal(facts, own_generations):
        return ResumeDecision("", refusal)
    pinned = [generation.parent for generation in own_generations if generation.parent is not None]
    if pinned and facts.resume_option != NEVER:
        # A reference such as `latest~1` means another checkpoint once a generation was claimed.
        return ResumeDecision(pinned[-1].folder, "this run started there")
    return ResumeDecision(facts.resume_option)


def _refusal(facts: ResumeFacts, own_generations: Sequence[GenerationFacts]) -> str:
    """Return why a run without a checkpoint may not begin as wished; empty if it may."""
    lost_generations = [generation.number for generation in own_generations if generation.has_mark]
    if lost_generations:
        return (
            f"generation {lost_generations[-1]} of this run committed checkpoints, and none is left"
        )
    unknown_generations = [] if facts.is_first else _unknown(facts, own_generations)
    if unknown_generations:
        return (
            f"the record of generation {unknown_generations[-1]} cannot be read, and its "
            "checkpoints may belong to this run"
        )
    return ""


def _unknown(facts: ResumeFacts, own_generations: Sequence[GenerationFacts]) -> list[int]:
    """Return the generations with checkpoints that may be of this run."""
    first = own_generations[0].number if own_generations else 0
    return [
        generation.number
        for generation in facts.generations
        if generation.is_of_this_run is None
        and generation.number > first
        and (generation.has_checkpoint or generation.has_mark)
    ]


def read_resume_facts(
    store: Store, resume_option: str, starts: Collection[StartIdentity], *, is_first: bool
) -> ResumeFacts:
    """Read the facts of a repository for a resume option.

    Crash: reads only.

    Args:
        store: Repository.
        resume_option: ``auto``, ``never``, a reference or a folder.
        starts: Identities of all ranks; an agent that joined later brings its own.
        is_first: Whether no earlier attempt of this start can have written to the repository.

    Raises:
        StoreError: The store failed, so the facts are unknown.
    """
    if resume_option == AUTO:
        return ResumeFacts(resume_option, is_first)
    numbers, marks, folders = list_numbers(store), set(list_marks(store)), folders_of(store)
    committed_generations = {
        checkpoint.generation for checkpoint, names in folders.items() if MANIFEST in names
    }
    facts = []
    for number in sorted({*numbers, *committed_generations, *marks}):
        is_of_this_run, parent = _owner(store, number, starts)
        facts.append(
            GenerationFacts(
                number, is_of_this_run, parent, number in committed_generations, number in marks
            )
        )
    return ResumeFacts(resume_option, is_first, tuple(facts))


def _owner(
    store: Store, number: int, starts: Collection[StartIdentity]
) -> tuple[bool | None, CheckpointId | None]:
    try:
        record = read_generation(store, number)
    except (IntegrityError, KeyNotFound):
        return None, None
    start_identity = record.start
    if start_identity is None:
        return False, record.parent
    return any(start.continues(start_identity) for start in starts), record.parent


def resolve_resume_option(
    store: Store, resume_option: str, starts: Collection[StartIdentity], *, is_first: bool
) -> ResumeDecision:
    """Decide where an attempt begins, from the records of the repository.

    Crash: reads only.

    Raises:
        NoIntactCheckpoint: A checkpoint of this run was lost, or an existing checkpoint may belong
            to this run.
        StoreError: The store failed, so the result is unknown.
    """
    decision = decide_resume(read_resume_facts(store, resume_option, starts, is_first=is_first))
    if not decision.reference:
        raise NoIntactCheckpoint(
            f"cannot obey `--resume {resume_option}` at {store.url}: {decision.reason}. Nothing "
            "was changed",
            hint=f"resilient ckpt verify --all {shell_quote(store.url)}; to obey --resume anyway, "
            "start the command again",
        )
    return decision


@dataclass(frozen=True, slots=True)
class Claimant:
    """The process that claims a generation.

    Attributes:
        process: The agent, or the training process without an agent; None if it is not known.
        takes_over: Whether the user asked to fence off a live writer.
        heartbeat_seconds: Time between two heartbeats of the process; 0 for none.
    """

    process: ProcessIdentity | None = None
    takes_over: bool = False
    heartbeat_seconds: float = HEARTBEAT_SECONDS


@dataclass(frozen=True, slots=True)
class WriterFacts:
    """Facts about the writer of the newest generation.

    Attributes:
        is_alive: The writer's process is proven alive and has not ended its run.
        is_here: The writer's process is proven to run on this host and has not ended its run.
        is_same_process: The starting process is the writer.
        is_restart: The agent or the scheduler began the writer's start again.
        is_same_job: Both belong to one scheduler job.
        takes_over: The user asked to fence off the writer.
    """

    is_alive: bool = False
    is_here: bool = False
    is_same_process: bool = False
    is_restart: bool = False
    is_same_job: bool = False
    takes_over: bool = False


def may_start(facts: WriterFacts) -> bool:
    """Decide whether a start may fence off the newest writer.

    A scheduler may restart a job on another host while the old host is unreachable. A scheduler
    never restarts a job beside a live process on the same host. In that case, a user started the
    command twice within the job.
    """
    if facts.takes_over or facts.is_same_process or facts.is_restart:
        return True
    return not facts.is_here if facts.is_same_job else not facts.is_alive


def is_alive_here(record: Generation) -> bool:
    """Return whether the claimant of a generation is proven to run here and may still write."""
    process = record.process
    return process is not None and process.is_running_here and not is_released(record.token)


def read_writer_facts(
    record: Generation, starts: Collection[StartIdentity], claimant: Claimant
) -> WriterFacts:
    """Compare the newest generation with the process that starts."""
    earlier, process = record.start, record.process
    is_here = is_alive_here(record)
    return WriterFacts(
        is_alive=is_here,
        is_here=is_here,
        is_same_process=process is not None and process == claimant.process,
        is_restart=earlier is not None and any(start.is_restart_of(earlier) for start in starts),
        is_same_job=earlier is not None and any(start.is_related(earlier) for start in starts),
        takes_over=claimant.takes_over,
    )


def newest_of_run(store: Store, starts: Collection[StartIdentity]) -> Generation | None:
    """Return the newest generation if one of these starts, or their scheduler job, began it.

    Crash: reads only.

    Raises:
        StoreError: The store failed.
    """
    newest = _newest(store)
    start_identity = newest.start if newest else None
    return (
        newest
        if start_identity and any(start.is_related(start_identity) for start in starts)
        else None
    )


def _newest(store: Store) -> Generation | None:
    numbers = list_numbers(store)
    try:
        return read_generation(store, numbers[-1]) if numbers else None
    except (IntegrityError, KeyNotFound):
        return None


def refuse_live_writer(
    context: CheckpointContext,
    starts: Collection[StartIdentity],
    claimant: Claimant,
    keep_alive: Callable[[], None] = lambda: None,
) -> None:
    """Refuse a manual start that would end the run of a live writer.

    A writer on another host may be alive. This function waits for its next heartbeat, up to 1.5
    heartbeat intervals.

    Crash: reads only.

    Args:
        context: Repository, clock and emitter.
        starts: Identities of all ranks that start.
        claimant: Process that starts.
        keep_alive: Callback during a wait, which extends the deadline of the other ranks.

    Raises:
        WriterAlive: Another process is proven alive and writes to the repository.
        StoreError: The store failed.
    """
    newest, is_new = None if claimant.takes_over else _newest(context.store), False
    while newest is not None and newest.process is not None:
        facts = read_writer_facts(newest, starts, claimant)
        if may_start(replace(facts, is_alive=True)):
            return
        is_known_here = newest.process.is_of_this_boot
        # A claim during the wait also shows that the writer is alive, for example after a restart
        # by its agent.
        if facts.is_alive or (is_new and not is_known_here):
            raise _writer_alive(context.store.url, newest, newest.process)
        if is_known_here:
            return
        answer = _await_heartbeat(context, newest, newest.process, keep_alive)
        if answer:
            raise _writer_alive(context.store.url, newest, newest.process)
        current = newest if answer is None else _newest(context.store)
        if current is None or current.token == newest.token:
            return
        newest, is_new = current, True


def _writer_alive(url: str, record: Generation, process: ProcessIdentity) -> WriterAlive:
    return WriterAlive(
        f"will not start: process {process.pid} on {record.host} has written to {url} since "
        f"{record.claimed_at}, and is alive; nothing was changed",
        hint="resilient train --take-over SCRIPT, or RESILIENT_TAKE_OVER=1: the other then ends "
        "with exit code 80 at its next save",
    )


def _await_heartbeat(
    context: CheckpointContext,
    newest: Generation,
    process: ProcessIdentity,
    keep_alive: Callable[[], None],
) -> bool | None:
    """Return whether the heartbeat of a writer on another host changes; None without one."""

    def report_wait(seconds: float) -> None:
        context.emit(WriterAwaited(process.pid, process.host, seconds))

    def is_replaced() -> bool:
        return list_numbers(context.store)[-1:] != [newest.number]

    began_seconds = context.clock.monotonic_seconds()
    watch = HeartbeatWatch(context.store, context.clock, report_wait, keep_alive, is_replaced)
    answer = watch.wait(newest.number, newest.token)
    if answer is False and not is_replaced():
        seconds = context.clock.monotonic_seconds() - began_seconds
        context.emit(WriterSilent(process.pid, process.host, seconds))
    return answer
