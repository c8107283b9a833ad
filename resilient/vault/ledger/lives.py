"""The records of lives, as the audit needs them: one for every number, and each what was claimed.

A record is claimed before anything else of its life, and nothing ever deletes one. So a number
without a record is work that nobody can account for any more; but for those that a claim left
out, which the next record says (``Generation.skipped``).
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from resilient.errors import IntegrityError, KeyNotFound
from resilient.format.names import generation_key, parse_segment
from resilient.vault.ledger.flaws import Flaw
from resilient.vault.ledger.segments import list_segments
from resilient.vault.registry.catalog import committed
from resilient.vault.registry.generations import list_marks, read_generation

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from resilient.storage.store import Store
    from resilient.vault.registry.generations import Generation

_PART = "this life's work is part of the result, and from where it began is not known"
_NOTHING = "whether this life trained, and from where, is not known"


def flaws_of_lives(
    store: Store, numbers: Sequence[int], chain: Collection[int], run_id: str
) -> list[Flaw]:
    """Return which lives have no record that proves, by number.

    Crash: reads only.

    Args:
        store: the repository.
        numbers: of all lives that have a record, readable or not.
        chain: lives whose work is part of the result.
        run_id: of the run.

    Raises:
        StoreError: the store failed; nothing is concluded from silence.
    """
    saved = {one.generation for one in committed(store)} | set(list_marks(store))
    segments = (parse_segment(key) for key in list_segments(store))
    saved |= {one.generation for one in segments if one}
    known, lives = {*numbers, *chain, *saved}, dict[int, "Generation"]()
    flaws = []
    for number in sorted(known):
        try:
            lives[number] = read_generation(store, number)
        except KeyNotFound:
            flaws.append(Flaw(generation_key(number), 0, f"is missing: {_why(number, chain)}"))
        except IntegrityError as error:
            problem = f"{error.message}: {_why(number, chain)}"
            flaws.append(Flaw(generation_key(number), 0, problem))
    flaws += [flaw for life in lives.values() for flaw in _of_another_run(life, run_id)]
    flaws += [flaw for pair in pairwise([0, *sorted(known)]) for flaw in _gap(*pair, lives)]
    return sorted(flaws, key=lambda one: one.key)


def _gap(before: int, after: int, lives: Mapping[int, Generation]) -> Iterator[Flaw]:
    """Find the numbers between two lives that no claim left out; there may be very many."""
    skipped = lives[after].skipped if after in lives else 0
    missing = after - skipped - before - 1
    if missing > 0:
        more = f", and {missing - 1} more up to life {before + missing}" if missing > 1 else ""
        yield Flaw(generation_key(before + 1), 0, f"is missing{more}: {_NOTHING}")


def _why(number: int, chain: Collection[int]) -> str:
    return _PART if number in chain else _NOTHING


def _of_another_run(life: Generation, run_id: str) -> Iterator[Flaw]:
    if life.run_id != run_id:
        problem = f"is of run {life.run_id}, and the ledger of run {run_id}"
        yield Flaw(generation_key(life.number), 0, problem)
