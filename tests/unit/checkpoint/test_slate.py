"""What a slot says: after a death at any store it is the step before, nothing, or the new step."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest

from resilient.checkpoint.daemon import messages
from resilient.checkpoint.daemon.step_slots import StepSlot, context_of, read_step_slot
from resilient.checkpoint.save.dedup import DedupBase
from resilient.checkpoint.save.persist import SaveJob
from resilient.format.keys import CheckpointId, segment_key
from resilient.format.ledger import LedgerPosition, Segment, step_row
from resilient.format.manifest import PartEntry, StoredRegion, TensorEntry
from resilient.format.regions import whole
from resilient.format.safetensors_file import StagedFile
from tests.helpers.manifests import empty_manifest

RANK = 3
CONTEXT = {"rank": RANK, "run": "demo"}
CONFIG = {"seed": 1, "name": "demo", "rate": 0.5, "fused": True, "none": None, "plan": {"a": [1]}}


def tensors_of(file, count, start=64):
    return tuple(
        TensorEntry(
            f"model/{file}.{one}\N{SNOWMAN}",
            "model",
            "F32",
            (2, one + 1),
            (StoredRegion(whole((2, one + 1)), file, start + 64 * one, 8 * one + 8),),
        )
        for one in range(count)
    )


def rows_of(steps, loss=0.25):
    steps_of = [(step, 0, 8 * step, 8 * step + 8, 1, 8, 1, 1, 1) for step in range(1, steps + 1)]
    return tuple(step_row(LedgerPosition(one[0] - 1), one, loss) for one in steps_of)


def segment_of(step, rows, previous=0):
    checkpoint = CheckpointId(1, step)
    before = segment_key(CheckpointId(1, previous)) if previous else ""
    opens = f"{previous:064x}" if previous else ""
    place = LedgerPosition(step, 0, 8 * step)
    return Segment(
        "0123456789abcdef",
        checkpoint,
        before,
        opens,
        LedgerPosition(previous),
        place,
        previous,
        rows,
    ).closed()


def job_of(step, files=(("a.safetensors", 3), ("b.safetensors", 1)), **other):
    checkpoint = CheckpointId(1, step)
    config = other.pop("config", CONFIG)
    about = replace(
        empty_manifest(checkpoint, CheckpointId(1, 1)),
        config=config,
        metrics={"loss": step / 8},
        protects=(CheckpointId(1, 1),),
    )
    memory = bytes(4096)
    known = {
        "files": tuple(
            StagedFile(name, memory, tensors_of(name, *counts)) for name, *counts in files
        ),
        "parts": (PartEntry("model", "replicated", "state.json"),),
        "bases": (
            DedupBase(CheckpointId(1, 1), (("a.safetensors", 0, 99),)),
            DedupBase(CheckpointId(1, 2)),
        ),
        "segment": segment_of(step, rows_of(step)),
    }
    return SaveJob(about, keep=(), is_first=step < 3, topic="", began_seconds=step / 4,
               stall_seconds=lambda: 0.125, **{**known, **other})  # fmt: skip


class Shared:
    """Memory as a keeper reserves it, and every store into it, in order."""

    def __init__(self) -> None:
        self.stores = []
        self._sizes = {}

    def reserve(self, name, size_bytes):
        # As the keeper does: what is long enough stays.
        if size_bytes > self._sizes.get(name, 0):
            self._sizes[name] = size_bytes
            self.stores.append((name, None, bytes(size_bytes)))
        return _Stored(self.stores, name, self._sizes[name])


class _Stored:
    def __init__(self, stores, name, size_bytes) -> None:
        self._stores, self._name, self._size_bytes = stores, name, size_bytes

    def __len__(self) -> int:
        return self._size_bytes

    def __setitem__(self, where, data) -> None:
        start, stop, _ = where.indices(self._size_bytes)
        assert stop - start == len(data), "within its memory"
        self._stores.append((self._name, start, bytes(data)))


class Left:
    """What a process leaves that ends after so many stores, within one or before it."""

    def __init__(self) -> None:
        self.memory = {}

    def apply(self, store, stop=None):
        name, start, data = store
        if start is None:
            self.memory[name] = bytearray(data)
        else:
            piece = data[:stop]
            self.memory[name][start : start + len(piece)] = piece

    def read(self):
        found = read_step_slot(lambda name: memoryview(bytes(self.memory.get(name, b""))))
        return found and (found.job(RANK, "hold/9"), found.context, found.previous_folder)


def said_of(job):
    """Return what a save of the job would be told, and what else a held step must say."""
    plain = json.loads(json.dumps(messages.encode_job(replace(job, topic="hold/9"), RANK)))
    after = job.segment.previous if job.segment else ""
    return plain, CONTEXT, f"checkpoint-{job.segment.start.step}-g1" if after else ""


def turns_of(jobs):
    """Return the stores of each turn: void, and say."""
    shared = Shared()
    slate = StepSlot(shared.reserve, context_of(CONTEXT))
    for job in jobs:
        begun = len(shared.stores)
        slate.invalidate()
        slate.publish(job)
        yield shared.stores[begun:]


# As many as before, and the last is the same.
RESTARTED = (rows_of(1, loss=0.5)[0], rows_of(2)[1])
NEXT = {
    "the same": job_of(4),
    "rows": job_of(9),
    "rows that restart": job_of(4, segment=segment_of(4, RESTARTED, previous=2)),
    "fewer rows": job_of(4, segment=segment_of(4, rows_of(1))),
    "rows with other losses": job_of(4, segment=segment_of(4, rows_of(4, loss=0.5))),
    "no rows": job_of(4, segment=segment_of(4, ())),
    "no ledger": job_of(4, segment=None),
    "a layout": job_of(4, (("a.safetensors", 3), ("b.safetensors", 1, 128))),
    "a longer layout": job_of(4, (("a.safetensors", 3), ("b.safetensors", 9))),
    "layouts that grow": job_of(4, (("a.safetensors", 30), ("b.safetensors", 9))),
    "another file": job_of(4, (("a.safetensors", 3), ("c.safetensors", 2))),
    "no bases": job_of(4, bases=()),
    "a number": job_of(4, config={**CONFIG, "seed": 1.0}),
    "a flag": job_of(4, config={**CONFIG, "seed": True}),
    "a text": job_of(4, config={**CONFIG, "name": "other"}),
    "a plan": job_of(4, config={**CONFIG, "plan": {"a": [1.0]}}),
    "what was plain": job_of(4, config={**CONFIG, "none": []}),
    "what was no text": job_of(4, config={**CONFIG, "none": "x"}),
    "names": job_of(4, config={"other": 1}),
    "a long message": job_of(
        4, parts=tuple(PartEntry(f"m{one}", "rank", "x") for one in range(300))
    ),
}


@pytest.mark.parametrize("changed", NEXT)
def test_after_a_death_at_any_store_a_slot_is_as_before_or_void_or_new(changed):
    jobs = [job_of(2), NEXT[changed], job_of(5)]
    left, before = Left(), None
    for job, stores in zip(jobs, turns_of(jobs), strict=True):
        kinds = {"void": None, "before": before, "new": said_of(job)}
        found = [before]
        for store in stores:
            found += _cut_short(left, store)
            left.apply(store)
            found.append(left.read())
        seen = [next(kind for kind, said in kinds.items() if said == one) for one in found]
        order = [kind for kind, _ in itertools.groupby(seen)]
        assert order == ["before", "void", "new"][before is None :]
        before = kinds["new"]


def _cut_short(left, store):
    """Yield what is read after a death within a store."""
    name, start, data = store
    for stop in range(0, len(data), _stride(store)) if start is not None else ():
        cut = Left()
        cut.memory = {**left.memory, name: left.memory[name][:]}
        cut.apply(store, stop)
        yield cut.read()


def _stride(store):
    # Every byte of what decides, and some of what it names.
    return 1 if len(store[2]) <= 64 else 97


def test_what_is_read_is_what_a_save_would_have_been_told():
    jobs = [job_of(2), *NEXT.values()]
    left = Left()
    for job, stores in zip(jobs, turns_of(jobs), strict=True):
        for store in stores:
            left.apply(store)
        assert left.read() == said_of(job)
        again, _ = messages.decode_job(
            left.read()[0], lambda _, size_bytes: memoryview(bytes(size_bytes)), RANK, 1.0
        )
        assert (again.files, again.parts, again.bases) == (job.files, job.parts, job.bases)
        assert (again.about.config, again.segment) == (job.about.config, job.segment)


def test_a_spoiled_byte_of_what_is_said_is_a_void_slot():
    left = Left()
    (stores,) = turns_of([job_of(2)])
    for store in stores:
        left.apply(store)
    assert left.read() is not None
    for name, start, data in stores:
        for at in range(start, start + len(data)) if start is not None else ():
            left.memory[name][at] ^= 1
            found = left.read()
            left.memory[name][at] ^= 1
            assert found is None or (name, start, data) == ("said", 0, bytes(8)), (name, at)


def test_a_slot_whose_memory_is_gone_or_is_nonsense_is_void():
    (stores,) = turns_of([job_of(2)])
    for missing in ("said", "notes", "rows"):
        left = Left()
        for store in stores:
            left.apply(store)
        for cut in (b"", bytes(left.memory[missing][:-40])[: len(left.memory[missing]) // 3]):
            left.memory[missing] = bytearray(cut)
            assert left.read() is None
    deep = b"[" * 100_000
    left.memory = {"said": bytearray(len(deep).to_bytes(8, "little") + bytes(32) + deep)}
    assert left.read() is None


def test_a_turn_puts_down_no_more_than_what_is_new():
    jobs = [job_of(step, segment=segment_of(step, rows_of(500 + step))) for step in range(2, 40)]
    turns = list(turns_of(jobs))
    for stores in turns[2:]:
        sizes = {name: len(data) for name, start, data in stores if start is not None}
        assert "notes" not in sizes
        assert sizes["rows"] <= 2 * len(rows_of(1)[0]) or any(one[1] is None for one in stores)
    assert sum(name == "rows" and start is None for turn in turns for name, start, _ in turn) == 1


def test_a_layout_that_changes_at_each_step_takes_no_more_room():
    jobs = [job_of(step, (("a.safetensors", 3), ("b.safetensors", 1, 64 * step))) for step in
            range(2, 200)]  # fmt: skip
    stores = [one for turn in turns_of(jobs) for one in turn if one[0] == "notes"]
    assert sum(start is None for _, start, _ in stores) == 1


def test_what_nobody_voided_is_void_while_the_next_is_said():
    shared, left = Shared(), Left()
    slate = StepSlot(shared.reserve, context_of(CONTEXT))
    slate.publish(job_of(2))
    begun = len(shared.stores)
    slate.publish(NEXT["layouts that grow"])
    for store in shared.stores[:begun]:
        left.apply(store)
    for at, store in enumerate(shared.stores[begun:], 1 - len(shared.stores[begun:])):
        left.apply(store)
        assert (left.read() is None) == (at < 0)
