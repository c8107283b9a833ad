"""A run without torch, small and quick enough to be crashed millions of times.

Its state at a step follows from the step alone, so that whoever reads a checkpoint knows what
must be in it. Resume, claim, save, rotate, prune and tag are the library's own.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from resilient.errors import ResilientError, UsageError
from resilient.events import Emitter, SaveAborted
from resilient.format.document import canonical
from resilient.format.manifest import Manifest, PartEntry, StoredRegion, TensorEntry
from resilient.format.names import CheckpointId, rank_part, rank_part_file, shard_name
from resilient.format.regions import Region, whole
from resilient.format.shard import HostFile, Slot, lay_out
from resilient.vault.begin import begin
from resilient.vault.choose import Wanted, choose
from resilient.vault.commit import commit, gather_receipts
from resilient.vault.desk import Desk, Limits
from resilient.vault.generations import mark_committed
from resilient.vault.persist import Job, persist
from resilient.vault.refer import Base, base_of, divide
from resilient.vault.rotate import carry_out, discard, look, rotate
from resilient.vault.tags import create_tag, remove_tag
from resilient.vault.write import write
from resilient.world.comms import Comms
from resilient.world.memory import MemoryBoard
from resilient.world.world import World

if TYPE_CHECKING:
    from resilient.vault.retention import Retention

WORDS = 64
"""Elements of the model: more than one block of the disk."""
FROZEN = bytes(range(256)) * 64
"""Just long enough to be referred to and not written again."""


@lru_cache(4096)
def value_at(step: int) -> bytes:
    """Return the model's bytes after ``step`` steps."""
    value = 1
    for number in range(1, step + 1):
        value = (value * 6364136223846793005 + number) % (1 << 64) ^ (value >> 7)
    return b"".join(((value + at) % (1 << 64)).to_bytes(8, "little") for at in range(WORDS))


def _packed(name: str, tensor: str, data: bytes, box: Region, of: int) -> HostFile:
    """Return a file with one box of a tensor of ``of`` elements."""
    dtype = "I64" if len(data) == 8 * box.size else "U8"
    layout = lay_out([Slot(tensor, dtype, box.lengths)], {})
    stored = StoredRegion(box, name, layout.starts[tensor], len(data))
    entry = TensorEntry(tensor, tensor.partition("/")[0], dtype, (of,), (stored,))
    return HostFile(name, layout.head + data, (entry,))


@lru_cache(4096)
def files_of(step: int, rank: int, ranks: int) -> tuple[HostFile, ...]:
    """Return what one rank stores: its piece, its own part, of rank 0 also what never changes."""
    per = WORDS // ranks
    mine = value_at(step)[8 * per * rank : 8 * per * (rank + 1)]
    box = Region((per * rank,), (per,))
    own = rank_part("rng_state", rank)
    noise = value_at(step + 1000 + rank)[:24]
    files = [
        _packed(shard_name("model", rank), "model/value", mine, box, WORDS),
        _packed(rank_part_file("rng_state", rank), f"{own}/words", noise, whole((24,)), 24),
    ]
    if rank == 0:
        box, size = whole((len(FROZEN),)), len(FROZEN)
        files.append(_packed(shard_name("frozen", 0), "frozen/base", FROZEN, box, size))
        files.append(HostFile("state.json", canonical({"model": {"steps": step}})))
    return tuple(files)


def parts_of(rank: int) -> tuple[PartEntry, ...]:
    """Return the parts whose documents a rank stores."""
    return (PartEntry("model", "replicated", "state.json"),) if rank == 0 else ()


def content_of(manifest: Manifest, files) -> bytes:
    """Return the model that a proved checkpoint holds."""
    tensor = next(one for one in manifest.tensors if one.name == "model/value")
    regions = sorted(tensor.regions, key=lambda one: one.region.offsets)
    spans = ((files[one.file], one.start, one.start + one.size_bytes) for one in regions)
    return b"".join(bytes(data[start:stop]) for data, start, stop in spans)


