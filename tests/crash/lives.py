"""A run small enough to be killed thousands of times, and the invariants that must hold then.

The state is one tensor that every step folds its own number into, so any step that is lost,
repeated or taken from the wrong checkpoint changes the final bits. Beside it lie two larger ones,
of which one never changes and the other now and then: checkpoints refer to older ones' files.
Each save carries a segment of the ledger, and what is committed is proven by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from resilient.checkpoint import catalog
from resilient.checkpoint.context import CheckpointContext, CheckpointOptions
from resilient.checkpoint.ledger_audit import audit
from resilient.checkpoint.restore.read import read
from resilient.checkpoint.retention import Retention
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.checkpoint_engine import CheckpointEngine
from resilient.clock import SystemClock
from resilient.distributed.coordination import ControlGroup
from resilient.errors import Fenced, PeerFailed, ResilientError, SaveFailed
from resilient.events import Emitter
from resilient.format.keys import CheckpointId, split_checkpoint_key
from resilient.state_dict.snapshot import Part
from resilient.testing.fault_store import Crash, FaultyStore
from resilient.testing.memory_store import MemoryStore, run_ranks
from resilient.train.sample_ledger import Ledger

STEPS = 6
KEEP = 2
FOREIGN = {
    "readme.txt": b"not ours",
    "checkpoint-old/model.safetensors": b"another tool's",
    "checkpoint-2-g1/notes.txt": b"a person's",
    "generations/notes.txt": b"a person's",
}


class Folded:
    """State that remembers every step it saw, and in which order."""

    def __init__(self, salt: int, *, is_large: bool = False) -> None:
        self.is_large = is_large
        self.value = torch.tensor([1 + salt, 2, 3, 4], dtype=torch.int64)
        self.steps = 0
        self.frozen = torch.arange(2048)
        self.slow = torch.zeros(2048, dtype=torch.int64)

    def step(self) -> None:
        self.steps += 1
        self.value = (self.value * 6364136223846793005 + self.steps) ^ (self.value >> 7)
        if self.is_large and self.steps % 3 == 0:
            self.slow = self.slow * 31 + self.steps

    def state_dict(self):
        large = {"frozen": self.frozen, "slow": self.slow} if self.is_large else {}
        return {"value": self.value, "steps": self.steps, **large}

    def load_state_dict(self, state) -> None:
        self.value = state["value"].clone()
        self.steps = state["steps"]
        if self.is_large:
            self.frozen, self.slow = state["frozen"].clone(), state["slow"].clone()

    def ending(self):
        large = [int(self.frozen.sum()), *self.slow[:3].tolist()]
        return [*self.value.tolist(), self.steps, *large]


@dataclass
class Life:
    """What one life did before it ended or died."""

    final: list[list[int]] = field(default_factory=list)
    acknowledged: list[CheckpointId] = field(default_factory=list)
    started_at: int = 0
    failed_saves: int = 0
    died: bool = False
    error: BaseException | None = None


def live(store, ranks: int = 1, until: int = STEPS, attempt: str = "0") -> Life:
    """Resume, train to ``until`` saving every step, and say what happened."""
    life = Life()

    def rank_main(world, board):
        try:
            return _train(store, world, board, until, attempt, life)
        except (Crash, ResilientError) as error:
            life.died = life.died or isinstance(error, Crash)
            life.error = life.error or error
            board.fail(PeerFailed("a rank died"))
            if isinstance(error, Fenced):
                raise
            return []

    life.final = run_ranks(ranks, rank_main)
    return life


def _train(store, world, board, until, attempt, life):
    state, own = Folded(0, is_large=True), Folded(world.rank)
    parts = {"model": Part(state), "rng_state": Part(own, "rank")}
    comms = ControlGroup(board.another(), world, attempt)
    limits = CheckpointOptions(Retention(KEEP), within_seconds=20.0)
    checkpointer = CheckpointEngine(
        CheckpointContext(store, comms, limits, SystemClock(), Emitter(SystemClock()))
    )
    try:
        resumed = checkpointer.resume(parts)
        life.started_at = resumed.step if resumed else 0
        diary = Diary(world, resumed)
        while state.steps < until:
            state.step()
            own.step()
            diary.note(state.steps)
            _save(checkpointer, state.steps, parts, diary, life)
    finally:
        checkpointer._persister.close()
    return [*state.ending(), *own.ending()]


class Diary:
    """A ledger of steps that each use up four samples."""

    def __init__(self, world, resumed) -> None:
        self.world = world
        self.ledger = Ledger(is_kept=world.is_coordinator, ranks=world.size)
        samples = resumed.data["samples"] if resumed else 0
        self.cursor = SimpleNamespace(size=1000, seed=0, epoch=0, samples=samples)
        self.layout = SimpleNamespace(batch=4, ranks=1)
        self.ledger.begin(resumed, resumed.step if resumed else 0, self.cursor)

    def note(self, step: int) -> None:
        start, self.cursor.samples = self.cursor.samples, self.cursor.samples + 4
        self.ledger.end_step(step, start, self.cursor, self.layout, 1, [1.0], updated=True)
        self.ledger.settle(lambda losses: [sum(one) for one in losses])

    def about(self, checkpoint: CheckpointId, run_id: str) -> CheckpointInfo:
        data = {"epoch": 0, "samples": self.cursor.samples}
        return CheckpointInfo(data=data, segment=self.ledger.close(checkpoint, run_id))


def _save(checkpointer, step, parts, diary, life):
    try:
        about = diary.about(CheckpointId(checkpointer.generation, step), checkpointer.run_id)
        checkpoint = checkpointer.save(step, parts, about)
        checkpointer.wait()
    except SaveFailed:
        diary.ledger.reopen()
        life.failed_saves += diary.world.is_coordinator
        return
    if diary.world.is_coordinator:
        life.acknowledged.append(checkpoint)


class Witness(MemoryStore):
    """A store that also remembers which manifests ever came into being."""

    def __init__(self, objects=None) -> None:
        super().__init__()
        self.objects = dict(FOREIGN if objects is None else objects)
        self.ever_committed = set(catalog.committed(self))

    def put_new(self, key, data) -> None:
        super().put_new(key, data)
        split = split_checkpoint_key(key)
        if split and key == split[0].manifest_key:
            self.ever_committed.add(split[0])


def violations(store: Witness, acknowledged: list[CheckpointId]) -> list[str]:
    """Return which invariants do not hold, before any repair."""
    found = []
    there = catalog.committed(store)
    for checkpoint in there:
        try:
            read(store, checkpoint)
        except ResilientError as error:
            found.append(f"1: {checkpoint} is listed and not whole: {error}")
    newest = max(acknowledged, default=None)
    candidates = catalog.lineage(store).candidates
    if newest and (not candidates or candidates[0] < newest):
        found.append(f"2: {newest} was acknowledged and is gone; left are {candidates}")
    if len(there) < min(KEEP, len(store.ever_committed)):
        found.append(f"3: {len(there)} left of {len(store.ever_committed)} committed")
    if candidates and not any(one.startswith("1:") for one in found):
        found += [f"7: the ledger: {flaw}" for flaw in audit(store, candidates).flaws]
    if any(store.objects.get(key) != content for key, content in FOREIGN.items()):
        found.append("4: a foreign object was touched")
    return found


def unneeded(store: Witness) -> list[str]:
    """Return what an undisturbed rotation would have taken: files that no checkpoint needs."""
    there = catalog.committed(store)
    needed = {
        manifest.key(file.name)
        for manifest in (catalog.read_manifest(store, one) for one in there)
        for file in manifest.files
    }
    found = []
    for key in sorted(store.objects.keys() - needed - FOREIGN.keys()):
        split = split_checkpoint_key(key)
        if split and split[0] < max(there) and key != split[0].manifest_key:
            found.append(f"6: nobody needs {key}, and it is there")
    return found


def crashed_life(store: Witness, plan, ranks: int, attempt: str) -> tuple[Life, list[str]]:
    """Run one life to which ``plan`` happens; return it and the violations it left."""
    life = live(FaultyStore(store, plan), ranks, attempt=attempt)
    return life, violations(store, life.acknowledged)
