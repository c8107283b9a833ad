"""Live-writer check: refuses a manual start while the newest generation's writer is alive.

The decision is a pure function of facts. A dead process, the same process, the same scheduler job
and a restart by an agent never stop a start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from resilient.checkpoint.generations import list_numbers, read_generation
from resilient.errors import IntegrityError, KeyNotFound, WriterAlive
from resilient.processes import is_released

if TYPE_CHECKING:
    from collections.abc import Collection

    from resilient.checkpoint.generations import Generation
    from resilient.distributed.start_identity import StartIdentity
    from resilient.processes import ProcessIdentity
    from resilient.storage.store import Store


@dataclass(frozen=True, slots=True)
class Claimant:
    """The process that claims a generation.

    Attributes:
        process: The agent, or the training process without an agent; None if it is not known.
        takes_over: A live writer is fenced off on purpose.
    """

    process: ProcessIdentity | None = None
    takes_over: bool = False


@dataclass(frozen=True, slots=True)
class WriterFacts:
    """Facts about the writer of the newest generation.

    Attributes:
        is_alive: Its process is proven to run on this host and has not ended its run.
        is_same_process: The process that starts is that one.
        is_same_job: Both belong to one start or to one scheduler job.
        takes_over: The user asked to fence it off.
    """

    is_alive: bool = False
    is_same_process: bool = False
    is_same_job: bool = False
    takes_over: bool = False


def may_start(facts: WriterFacts) -> bool:
    """Decide whether a start may fence off the newest writer."""
    is_related = facts.is_same_process or facts.is_same_job
    return facts.takes_over or is_related or not facts.is_alive


def is_alive_here(record: Generation) -> bool:
    """Return whether the claimant of a generation is proven to run here and may still write."""
    process = record.process
    return process is not None and process.is_running_here and not is_released(record.token)


def read_writer_facts(
    record: Generation, starts: Collection[StartIdentity], claimant: Claimant
) -> WriterFacts:
    """Compare the newest generation with the process that starts."""
    begun, process = record.start, record.process
    return WriterFacts(
        is_alive=is_alive_here(record),
        is_same_process=process is not None and process == claimant.process,
        is_same_job=begun is not None and any(one.is_related(begun) for one in starts),
        takes_over=claimant.takes_over,
    )


def refuse_live_writer(store: Store, starts: Collection[StartIdentity], claimant: Claimant) -> None:
    """Refuse a manual start that would end the run of a live writer.

    Crash: reads only.

    Args:
        store: Repository.
        starts: Identities of all ranks that start.
        claimant: Process that starts.

    Raises:
        WriterAlive: Another process is proven alive and writes to the repository.
        StoreError: The store failed.
    """
    numbers = [] if claimant.takes_over else list_numbers(store)
    try:
        newest = read_generation(store, numbers[-1]) if numbers else None
    except (IntegrityError, KeyNotFound):
        return
    if newest is None or newest.process is None:
        return
    if may_start(read_writer_facts(newest, starts, claimant)):
        return
    raise WriterAlive(
        f"will not start: process {newest.process.pid} on {newest.host} has written to "
        f"{store.url} since {newest.claimed_at}, and is alive; nothing was changed",
        hint="resilient train --take-over SCRIPT, or RESILIENT_TAKE_OVER=1: the other then ends "
        "with exit code 80 at its next save",
    )