class TickingClock:
    """Time that goes on by itself, a quarter of an hour at each look at the wall."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic_seconds(self) -> float:
        self.seconds += 0.001
        return self.seconds

    def now_iso(self) -> str:
        self.seconds += 900
        minutes, _ = divmod(int(self.seconds), 60)
        hours, minute = divmod(minutes, 60)
        days, hour = divmod(hours, 24)
        return f"2026-{1 + days // 28 % 12:02d}-{1 + days % 28:02d}T{hour:02d}:{minute:02d}:00.000Z"

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


class Book:
    """What the user of a store is told; the base class does not care."""

    def saving(self, checkpoint: CheckpointId) -> None: ...

    def saved(self, checkpoint: CheckpointId) -> None: ...

    def failed(self) -> None: ...

    def began(self, generation: int) -> None: ...


@dataclass
class Life:
    """One life of a job with one rank, or with several that a ``together`` lets take turns.

    Attributes:
        step: what it has trained so far.
        best: what the run protects.
    """

    store: object
    retention: Retention
    clock: TickingClock = field(default_factory=TickingClock)
    book: Book = field(default_factory=Book)
    ranks: int = 1
    together: object = None
    step: int = 0
    best: tuple[CheckpointId, ...] = ()

    def __post_init__(self) -> None:
        comms = Comms(MemoryBoard(), World(), "life")
        emit = Emitter(self.clock, (self._hear,))
        self.desk = Desk(self.store, comms, Limits(self.retention, 20.0), self.clock, emit)
        self._saves, self._committed, self._untidied = 0, False, None
        self._bases: tuple[Base, ...] = ()

    def begin(self) -> CheckpointId | None:
        """Resume and claim; return what was resumed from."""
        choice = choose(self.store, self.desk.comms, "auto", Wanted(_Everything()), 20.0)
        if choice.proved is not None:
            self._bases = (base_of(choice.proved, self.store),)
            self.step = choice.checkpoint.step
            content = content_of(choice.proved.manifest, choice.proved.files)
            assert content == value_at(self.step), f"{choice.checkpoint} holds another state"
        self.life = begin(self.desk, choice, "start")
        self.book.began(self.life.number)
        return choice.checkpoint

    def save(self, metric: float = 0.0) -> None:
        """Train one step and save it; a save that fails is no end."""
        self.step += 1
        self._saves += 1
        checkpoint = CheckpointId(self.life.number, self.step)
        about = self._about(checkpoint, metric)
        self.book.saving(checkpoint)
        try:
            if self.ranks == 1:
                files = files_of(self.step, 0, 1)
                first = not self._committed
                topic = f"save/{self._saves}"
                job = Job(
                    about, files, parts_of(0), self.best, first, topic, 0.0, float, self._bases
                )
                persist(self.desk, job)
            else:
                self._save_together(about)
        except ResilientError:
            self.book.failed()
            self._bases = (Base(checkpoint), *self._bases)[:4]
            return
        self._bases = (Base(checkpoint),)
        self._committed = True
        self.book.saved(checkpoint)
        if metric < 0.2:
            self.best = (checkpoint,)

    def end(self) -> None:
        """Do what is left to do after the last save."""
        self._tidy()

    def prune(self, retention: Retention) -> None:
        """Do what ``ckpt prune`` does."""
        carry_out(self.store, look(self.store, retention, in_full=True), self.life.number)

    def tag(self, name: str, checkpoint: CheckpointId) -> None:
        """Do what ``ckpt tag`` does."""
        with suppress(UsageError):
            create_tag(self.store, name, checkpoint, self.clock)

    def untag(self, name: str) -> None:
        """Do what ``ckpt untag`` does."""
        with suppress(UsageError):
            remove_tag(self.store, name)

    def _about(self, checkpoint: CheckpointId, metric: float) -> Manifest:
        return Manifest(
            run_id=self.life.run_id,
            checkpoint=checkpoint,
            parent=self.life.parent,
            created_at=self.clock.now_iso(),
            world={"size": self.ranks, "strategy": "single"},
            files=(),
            tensors=(),
            parts=(),
            metrics={"eval_loss": metric},
            protects=tuple(sorted(self.best)),
        )

    def _save_together(self, about: Manifest) -> None:
        """Write on all ranks at once, while the coordinator still rotates after the last save."""
        checkpoint = about.checkpoint

        def work(rank: int):
            if rank == 0:
                self._tidy()
            files = files_of(checkpoint.step, rank, self.ranks)
            division = divide(self.store, checkpoint, files, parts_of(rank), self._bases)
            written = write(self.store, checkpoint, rank, division.files, parts_of(rank))
            return division.complete(written)

        try:
            receipts = self.together([lambda rank=rank: work(rank) for rank in range(self.ranks)])
            commit(self.store, gather_receipts(about, receipts))
        except ResilientError:
            self.book.failed()
            discard(self.store, checkpoint)
            raise
        self._untidied = (checkpoint, not self._committed)

    def _tidy(self) -> None:
        (checkpoint, is_first), self._untidied = self._untidied or (None, False), None
        if checkpoint is None:
            return
        with suppress(ResilientError):
            if is_first:
                mark_committed(self.store, checkpoint.generation)
            rotate(self.store, self.retention, checkpoint.generation, self.best, written=checkpoint)

    def _hear(self, _record, event) -> None:
        if isinstance(event, SaveAborted):
            self.book.failed()


class _Everything:
    """Names of all parts: a collection that holds whatever it is asked for."""

    def __contains__(self, _name: object) -> bool:
        return True
