"""Pains of the field with sharded and elastic training, each by its report; group D, and 39 of E.

DS is deepspeedai/DeepSpeed, TF huggingface/transformers, AC huggingface/accelerate, TT
pytorch/torchtitan, PL Lightning-AI/pytorch-lightning, PT pytorch/pytorch, MC mosaicml/composer.
Real process groups save and load every pair of layouts in ``tests/process/test_resharding.py``.
"""

from __future__ import annotations

import gc
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from resilient.checkpoint.catalog import committed, read_manifest
from resilient.checkpoint.commit import commit, gather_receipts
from resilient.checkpoint.context import CheckpointContext, CheckpointOptions
from resilient.checkpoint.restore.read import read
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.checkpoint.save.persist import write
from resilient.checkpoint_engine import CheckpointEngine
from resilient.clock import SystemClock
from resilient.distributed.coordination import ControlGroup
from resilient.distributed.launch_env import World
from resilient.engine_factory import open_engine
from resilient.errors import IncompatibleCheckpoint, IntegrityError, PeerFailed, ResilientError
from resilient.events import Emitter
from resilient.format.keys import CheckpointId
from resilient.format.manifest import StoredRegion, TensorEntry
from resilient.format.partial_read import view_of
from resilient.format.regions import Region
from resilient.format.safetensors_file import StagedFile, TensorSlot, compute_layout
from resilient.state_dict.optimizer import NamedOptimizer
from resilient.state_dict.snapshot import Part, capture
from resilient.state_dict.staging import StagingBuffers, stage
from resilient.testing.memory_store import MemoryStore, run_ranks
from tests.helpers.manifests import Values, empty_manifest

CLOCK = SystemClock()
ROWS, COLUMNS = 1024, 128
WEIGHT = torch.arange(float(ROWS * COLUMNS)).reshape(ROWS, COLUMNS)


def live(store, size, steps=(), told=None):
    """Let ``size`` ranks resume and save; return what each resumed from and then had."""

    def rank_main(world, board):
        sinks = () if told is None else (lambda record, event: told.append(event.message()),)
        comms = ControlGroup(board.another(), world, "life")
        desk = CheckpointContext(
            store, comms, CheckpointOptions(within_seconds=10.0), CLOCK, Emitter(CLOCK, sinks)
        )
        checkpointer = CheckpointEngine(desk)
        parts = parts_of(0, world.rank)
        try:
            resumed = checkpointer.resume(parts)
            for step in steps:
                checkpointer.save(step, parts_of(step, world.rank), CheckpointInfo())
        finally:
            checkpointer.close()
        held = {name: part.stateful.state for name, part in parts.items()}
        return (resumed.checkpoint if resumed else None), held

    return run_ranks(size, rank_main)


def parts_of(step, rank):
    return {
        "model": Part(Values(weight=WEIGHT + step)),
        "rng_state": Part(Values(words=torch.tensor([rank, step])), "rank"),
    }


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3), (3, 2), (4, 1)])
def test_ds_2898_another_number_of_ranks_is_no_reason_to_refuse(before, after):
    store = MemoryStore()
    live(store, before, (1,))
    for checkpoint, held in live(store, after):
        assert checkpoint == CheckpointId(1, 1)
        assert torch.equal(held["model"]["weight"], WEIGHT + 1)


def test_ds_7546_a_part_that_is_not_there_is_refused_and_never_begun_afresh():
    """Also DS#5405 and DS#6691: there is one layout, so none has to be converted to another."""
    store = MemoryStore()
    live(store, 2, (1,))

    def rank_main(world, board):
        comms = ControlGroup(board.another(), world, "again")
        checkpointer = CheckpointEngine(
            CheckpointContext(store, comms, CheckpointOptions(), CLOCK, Emitter(CLOCK))
        )
        try:
            checkpointer.resume({**parts_of(0, world.rank), "optimizer": Part(Values())})
        finally:
            checkpointer.close()

    with pytest.raises(IncompatibleCheckpoint, match="holds no `optimizer`"):
        run_ranks(2, rank_main)


def rows_of(rank, ranks):
    share = ROWS // ranks
    return Region((rank * share, 0), (share, COLUMNS))


