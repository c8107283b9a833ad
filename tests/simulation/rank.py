"""One simulated rank: resume, claim, train, save, stop, by the library's own code.

Only training is made up: the state after a step follows from the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from resilient.checkpoint.context import CheckpointContext, CheckpointOptions
from resilient.checkpoint.restore.read import ReadRequest
from resilient.checkpoint.resume_selection import select_resume_checkpoint
from resilient.checkpoint.retention import Retention
from resilient.checkpoint.save.metadata import CheckpointInfo, draft_manifest
from resilient.checkpoint.save.persist import SaveHistory, SaveJob, persist
from resilient.checkpoint.start_generation import start_generation
from resilient.distributed.coordination import ControlGroup
from resilient.errors import Preempted, ResilientError
from resilient.events import Emitter
from resilient.format.document import canonical
from resilient.format.keys import CheckpointId, rank_part, rank_part_file, shard_name
from resilient.format.manifest import PartEntry, StoredRegion, TensorEntry
from resilient.format.regions import Region, whole
from resilient.format.safetensors_file import StagedFile, TensorSlot, compute_layout
from resilient.storage.retry import RetryingStore
from resilient.train.preemption import StopCoordinator, StopDeadline
from tests.simulation.loop import Condition, Dead
from tests.simulation.places import SimBoard, SimStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from resilient.distributed.launch_env import World
    from resilient.testing.memory_store import MemoryStore
    from tests.simulation.loop import Loop
    from tests.simulation.places import Hub, Link
    from tests.simulation.watcher import Watcher

WORDS = 12
WITHIN_SECONDS = 20.0
_LOSSES = (ResilientError, OSError, Dead)
"""Errors that end a coordinator's thread in a simulated failure."""
_GRACE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How a run trains: ``steps`` in all, a save every so many, of ``ranks``."""

    ranks: int = 2
    steps: int = 6
    every: int = 2
    keep_last: int = 2
    is_sharded: bool = True


@lru_cache(4096)
def value_at(step: int) -> bytes:
    """Return the model after ``step`` steps."""
    return b"".join(((step + 1) * 2654435761 + at).to_bytes(8, "little") for at in range(WORDS))


@lru_cache(4096)
def files_of(step: int, rank: int, ranks: int, *, is_sharded: bool) -> tuple[StagedFile, ...]:
    """Return what a rank stores: its share of the model, and a part of its own."""
    per = WORDS // ranks if is_sharded else WORDS if rank == 0 else 0
    box = Region((per * rank if is_sharded else 0,), (per,))
    own, noise = rank_part("rng_state", rank), value_at(step + rank)[:8]
    files = [_packed(rank_part_file("rng_state", rank), f"{own}/words", noise, whole((1,)), 1)]
    if per:
        mine = value_at(step)[8 * box.offsets[0] : 8 * (box.offsets[0] + per)]
        files.append(_packed(shard_name("model", rank), "model/value", mine, box, WORDS))
    if rank == 0:
        files.append(StagedFile("state.json", canonical({"model": {"steps": step}})))
    return tuple(files)


def _packed(name: str, tensor: str, data: bytes, box: Region, of: int) -> StagedFile:
    layout = compute_layout([TensorSlot(tensor, "I64", box.lengths)], {})
    stored = StoredRegion(box, name, layout.starts[tensor], len(data))
    entry = TensorEntry(tensor, tensor.partition("/")[0], "I64", (of,), (stored,))
    return StagedFile(name, layout.head + data, (entry,))


def content_of(proved: Any) -> bytes:
    """Return the model that a proved checkpoint holds."""
    tensor = next(one for one in proved.manifest.tensors if one.name == "model/value")
    regions = sorted(tensor.regions, key=lambda one: one.region.offsets)
    spans = ((proved.files[one.file], one.start, one.start + one.size_bytes) for one in regions)
    return b"".join(bytes(data[start:stop]) for data, start, stop in spans)


class _Everything:
    """Names of all parts."""

    def __contains__(self, _name: object) -> bool:
        return True


class _Freeze(Condition):
    """What a gate waits on: at its deadline the process ends, as the gate's own thread has it."""

    def wait_for(self, is_true: Callable[[], Any], timeout: float | None = None) -> Any:
        """Wait; who is frozen because the board is gone does so until the time is over."""
        held = super().wait_for(is_true, _GRACE_SECONDS if timeout is None else timeout)
        if timeout is None and not held:
            raise Dead
        return held


