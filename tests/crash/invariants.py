"""Fast checks of the five invariants in any number of crash states.

Facts about a state follow from what is in it alone, so they are found once per distinct state by
the library's own code, and a checkpoint's proof once per distinct folder. What was promised by
then is compared with the facts each time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from resilient.checkpoint import catalog
from resilient.checkpoint.restore.read import read
from resilient.checkpoint.tiers.tiered_store import TieredStore
from resilient.errors import NoIntactCheckpoint, ResilientError
from resilient.format.keys import CheckpointId
from resilient.testing.memory_store import MemoryStore
from tests.crash.little import NEAR, Life, Setup, content_of, value_at

if TYPE_CHECKING:
    from tests.crash.ledger import Expected

ANOTHER_STATE = "it holds another state than its step has"
REFUSED = "it refused to start, and nothing was lost"
TRAIN_ON = 2
"""How many steps a second life trains: enough for it to rotate."""


@dataclass(slots=True)
class Facts:
    """What the library makes of a state.

    Attributes:
        committed: every checkpoint with a manifest, by tier.
        broken: those that do not read back whole, and why, by tier and name.
        mendable: those of them that parity gives back.
        candidates: what resume would try, in order.
        durable: the same on a new host, where the near tier is empty.
        second_life: why a second life did not end as an unbroken run; empty if it did, None if
            it was not tried.
    """

    committed: dict[str, list[CheckpointId]]
    broken: dict[tuple[str, CheckpointId], str]
    mendable: frozenset[tuple[str, CheckpointId]]
    candidates: tuple[CheckpointId, ...]
    durable: tuple[CheckpointId, ...]
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
        setup: how the job saves.
        always_starts_over: whether a second life is lived in each state that has nothing to resume.
        second_lives: how many were lived.
    """

    setup: Setup
    always_starts_over: bool = True
    second_lives: int = 0
    _facts: dict[int, Facts] = field(default_factory=dict)
    _proofs: dict[tuple, list[tuple[dict[str, bytes | None], str]]] = field(default_factory=dict)

    def facts(self, digest: int, objects: dict[str, bytes], *, live_on: bool) -> Facts:
        found = self._facts.get(digest)
        if found is None:
            found = self._facts[digest] = self._find(objects)
        # Without anything to resume from, a life may only start over.
        live_on |= self.always_starts_over and not found.candidates
        if found.second_life is None and live_on:
            found.second_life = self._live_on(objects, found)
        return found

    def forget(self) -> None:
        """Drop the facts that no later state needs."""
        self._facts.clear()
        self._proofs.clear()

    def _find(self, objects: dict[str, bytes]) -> Facts:
        tiers = {place: shown(below(objects, place)) for place in self.setup.keeps}
        committed, broken = {}, {}
        for place, store in tiers.items():
            folders = catalog.folders_of(store)
            committed[place] = sorted(one for one in folders if one.manifest_key in store.objects)
            found = {(place, one): self._prove(store, place, one) for one in committed[place]}
            broken |= {where: problem for where, problem in found.items() if problem}
        broken |= different(tiers, committed)
        mendable = frozenset(
            (place, one)
            for place, one in (broken if self.setup.parity else ())
            if not proof_of(tiers[place], one, reconstructs=True)
        )
        durable = catalog.lineage(list(tiers.values())[-1]).candidates
        both = TieredStore(*tiers.values(), lambda *_: None) if len(tiers) > 1 else None
        candidates = catalog.lineage(both).candidates if both else durable
        return Facts(committed, broken, mendable, candidates, durable)

    def _prove(self, store: MemoryStore, place: str, checkpoint: CheckpointId) -> str:
        """Return what a proof says; one that would read the same bytes again says the same."""
        objects = store.objects
        about = (place, checkpoint, objects[checkpoint.manifest_key])
        known = self._proofs.setdefault(about, [])
        for read_before, problem in known:
            if all(objects.get(key) is content for key, content in read_before.items()):
                return problem
        witness = Witness(objects)
        problem = proof_of(witness, checkpoint)
        known.append((witness.seen, problem))
        return problem

    def _live_on(self, objects: dict[str, bytes], facts: Facts) -> str:
        """Return what is wrong with a second life: on this host, and on one with no near tier."""
        problem = self._live(objects, facts.candidates)
        if problem or self.setup.tiering is None:
            return problem
        far = {key: one for key, one in objects.items() if not key.startswith(f"{NEAR}/")}
        problem = self._live(far, facts.durable, is_new_host=True)
        return problem and f"on a new host {problem}"

    def _live(
        self,
        objects: dict[str, bytes],
        candidates: tuple[CheckpointId, ...],
        *,
        is_new_host: bool = False,
    ) -> str:
        self.second_lives += 1
        life = Life(shown(dict(objects)), self.setup)
        try:
            life.begin()
        except ResilientError as error:
            return self._refused(error, candidates, is_new_host=is_new_host)
        for _ in range(TRAIN_ON):
            life.save()
        try:
            life.end()
        except ResilientError as error:
            return self._unpromoted(error)
        newest = CheckpointId(life.life.number, life.step)
        for store in {id(one): one for one in (life.store, life.house)}.values():
            after = catalog.lineage(store).candidates
            if after[:1] != (newest,):
                return f"it saved {newest} and would resume {after[:1]}"
        return proof_of(self._ends_in(life), newest)

    def _ends_in(self, life: Life) -> object:
        """Return where the end of a second life must be whole."""
        return life.house

    def _refused(
        self,
        error: ResilientError,
        candidates: tuple[CheckpointId, ...],
        *,
        is_new_host: bool,
    ) -> str:
        """Return what is wrong with a life that refused to begin."""
        if candidates or not isinstance(error, NoIntactCheckpoint):
            return str(error)
        # All that was committed may have been near alone, and starting over must be asked for.
        return "" if is_new_host else REFUSED

    def _unpromoted(self, error: ResilientError) -> str:
        """Return what is wrong with a life whose last save stayed near."""
        return f"it could not end: {error}"

    def violations(self, objects: dict[str, bytes], facts: Facts, expected: Expected) -> list[str]:
        """Return which invariants do not hold."""
        found = [
            f"1: {place}{one} is listed and not whole: {why}"
            for (place, one), why in facts.broken.items()
            if one not in expected.damaged or (place, one) not in facts.mendable
        ]
        for newest, first, where in (
            (expected.newest, facts.candidates[:1], "resume"),
            (expected.promoted, facts.durable[:1], "resume on a new host"),
        ):
            if newest and (not first or first[0] < newest):
                found.append(f"2: {newest} was acknowledged; {where} would take {first}")
        for place, keep in self.setup.keeps.items():
            left, commits = len(facts.committed[place]), expected.commits[place]
            if left < min(keep, commits):
                found.append(f"3: {place}{left} of {commits} committed are left")
        found += [
            f"4: `{key}` of a save in flight was touched"
            for key, content in expected.in_flight.items()
            if objects.get(key) != content
        ]
        house = list(facts.committed.values())[-1]
        found += [f"4: the tag's {one} is gone" for one in expected.pinned if one not in house]
        if facts.second_life:
            found.append(f"5: {facts.second_life}")
        return found + unpromised(objects, expected)