def sharded_receipt(store, checkpoint, rank, ranks):
    """Write one rank's rows of a tensor that is spread over ranks, as FSDP holds it."""
    name, region = f"optimizer.r{rank:05d}.safetensors", rows_of(rank, ranks)
    layout = compute_layout([TensorSlot("w", "F32", region.lengths)], {})
    first, count = region.offsets[0], region.lengths[0]
    data = layout.head + WEIGHT[first : first + count].numpy().tobytes()
    place = StoredRegion(region, name, layout.starts["w"], count * COLUMNS * 4)
    entry = TensorEntry("optimizer/w", "optimizer", "F32", (ROWS, COLUMNS), (place,))
    return write(store, checkpoint, rank, [StagedFile(name, data, (entry,))])


def sharded(store, ranks, receipts=None):
    checkpoint = CheckpointId(1, 1)
    shown = [sharded_receipt(store, checkpoint, rank, ranks) for rank in range(ranks)]
    commit(store, gather_receipts(empty_manifest(checkpoint), shown[: receipts or ranks]))
    return checkpoint


@pytest.mark.parametrize("shown", [1, 3])
def test_tf_23034_what_only_rank_0_wrote_of_a_sharded_optimizer_is_never_committed(shown):
    """Also TF#25849 and TF#26159: the KeyError came at resume, when it was too late."""
    store = MemoryStore()
    with pytest.raises(IntegrityError, match="holes in `optimizer/w`"):
        sharded(store, 4, shown)
    assert committed(store) == []


@pytest.mark.parametrize(("before", "after"), [(8, 16), (16, 8), (4, 1)])
def test_tt_811_shards_of_8_ranks_are_read_by_16(before, after):
    """Also PL#16815. Each rank reads its own rows, wherever they lie."""
    store = MemoryStore()
    checkpoint = sharded(store, before)
    for rank in range(after):
        region = rows_of(rank, after)
        proved = read(store, checkpoint, boxes=lambda _, region=region: {"optimizer/w": (region,)})
        found = rows_from(proved, region)
        first, count = region.offsets[0], region.lengths[0]
        assert torch.equal(found, WEIGHT[first : first + count])


def rows_from(proved, region):
    """Put a box together from whatever shards hold it."""
    found = torch.empty(region.lengths)
    [tensor] = proved.manifest.tensors
    for stored in tensor.regions:
        begin = max(region.offsets[0], stored.region.offsets[0])
        end = min(
            region.offsets[0] + region.lengths[0],
            stored.region.offsets[0] + stored.region.lengths[0],
        )
        if begin < end:
            start = stored.start + (begin - stored.region.offsets[0]) * COLUMNS * 4
            view = view_of(proved.files[stored.file], start, (end - begin) * COLUMNS * 4)
            rows = torch.frombuffer(bytearray(view), dtype=torch.float32)
            found[begin - region.offsets[0] : end - region.offsets[0]] = rows.view(-1, COLUMNS)
    return found


class Nested(torch.optim.SGD):
    """An optimizer whose state nests, with keys that look like paths."""

    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                self.state[one]["block/0.a~b"] = {"exp.avg": one.detach() * 2, "count": 3}


def test_ac_3971_an_optimizer_loads_its_own_nested_keys():
    def model():
        return torch.nn.ModuleDict({"a/b": torch.nn.Linear(2, 2), "c~d": torch.nn.Linear(2, 2)})

    first = model()
    optimizer = Nested(first.parameters(), lr=0.1)
    optimizer.step()
    store, checkpoint = MemoryStore(), CheckpointId(1, 1)
    parts = {"optimizer": Part(NamedOptimizer(first, optimizer))}
    staged = stage(capture(1, parts, 0), World(), StagingBuffers())
    receipt = write(store, checkpoint, 0, staged.files, staged.parts)
    commit(store, gather_receipts(empty_manifest(checkpoint), [receipt]))

    from resilient.state_dict.resharding import load

    second = model()
    fresh = Nested(second.parameters(), lr=0.5)
    proved = read(store, checkpoint)
    load(proved.manifest, proved.files, {"optimizer": Part(NamedOptimizer(second, fresh))}, 0)
    for (_, one), (_, other) in zip(
        first.named_parameters(), second.named_parameters(), strict=True
    ):
        found, expected = fresh.state[other], optimizer.state[one]
        nested = found["block/0.a~b"]
        assert torch.equal(nested["exp.avg"], expected["block/0.a~b"]["exp.avg"])
        assert nested["count"] == 3


