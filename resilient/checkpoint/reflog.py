"""Reflog: all attempts, each with the checkpoint that a resume after this attempt would load.

Each entry is one attempt, with its parent and its end. The parent is the checkpoint from which the
attempt started. The end is the newest checkpoint of the attempt, or its parent if it saved nothing.
The reflog has no records of its own. A rollback is an attempt that starts from an older checkpoint
and saves nothing. After the rollback, resume no longer uses the checkpoint at which the previous
attempt ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from resilient.checkpoint.catalog import committed
from resilient.checkpoint.generations import list_marks, list_numbers, read_generation
from resilient.errors import IntegrityError, KeyNotFound, NothingToResume
from resilient.redaction import shell_quote

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from resilient.checkpoint.generations import Generation
    from resilient.checkpoint.retention import AbandonedPolicy
    from resilient.format.keys import CheckpointId
    from resilient.storage.store import Store

ROLLBACK = "ckpt-rollback"
UNDO = "ckpt-undo"
UNLOCK = "ckpt-unlock"
BY_HAND = frozenset({ROLLBACK, UNDO})


@dataclass(frozen=True, slots=True)
class ReflogHead:
    """End of an attempt: the checkpoint that resume would take without later attempts.

    Attributes:
        checkpoint: Newest checkpoint of the attempt, else the parent; None if the attempt started
            from scratch.
        gone: Reason why the checkpoint is unusable; empty if it is usable.
    """

    checkpoint: CheckpointId | None
    gone: str = ""


@dataclass(frozen=True, slots=True)
class ReflogEntry:
    """One attempt, as a change of the checkpoint that resume takes.

    Attributes:
        number: Generation number.
        life: Generation record; None if it cannot be read.
        head: End of the attempt; the end so far if the attempt still runs.
        back: Number of later generations; ``@{2}`` refers to the head of the entry with 2.
    """

    number: int
    life: Generation | None
    head: ReflogHead
    back: int


class Reflog:
    """Generations of a repository, read once.

    Crash: reads only.

    Args:
        store: Repository.

    Raises:
        StoreError: The store failed. A missing answer does not mean a missing record.
    """

    def __init__(self, store: Store) -> None:
        self._url = store.url
        self.numbers = list_numbers(store)
        self._marks = frozenset(list_marks(store))
        self._committed = committed(store)
        self._generations = {number: _read(store, number) for number in self.numbers}

    def newest_first(self) -> list[ReflogEntry]:
        """Return all entries, the newest first."""
        return [
            ReflogEntry(number, self._generations[number], self.head_of(number), distance)
            for distance, number in enumerate(reversed(self.numbers))
        ]

    def head_of(self, number: int) -> ReflogHead:
        """Return the end of generation ``number``.

        If the generation has no record, or started from scratch without a commit, return the end of
        the generation before it.
        """
        while number > 0:
            own_checkpoints = [
                checkpoint for checkpoint in self._committed if checkpoint.generation == number
            ]
            if own_checkpoints:
                return ReflogHead(own_checkpoints[0])
            if number in self._marks:
                return ReflogHead(None, f"the checkpoints of generation {number} were deleted")
            generation = self._generations.get(number)
            if generation is None and number in self._generations:
                return ReflogHead(None, f"the record of generation {number} cannot be read")
            if generation and generation.parent:
                parent_exists = generation.parent in self._committed
                return ReflogHead(
                    generation.parent, "" if parent_exists else f"{generation.parent} was deleted"
                )
            number -= 1
        return ReflogHead(None)

    def undone_to(self) -> tuple[int, CheckpointId]:
        """Return the generation of the newest rollback in force, and the checkpoint it abandoned.

        Raises:
            NothingToResume: There is no such rollback, or the checkpoint that it abandoned was
                deleted.
            IntegrityError: A record is damaged, so the answer is unknown.
        """
        open_moves: list[int] = []
        for number, generation in self._generations.items():
            if generation is None:
                raise IntegrityError(
                    f"the record of generation {number} at {self._url} cannot be read, so the "
                    "rollback to undo is unknown",
                    key="",
                    hint=f"resilient ckpt rollback REF {shell_quote(self._url)} goes to any "
                    "checkpoint by name",
                )
            if generation.cause == ROLLBACK:
                open_moves.append(number)
            elif generation.cause == UNDO and open_moves:
                open_moves.pop()
        if not open_moves:
            raise NothingToResume(
                f"nothing to undo at {self._url}: no rollback is in force",
                hint=f"resilient ckpt reflog {shell_quote(self._url)}",
            )
        head = self.head_of(open_moves[-1] - 1)
        if head.checkpoint is None or head.gone:
            raise NothingToResume(
                f"the rollback of generation {open_moves[-1]} cannot be undone: "
                f"{head.gone or 'it started from scratch'}",
                hint=f"resilient ckpt ls {shell_quote(self._url)}",
            )
        return open_moves[-1], head.checkpoint


def rolled_back_by_user(store: Store, abandoned: Iterable[CheckpointId]) -> set[CheckpointId]:
    """Return the checkpoints that a user abandoned by a rollback or undo.

    A checkpoint is included if a rollback or undo was the first later attempt to start from an
    older checkpoint. Late saves by a process of an older generation are not included. One to a few
    records are read for each generation with abandoned checkpoints.

    Crash: reads only.
    """
    numbers = list_numbers(store)
    generations: dict[int, Generation | None] = {}
    checkpoints = set()
    for checkpoint in abandoned:
        for number in (number for number in numbers if number > checkpoint.generation):
            if number not in generations:
                generations[number] = _read(store, number)
            generation = generations[number]
            if generation is not None and (
                generation.parent is None or generation.parent < checkpoint
            ):
                if generation.cause in BY_HAND:
                    checkpoints.add(checkpoint)
                break
    return checkpoints


def pinned_for_undo(
    store: Store, abandoned: Sequence[CheckpointId], policy: AbandonedPolicy
) -> dict[CheckpointId, list[str]]:
    """Return abandoned checkpoints to keep for an undo of a rollback, with the reasons.

    Crash: reads only.

    Args:
        store: Repository.
        abandoned: Checkpoints outside the line of descent.
        policy: Keep ``all`` of them, only the target of ``ckpt undo`` (``undo``), or ``none``.

    Raises:
        StoreError: The store failed.
    """
    pins: dict[CheckpointId, list[str]] = {}
    if policy == "all":
        for checkpoint in rolled_back_by_user(store, abandoned) if abandoned else ():
            pins[checkpoint] = ["a rollback abandoned it, and it was not pruned"]
    elif policy == "undo":
        try:
            _, target = Reflog(store).undone_to()
        except (IntegrityError, NothingToResume):
            return {}
        pins[target] = ["it is the target of `ckpt undo`"]
    return pins


def _read(store: Store, number: int) -> Generation | None:
    try:
        return read_generation(store, number)
    except (IntegrityError, KeyNotFound):
        return None
