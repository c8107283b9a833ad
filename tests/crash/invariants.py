"""The five invariants, held against any number of crash states, quickly.

Facts about a state follow from what is in it alone, so they are found once per distinct state by
the library's own code, and a checkpoint's proof once per distinct folder. What was promised by
then is compared with the facts each time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from little import Life, content_of, value_at

from resilient.errors import NoIntactCheckpoint, ResilientError
from resilient.format.names import CheckpointId
from resilient.testing.memory import MemoryStore
from resilient.vault import catalog
from resilient.vault.read import read
from resilient.vault.retention import Retention

if TYPE_CHECKING:
    from ledger import Expected

ANOTHER_STATE = "it holds another state than its step has"
REFUSED = "it refused to start, and nothing was lost"
TRAIN_ON = 2
"""How many steps a second life trains: enough for it to rotate."""


@dataclass(slots=True)
class Facts:
    """What the library makes of a state.

    Attributes:
        committed: every checkpoint with a manifest.
        broken: those that do not read back whole, and why.
        candidates: what resume would try, in order.
        second_life: why a second life did not end as an unbroken run; empty if it did, None if
            it was not tried.
    """

    committed: list[CheckpointId]
    broken: dict[CheckpointId, str]
    candidates: tuple[CheckpointId, ...]
    second_life: str | None = None


class Witness(MemoryStore):
    """Remembers what was read, and what was not there."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__()
        self.objects = objects
        self.seen: dict[str, bytes | None] = {}

    def _find(self, key: str) -> bytes:
        self.seen[key] = self.objects.get(key)
        return super()._find(key)


def shown(objects: dict[str, bytes]) -> MemoryStore:
    store = MemoryStore()
    store.objects = objects
    return store


@dataclass
class Checker:
    """Finds facts and compares them with what was promised.

    Attributes:
        keep: how many checkpoints the policy keeps at least.
        second_lives: how many were lived.
    """

    keep: int
    second_lives: int = 0
    _facts: dict[int, Facts] = field(default_factory=dict)
    _proofs: dict[tuple, list[tuple[dict[str, bytes | None], str]]] = field(default_factory=dict)

    def facts(self, digest: int, objects: dict[str, bytes], *, live_on: bool) -> Facts:
        found = self._facts.get(digest)
        if found is None:
            found = self._facts[digest] = self._find(objects)
        # Without anything to resume from, a life may only start over.
        if found.second_life is None and (live_on or not found.candidates):
            found.second_life = self._live_on(objects, found)
        return found

    def forget(self) -> None:
        """Let go of what no later state will ask for."""
        self._facts.clear()
        self._proofs.clear()

    def _find(self, objects: dict[str, bytes]) -> Facts:
        store = shown(objects)
        folders = catalog.folders_of(store)
        whole = sorted((one for one, names in folders.items() if "manifest.json" in names))
        broken = {}
        for one in whole:
            problem = self._prove(store, one)
            if problem:
                broken[one] = problem
        return Facts(whole, broken, catalog.lineage(store, folders).candidates)

    def _prove(self, store: MemoryStore, checkpoint: CheckpointId) -> str:
        """Return what a proof says; one that would read the same bytes again says the same."""
        known = self._proofs.setdefault((checkpoint, store.objects[checkpoint.manifest_key]), [])
        objects = store.objects
        for read_before, problem in known:
            if all(objects.get(key) is content for key, content in read_before.items()):
                return problem
        witness = Witness(objects)
        problem = proof_of(witness, checkpoint)
        known.append((witness.seen, problem))
        return problem

    def _live_on(self, objects: dict[str, bytes], facts: Facts) -> str:
        self.second_lives += 1
        store = shown(dict(objects))
        life = Life(store, Retention(keep_last=self.keep))
        ended = self._begin(life, facts)
        if ended is not None:
            return ended
        for _ in range(TRAIN_ON):
            life.save()
        life.end()
        newest = CheckpointId(life.life.number, life.step)
        after = catalog.lineage(store).candidates
        if after[:1] != (newest,):
            return f"it saved {newest} and would resume {after[:1]}"
        return proof_of(store, newest)

    def _begin(self, life: Life, facts: Facts) -> str | None:
        """Begin a second life; return how it ended if it ended there."""
        try:
            life.begin()
        except NoIntactCheckpoint as error:
            return str(error) if facts.candidates else REFUSED
        return None

    def violations(self, objects: dict[str, bytes], facts: Facts, expected: Expected) -> list[str]:
        """Return which invariants do not hold."""
        found = [f"1: {one} is listed and not whole: {why}" for one, why in facts.broken.items()]
        newest, first = expected.newest, facts.candidates[:1]
        if newest and (not first or first[0] < newest):
            found.append(f"2: {newest} was acknowledged; resume would take {first}")
        if len(facts.committed) < min(self.keep, expected.commits):
            found.append(f"3: {len(facts.committed)} of {expected.commits} committed are left")
        found += [
            f"4: `{key}` of a save in flight was touched"
            for key, content in expected.in_flight.items()
            if objects.get(key) != content
        ]
        found += [
            f"4: the tag's {one} is gone" for one in expected.pinned if one not in facts.committed
        ]
        if facts.second_life:
            found.append(f"5: {facts.second_life}")
        return found + unpromised(objects, expected)


class LyingChecker(Checker):
    """What must hold even where a disk forgets what it said to have kept.

    A checkpoint that lost something is seen to be damaged, and nothing else is taken for it; a
    second life goes on from a whole one, starts over if nothing is left, or refuses.
    """

    def violations(self, objects: dict[str, bytes], facts: Facts, expected: Expected) -> list[str]:
        del objects, expected
        found = [
            f"1: {one} is read and is not what was written: {why}"
            for one, why in facts.broken.items()
            if why == ANOTHER_STATE
        ]
        return found + ([f"5: {facts.second_life}"] if facts.second_life else [])

    def _begin(self, life: Life, facts: Facts) -> str | None:
        try:
            life.begin()
        except NoIntactCheckpoint:
            return ""
        return None


def unpromised(objects: dict[str, bytes], expected: Expected) -> list[str]:
    """Return the keys whose content no call and no answer of the store allows."""
    allowed = expected.allowed
    found = [
        f"0: `{key}` is {_short(objects.get(key))}"
        for key, contents in allowed.items()
        if objects.get(key) not in contents
    ]
    if len(objects) > len(allowed) or not objects.keys() <= allowed.keys():
        found += [f"0: `{key}` came from nowhere" for key in objects.keys() - allowed.keys()]
    return found


def _short(content: bytes | None) -> str:
    return "missing" if content is None else f"{len(content)} bytes {content[:20]!r}..."


def proof_of(store, checkpoint: CheckpointId) -> str:
    """Return why a checkpoint is not whole or holds another state than its step has."""
    try:
        proved = read(store, checkpoint)
    except ResilientError as error:
        return str(error)
    if content_of(proved.manifest, proved.files) != value_at(checkpoint.step):
        return ANOTHER_STATE
    return ""
