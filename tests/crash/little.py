"""A run without torch, small and quick enough to be crashed millions of times.

Its state at a step follows from the step alone, so the content of a
checkpoint is known from its step. Resume, claim, save, rotate, prune and tag are the library's own.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from resilient.checkpoint.commit import commit, copy_manifest, gather_receipts
from resilient.checkpoint.context import CheckpointContext, CheckpointOptions
from resilient.checkpoint.garbage_collection import (
    apply_plan,
    collect_garbage,
    discard_uncommitted,
    scan_and_plan,
)
from resilient.checkpoint.generations import mark_committed, newest_claim
from resilient.checkpoint.promotion import TierPromoter
from resilient.checkpoint.refs import create_tag, remove_tag
from resilient.checkpoint.repair import apply_repair, plan_repair
from resilient.checkpoint.restore.read import ReadRequest
from resilient.checkpoint.resume_selection import select_resume_checkpoint
from resilient.checkpoint.retention import Retention
from resilient.checkpoint.save.dedup import DedupBase, deduplicate, make_dedup_base
from resilient.checkpoint.save.persist import SaveJob, persist, write
from resilient.checkpoint.start_generation import start_generation
from resilient.checkpoint.tiers.tiered_store import TieredStore, nearest_store
from resilient.distributed.coordination import ControlGroup
from resilient.distributed.kv_store import InMemoryKVStore
from resilient.distributed.launch_env import World
from resilient.errors import ResilientError, UsageError
from resilient.events import Emitter, SaveAborted
from resilient.format.document import canonical
from resilient.format.keys import CheckpointId, rank_part, rank_part_file, shard_name
from resilient.format.manifest import Manifest, PartEntry, StoredRegion, TensorEntry
from resilient.format.regions import Region, whole
from resilient.format.safetensors_file import StagedFile, TensorSlot, compute_layout
from tests.crash.promotions import Pool
from tests.crash.shelf import Shelf

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from resilient.checkpoint.promotion_policy import TieringOptions

NEAR, DURABLE = "near", "durable"
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


def _packed(name: str, tensor: str, data: bytes, box: Region, of: int) -> StagedFile:
    """Return a file with one box of a tensor of ``of`` elements."""
    dtype = "I64" if len(data) == 8 * box.size else "U8"
    layout = compute_layout([TensorSlot(tensor, dtype, box.lengths)], {})
    stored = StoredRegion(box, name, layout.starts[tensor], len(data))
    entry = TensorEntry(tensor, tensor.partition("/")[0], dtype, (of,), (stored,))
    return StagedFile(name, layout.head + data, (entry,))


@lru_cache(4096)
def files_of(step: int, rank: int, ranks: int) -> tuple[StagedFile, ...]:
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
        files.append(StagedFile("state.json", canonical({"model": {"steps": step}})))
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
    """Report of a store to its user; the base class ignores the report."""

    def saving(self, checkpoint: CheckpointId) -> None: ...

    def saved(self, checkpoint: CheckpointId) -> None: ...

    def failed(self) -> None: ...

    def began(self, generation: int) -> None: ...

    def damaged(self, checkpoint: CheckpointId) -> None: ...

    def repaired(self, checkpoint: CheckpointId) -> None: ...


@dataclass(frozen=True, slots=True)
class Setup:
    """Options of a job for its saves.

    Attributes:
        retention: which checkpoints stay.
        tiering: with a near tier and a durable one, each on a shelf of the store; None: without.
        parity: how many files of a rank may be lost.
    """

    retention: Retention = field(default_factory=Retention)
    tiering: TieringOptions | None = None
    parity: int = 0

    @property
    def keeps(self) -> dict[str, int]:
        """How many checkpoints stay at least, by what the keys of their place begin with."""
        keep = self.retention.keep_last
        if self.tiering is None:
            return {"": keep}
        return {f"{NEAR}/": self.tiering.near_total_limit, f"{DURABLE}/": keep}


@dataclass
class Life:
    """One life of a job with one rank, or with several that a ``together`` lets take turns.

    Attributes:
        house: where tags, prunes and repairs are done: the durable tier, if there are tiers.
        pool: does promotions.
        step: what it has trained so far.
        best: what the run protects.
    """

    store: object
    setup: Setup
    clock: TickingClock = field(default_factory=TickingClock)
    book: Book = field(default_factory=Book)
    ranks: int = 1
    together: object = None
    pool: Pool = field(default_factory=Pool)
    step: int = 0
    best: tuple[CheckpointId, ...] = ()

    def __post_init__(self) -> None:
        comms = ControlGroup(InMemoryKVStore(), World(), "life")
        emit = Emitter(self.clock, (self._hear,))
        limits = CheckpointOptions(self.setup.retention, 20.0, parity=self.setup.parity)
        self.house, self.others = self.store, []
        self.desk = CheckpointContext(self.store, comms, limits, self.clock, emit)
        if self.setup.tiering:
            near, self.house = Shelf(self.store, NEAR), Shelf(self.store, DURABLE)
            self.store, self.others = TieredStore(near, self.house, lambda *_: None), [near]
            promoter = TierPromoter(self.store, self.setup.tiering)
            promoter._thread = self.pool
            self.desk = replace(self.desk, store=self.store, promoter=promoter)
        self._saves, self._committed, self._untidied = 0, False, None
        self._bases: tuple[DedupBase, ...] = ()

    def begin(self) -> CheckpointId | None:
        """Resume and claim; return what was resumed from."""
        wanted = ReadRequest(_Everything(), reconstructs=self.setup.parity > 0)
        choice = select_resume_checkpoint(self.store, self.desk.comms, "auto", wanted, 20.0)
        if choice.verified is not None:
            self._bases = (make_dedup_base(choice.verified, self.store),)
            self.step = choice.checkpoint.step
            content = content_of(choice.verified.manifest, choice.verified.files)
            assert content == value_at(self.step), f"{choice.checkpoint} holds another state"
        self.life = start_generation(self.desk, choice, "start")
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
                job = SaveJob(
                    about, files, parts_of(0), self.best, first, topic, 0.0, float, self._bases
                )
                self._beside(lambda: persist(self.desk, job))
            else:
                self._save_together(about)
        except ResilientError:
            self.book.failed()
            self._bases = (DedupBase(checkpoint), *self._bases)[:4]
            return
        self._bases = (DedupBase(checkpoint),)
        self._committed = True
        self.book.saved(checkpoint)
        if metric < 0.2:
            self.best = (checkpoint,)

    def end(self) -> None:
        """Do what is left to do after the last save."""
        self._beside(self._end)

    def prune(self) -> None:
        """Do what ``ckpt prune`` does."""
        claim = newest_claim(self.house)
        found = scan_and_plan(self.house, self.setup.retention, in_full=True)
        apply_plan(self.house, found, *claim)

    def tag(self, name: str, checkpoint: CheckpointId) -> None:
        """Do what ``ckpt tag`` does."""
        with suppress(UsageError):
            create_tag(self.house, name, checkpoint, self.clock)

    def untag(self, name: str) -> None:
        """Do what ``ckpt untag`` does."""
        with suppress(UsageError):
            remove_tag(self.house, name)

    def damage(self, checkpoint: CheckpointId) -> None:
        """Lose a file of a checkpoint, as a disk may that goes bad."""
        self.book.damaged(checkpoint)
        self.house.delete(checkpoint.key(shard_name("model", 0)))

    def repair(self, checkpoint: CheckpointId) -> None:
        """Do what ``ckpt repair`` does."""
        plan = plan_repair(self.house, checkpoint, self.others)
        apply_repair(self.house, plan, self.others)
        self.book.repaired(checkpoint)

    def _end(self) -> None:
        self._tidy()
        self.desk.finish()

    def _beside(self, *works: Callable[[], object]) -> Sequence[object]:
        """Do one's work, and promotions that wait, in turns."""
        together = [*works, *self.pool.take()]
        return [together[0]()] if len(together) == 1 else self.together(together)

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
            parity, parts = self.setup.parity, parts_of(rank)
            near = nearest_store(self.store)
            division = deduplicate(near, checkpoint, files, parts, self._bases, parity=parity)
            written = write(self.store, checkpoint, rank, division.files, parts, division.parity)
            return division.complete(written)

        try:
            works = [lambda rank=rank: work(rank) for rank in range(self.ranks)]
            receipts = self._beside(*works)[: self.ranks]
            commit(self.store, gather_receipts(about, receipts))
            with suppress(ResilientError):
                self.setup.parity and copy_manifest(self.store, checkpoint)
        except ResilientError:
            self.book.failed()
            discard_uncommitted(self.store, checkpoint)
            raise
        promoter = self.desk.promoter
        due = promoter.plan(self.desk, checkpoint, self.best) if promoter else []
        self._untidied = (checkpoint, not self._committed, due)

    def _tidy(self) -> None:
        (checkpoint, is_first, due), self._untidied = self._untidied or (None, False, ()), None
        if checkpoint is None:
            return
        if self.desk.promoter:
            self.desk.promoter.committed(self.desk, checkpoint, due)
            return
        with suppress(ResilientError):
            if is_first:
                mark_committed(self.store, checkpoint.generation)
            keep, retention = self.best, self.setup.retention
            collect_garbage(self.store, retention, checkpoint.generation, keep, written=checkpoint)

    def _hear(self, _record, event) -> None:
        if isinstance(event, SaveAborted):
            self.book.failed()


class _Everything:
    """Names of all parts: a collection that holds whatever it is asked for."""

    def __contains__(self, _name: object) -> bool:
        return True