@dataclass
class Rank:
    """One process of one life.

    Attributes:
        hub: the board of this life.
        link: its host's way to the board and the store.
        request: reason to stop; None until a stop is requested.
    """

    loop: Loop
    plan: Plan
    world: World
    hub: Hub
    link: Link
    shared: MemoryStore
    watcher: Watcher
    cause: str
    number: int = 0
    step: int = 0
    gate: StopCoordinator | None = None
    committed: bool = False
    memory: SaveHistory = field(default_factory=SaveHistory)

    def main(self) -> None:
        """Live; what this raises is how the process ends."""
        board = SimBoard(self.hub, self.link)
        seen = lambda key, data: self.watcher.wrote(self, key, data)  # noqa: E731
        store = RetryingStore(
            SimStore(self.shared, self.link, seen), self.loop, 8.0, self.loop.draw
        )
        limits = CheckpointOptions(Retention(keep_last=self.plan.keep_last), WITHIN_SECONDS)
        comms = ControlGroup(board, self.world, "save")
        self.desk = CheckpointContext(store, comms, limits, self.loop, Emitter(self.loop))
        asked = self.watcher.resuming()
        choice = select_resume_checkpoint(
            store, comms, "auto", ReadRequest(_Everything()), WITHIN_SECONDS
        )
        self.step = choice.checkpoint.step if choice.checkpoint else 0
        self.watcher.resumed(self, choice, asked)
        self.life = start_generation(self.desk, choice, self.cause)
        self.number = self.life.number
        self.watcher.began(self)
        self._train(board)

    def _train(self, board: SimBoard) -> None:
        self.gate = gate = StopCoordinator(
            self.world, board, StopDeadline(_GRACE_SECONDS), self.loop
        )
        gate._condition = _Freeze(self.loop)
        gate._position = (self.step, 0)
        talk = self.loop.spawn(f"talk-{self.world.rank}", lambda: gate._exchange_messages(board))
        try:
            while self.step < self.plan.steps:
                if not gate.enter(self.step + 1):
                    self._stop()
                self.loop.sleep(self.loop.draw.uniform(0.1, 0.6))
                self.step += 1
                if self.step % self.plan.every == 0:
                    self._save()
        except Dead:
            self.loop.kill(talk)
            raise
        finally:
            gate.close()
        # The coordinator's own thread survives a lost store or a lost rank, but no other error.
        if talk.error is not None and not isinstance(talk.error, _LOSSES):
            raise talk.error

    def _stop(self) -> None:
        self.watcher.stopped(self)
        if self.step % self.plan.every:
            self._save()
        raise Preempted("as asked", hint="")

    def _save(self) -> None:
        plan, rank = self.plan, self.world.rank
        files = files_of(self.step, rank, plan.ranks, is_sharded=plan.is_sharded)
        parts = (PartEntry("model", "replicated", "state.json"),) if rank == 0 else ()
        about = draft_manifest(self.desk, self.life, self.step, CheckpointInfo(), ())
        topic, now_seconds = f"save/{self.step}", self.loop.now_seconds
        job = SaveJob(about, files, parts, (), not self.committed, topic, now_seconds, float)
        self.watcher.saving(self)
        persist(self.desk, job, self.memory)
        self.committed = True
        self.watcher.saved(self, CheckpointId(self.number, self.step))