class LyingChecker(Checker):
    """What must hold even where a disk forgets what it said to have kept.

    A checkpoint that lost something is seen to be damaged, and nothing else is taken for it; a
    second life goes on from a whole one, starts over if nothing is left, or refuses; what it can
    not promote, it says.
    """

    def violations(self, objects: dict[str, bytes], facts: Facts, expected: Expected) -> list[str]:
        del objects, expected
        found = [
            f"1: {one} is read and is not what was written: {why}"
            for one, why in facts.broken.items()
            if why == ANOTHER_STATE
        ]
        return found + ([f"5: {facts.second_life}"] if facts.second_life else [])

    def _refused(self, error, candidates, *, is_new_host: bool) -> str:
        del error, candidates, is_new_host
        return ""

    def _unpromoted(self, error: ResilientError) -> str:
        # Damage in the near tier is reported and never promoted.
        del error
        return ""

    def _ends_in(self, life: Life) -> object:
        # What the durable tier had already, a promotion knows by its size alone.
        return life.store


def below(objects: dict[str, bytes], place: str) -> dict[str, bytes]:
    """Return the objects of one tier, by their keys there."""
    if not place:
        return objects
    cut = len(place)
    return {key[cut:]: one for key, one in objects.items() if key.startswith(place)}


def different(
    tiers: dict[str, MemoryStore], committed: dict[str, list[CheckpointId]]
) -> dict[tuple[str, CheckpointId], str]:
    """Return the checkpoints whose manifest is not the same in both tiers."""
    first, *others = tiers
    return {
        (place, one): "it differs between the tiers"
        for place in others
        for one in committed[place]
        if one in committed[first]
        and tiers[place].objects[one.manifest_key] != tiers[first].objects[one.manifest_key]
    }


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


def proof_of(store, checkpoint: CheckpointId, *, reconstructs: bool = False) -> str:
    """Return why a checkpoint is not whole or holds another state than its step has."""
    try:
        proved = read(store, checkpoint, reconstructs=reconstructs)
    except ResilientError as error:
        return str(error)
    if content_of(proved.manifest, proved.files) != value_at(checkpoint.step):
        return ANOTHER_STATE
    return ""
