"""How the place that resume takes has moved: each life, what it began from, where it ended.

Nothing is written down for this beside the records of lives: a rollback is a life that began from
an older checkpoint and saves nothing, and what it left is what the life before it ended with.
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
    from resilient.checkpoint.retention import Left
    from resilient.format.keys import CheckpointId
    from resilient.storage.store import Store

ROLLBACK = "ckpt-rollback"
UNDO = "ckpt-undo"
UNLOCK = "ckpt-unlock"
BY_HAND = frozenset({ROLLBACK, UNDO})


@dataclass(frozen=True, slots=True)
class ReflogHead:
    """Where a life ended: what resume takes if no later one had begun.

    Attributes:
        checkpoint: the newest that the life saved, else what it began from; None for scratch.
        gone: why that cannot be taken any more; empty if it can.
    """

    checkpoint: CheckpointId | None
    gone: str = ""


@dataclass(frozen=True, slots=True)
class ReflogEntry:
    """One life, as a move of the place that resume takes.

    Attributes:
        number: the life's.
        life: its record; None if that cannot be read.
        head: where it ended, or is now.
        back: how many lives began after it: ``@{2}`` is a reference to the head of 2.
    """

    number: int
    life: Generation | None
    head: ReflogHead
    back: int


class Reflog:
    """The lives of a repository, read once.

    Crash: reads only.

    Args:
        store: the repository.

    Raises:
        StoreError: the store failed; nothing is concluded from silence.
    """

    def __init__(self, store: Store) -> None:
        self._url = store.url
        self.numbers = list_numbers(store)
        self._marks = frozenset(list_marks(store))
        self._whole = committed(store)
        self._lives = {number: _read(store, number) for number in self.numbers}

    def newest_first(self) -> list[ReflogEntry]:
        """Return every life, the newest first."""
        return [
            ReflogEntry(number, self._lives[number], self.head_of(number), back)
            for back, number in enumerate(reversed(self.numbers))
        ]

    def head_of(self, number: int) -> ReflogHead:
        """Return where life ``number`` ended, or the one before if it left no trace."""
        while number > 0:
            own = [one for one in self._whole if one.generation == number]
            if own:
                return ReflogHead(own[0])
            if number in self._marks:
                return ReflogHead(None, f"what life {number} saved was deleted")
            life = self._lives.get(number)
            if life is None and number in self._lives:
                return ReflogHead(None, f"the record of life {number} cannot be read")
            if life and life.parent:
                there = life.parent in self._whole
                return ReflogHead(life.parent, "" if there else f"{life.parent} was deleted")
            number -= 1
        return ReflogHead(None)

    def undone_to(self) -> tuple[int, CheckpointId]:
        """Return the newest move by hand that was not taken back, and what it moved from.

        Raises:
            NothingToResume: there is no such move, or what it left was deleted.
            IntegrityError: a record is damaged, so nobody can tell.
        """
        open_moves: list[int] = []
        for number, life in self._lives.items():
            if life is None:
                raise IntegrityError(
                    f"the record of life {number} at {self._url} cannot be read, so it is unknown "
                    "what there is to undo",
                    key="",
                    hint=f"resilient ckpt rollback REF {shell_quote(self._url)} goes anywhere by name",
                )
            if life.cause == ROLLBACK:
                open_moves.append(number)
            elif life.cause == UNDO and open_moves:
                open_moves.pop()
        if not open_moves:
            raise NothingToResume(
                f"nothing to undo at {self._url}: no rollback is in force",
                hint=f"resilient ckpt reflog {shell_quote(self._url)}",
            )
        head = self.head_of(open_moves[-1] - 1)
        if head.checkpoint is None or head.gone:
            raise NothingToResume(
                f"the rollback of life {open_moves[-1]} cannot be undone: "
                f"{head.gone or 'it began from scratch'}",
                hint=f"resilient ckpt ls {shell_quote(self._url)}",
            )
        return open_moves[-1], head.checkpoint


def rolled_back_by_user(store: Store, abandoned: Iterable[CheckpointId]) -> set[CheckpointId]:
    """Return which of the abandoned checkpoints a person turned away from.

    The first later life that began from something older did so. A process of an older life that
    saved on its own is not among them. One to a few records are read for each life that has
    abandoned checkpoints.

    Crash: reads only.
    """
    numbers = list_numbers(store)
    lives: dict[int, Generation | None] = {}
    found = set()
    for one in abandoned:
        for number in (number for number in numbers if number > one.generation):
            if number not in lives:
                lives[number] = _read(store, number)
            life = lives[number]
            if life is not None and (life.parent is None or life.parent < one):
                if life.cause in BY_HAND:
                    found.add(one)
                break
    return found


def held_for_undo(
    store: Store, abandoned: Sequence[CheckpointId], left: Left
) -> dict[CheckpointId, list[str]]:
    """Return what stays because a person turned away from it and may come back, as reasons.

    Crash: reads only.

    Args:
        store: the repository.
        abandoned: what is outside the line of descent.
        left: ``all`` of it, only what ``ckpt undo`` goes back to, or ``none``.

    Raises:
        StoreError: the store failed.
    """
    held: dict[CheckpointId, list[str]] = {}
    if left == "all":
        for one in rolled_back_by_user(store, abandoned) if abandoned else ():
            held[one] = ["a rollback left it, and nobody pruned it"]
    elif left == "undo":
        try:
            _, target = Reflog(store).undone_to()
        except (IntegrityError, NothingToResume):
            return {}
        held[target] = ["`ckpt undo` goes back to it"]
    return held


def _read(store: Store, number: int) -> Generation | None:
    try:
        return read_generation(store, number)
    except (IntegrityError, KeyNotFound):
        return None
