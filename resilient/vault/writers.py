"""Who may write to a repository, and how to shut them out.

There is no lock here that a dead process could leave behind: a new life begins whatever the one
before it was doing. What there is instead is the newest life. Whatever process belongs to it may
save and rotate until a newer one begins, also one that hung, was forgotten, or was cut off from
whoever started it. To shut it out is to begin a life that goes on from where resume would, and
saves nothing: nothing is abandoned by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from resilient.errors import Fenced, IncompatibleCheckpoint, IntegrityError, KeyNotFound
from resilient.format.names import MANIFEST
from resilient.showing import quoted
from resilient.vault.registry.abilities import check_abilities
from resilient.vault.registry.catalog import folders_of, lineage, read_manifest
from resilient.vault.registry.generations import (
    check_fence,
    claim,
    list_numbers,
    read_generation,
)
from resilient.vault.registry.moves import BY_HAND, UNLOCK

if TYPE_CHECKING:
    from resilient.clock import Clock
    from resilient.format.names import CheckpointId
    from resilient.storage.store import Store
    from resilient.vault.registry.generations import Generation

_ATTEMPTS_MAX = 8


@dataclass(frozen=True, slots=True)
class Writer:
    """The newest life of a run: whoever belongs to it may write.

    Attributes:
        life: its number.
        record: what it said when it began; None if that cannot be read.
        problem: why it cannot; rotation deletes nothing then until a newer life begins.
        last: the newest checkpoint that it committed, None for none.
        committed_at: when; empty if nothing says so.
        unfinished: newer ones that have files and no manifest: in flight, or left by a death.
        resume: what a resume would try first.
    """

    life: int
    record: Generation | None
    problem: str
    last: CheckpointId | None
    committed_at: str
    unfinished: tuple[CheckpointId, ...]
    resume: CheckpointId | None

    @property
    def is_nobody(self) -> bool:
        """Whether a command began the life, which saves nothing: everybody else is shut out."""
        by_command = self.record is not None and self.record.cause in BY_HAND | {UNLOCK}
        return by_command and self.last is None and not self.unfinished


def find_writer(store: Store) -> Writer | None:
    """Return the newest life of the run; None if none ever began.

    Crash: reads only.

    Raises:
        StoreError: the store failed; nothing is concluded from silence.
    """
    numbers, folders = list_numbers(store), folders_of(store)
    life = max([*numbers, *(one.generation for one in folders)], default=0)
    if not life:
        return None
    own = sorted((one for one in folders if one.generation == life), reverse=True)
    last = next((one for one in own if MANIFEST in folders[one]), None)
    unfinished = tuple(one for one in own if last is None or one > last)
    record, problem = _read(store, life)
    line = lineage(store, folders, numbers).candidates
    resume = line[0] if line else None
    return Writer(life, record, problem, last, _moment(store, last), unfinished, resume)


def _read(store: Store, life: int) -> tuple[Generation | None, str]:
    try:
        return read_generation(store, life), ""
    except IntegrityError as error:
        return None, error.message
    except KeyNotFound:
        return None, f"life {life} has no record"


def _moment(store: Store, checkpoint: CheckpointId | None) -> str:
    try:
        return read_manifest(store, checkpoint).created_at if checkpoint else ""
    except (IntegrityError, IncompatibleCheckpoint, KeyNotFound):
        return ""


def shut_out(store: Store, clock: Clock, *, single_writer: bool = False) -> Generation:
    """Begin a life from what resume takes; return it. No older one can commit any more.

    What the older life commits until that moment is not lost: the new one begins from it.

    Crash: either the life is there, or nothing changed. Once more does no harm.

    Args:
        store: the repository.
        clock: gives the record's time.
        single_writer: the user promises that no other job writes here.

    Raises:
        Fenced: another life began at the same moment and comes after; it may write now.
        NotExclusive: the store cannot fence and the user did not promise to be alone.
        StoreError: the store failed; the life may be there.
    """
    check_abilities(store, clock, single_writer=single_writer)
    first: int | None = None
    for _ in range(_ATTEMPTS_MAX):
        head = _resume_below(store, first)
        above = max((one.generation for one in folders_of(store)), default=0)
        life = claim(
            store, head, cause=UNLOCK, clock=clock, above=above, single_writer=single_writer
        )
        check_fence(store, life.number, life.token)
        first = first or life.number
        # Whoever wrote may have saved, or rotated, between the look and the claim.
        if _resume_below(store, first) == head:
            return life
    raise Fenced(
        f"whatever writes to {store.url} saved or rotated at each of {_ATTEMPTS_MAX} attempts",
        hint=f"resilient ckpt unlock {quoted(store.url)}",
    )


def _resume_below(store: Store, number: int | None) -> CheckpointId | None:
    """Return what resume would take if no life from ``number`` on had begun."""
    numbers, folders = list_numbers(store), folders_of(store)
    if number is not None:
        numbers = [one for one in numbers if one < number]
        folders = {one: names for one, names in folders.items() if one.generation < number}
    line = lineage(store, folders, numbers).candidates
    return line[0] if line else None