def test_pt_1489_moments_follow_the_name_when_layers_are_reordered():
    """Also PL#17025."""

    def built(names):
        model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in names})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for number, one in enumerate(model.parameters()):
            one.grad = torch.full_like(one, float(number + 1))
        optimizer.step()
        return model, optimizer

    model, optimizer = built(["a", "b", "c"])
    saved = NamedOptimizer(model, optimizer).state_dict()
    other, fresh = built(["c", "a", "b"])
    NamedOptimizer(other, fresh).load_state_dict(saved)
    expected = {name: optimizer.state[one]["exp_avg"] for name, one in model.named_parameters()}
    for name, one in other.named_parameters():
        assert torch.equal(fresh.state[one]["exp_avg"], expected[name])


def test_mc_2409_shrinking_and_growing_again_reads_nothing_stale():
    """Also MC#2146 and MC#3902: 4 to 2 to 4 ranks; all from one step, none from an old file."""
    store = MemoryStore()
    live(store, 4, (1, 2))
    live(store, 2, (3,))
    resumed = live(store, 4)
    assert {checkpoint for checkpoint, _ in resumed} == {CheckpointId(2, 3)}
    assert all(torch.equal(held["model"]["weight"], WEIGHT + 3) for _, held in resumed)
    words = [held["rng_state"]["words"].tolist() for _, held in resumed]
    assert words == [[0, 3], [1, 3], [2, 0], [3, 0]], "ranks without a stream keep their own"


def test_mc_3902_ranks_that_would_resume_from_different_steps_go_together():
    store = MemoryStore()
    live(store, 3, (1, 2))
    store.delete(CheckpointId(1, 2).key("rng_state_2.safetensors"))
    assert {checkpoint for checkpoint, _ in live(store, 3)} == {CheckpointId(1, 1)}


def staged_bytes(ranks):
    big = {"model": Part(Values(weight=torch.zeros(4096, 512)))}
    return [
        stage(capture(1, big, rank), World(rank, ranks), StagingBuffers()).size_bytes
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_pt_118520_a_state_that_all_ranks_hold_is_copied_once_and_not_once_per_rank(ranks):
    """Also TF#23386 and AC#3633."""
    state = 4096 * 512 * 4
    sizes = staged_bytes(ranks)
    assert sum(sizes) <= state + ranks * 4096
    assert max(sizes) <= state / ranks + 4096


def resident_bytes():
    gc.collect()
    said = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", said)[1])


@pytest.mark.slow
def test_pt_104143_the_last_save_needs_no_more_than_the_first(tmp_path):
    """Also PT#170163: nothing leaks from save to save, be it mapped, of torch or of Python.

    What is resident counts: neither a mapping nor a tensor is memory that Python traces.
    """
    weight, saves = torch.zeros(1 << 20), 16
    checkpointer = open_engine(str(tmp_path), emit=Emitter(CLOCK), keep_last=1)
    resident = []
    try:
        checkpointer.resume({})
        for step in range(1, saves + 1):
            weight.fill_(step)
            checkpointer.save(step, {"model": Part(Values(weight=weight))}, CheckpointInfo())
            checkpointer.wait()
            resident.append(resident_bytes())
    finally:
        checkpointer.close()
    state_bytes = weight.numel() * weight.element_size()
    # A quarter of what would be left if each save left its own.
    assert resident[-1] - resident[3] < (saves - 4) * state_bytes / 4


def test_tt_3065_a_rank_that_says_nothing_is_named_when_the_deadline_passes():
    def rank_main(world, board):
        comms = ControlGroup(board.another(), world, "life")
        desk = CheckpointContext(
            MemoryStore(), comms, CheckpointOptions(within_seconds=0.3), CLOCK, Emitter(CLOCK)
        )
        checkpointer = CheckpointEngine(desk)
        if world.rank == 1:
            checkpointer.close()
            return "silent"
        try:
            checkpointer.resume({})
        except (ResilientError, PeerFailed) as error:
            return error.message
        finally:
            checkpointer.close()
        return "began"

    said = run_ranks(2, rank_main)
    assert "ranks [1] did not answer within 0.3 s" in said[0]


def test_the_manifest_says_who_wrote_what():
    store = MemoryStore()
    checkpoint = sharded(store, 4)
    manifest = read_manifest(store, checkpoint)
    assert [one.rank for one in manifest.files] == [0, 1, 2, 3]
    assert replace(manifest, root="") != manifest
