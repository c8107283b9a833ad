"""Which live tensors may be read into before anything is proved, and which may not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from resilient.checkpoint.restore import read as reading
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.errors import IncompatibleCheckpoint
from resilient.format.keys import CheckpointId
from resilient.format.manifest import Manifest, StoredRegion, TensorEntry
from resilient.format.partial_read import view_of
from resilient.format.regions import Region
from resilient.state_dict.changes import ChangePolicy
from resilient.state_dict.optimizer import NamedOptimizer
from resilient.state_dict.resharding import LoadPlan, in_place_targets, matching_targets
from resilient.state_dict.snapshot import Part
from resilient.testing.memory_store import MemoryStore
from tests.helpers.manifests import Values
from tests.helpers.one_rank import open_one

ROWS = 300
CHECKPOINT = CheckpointId(1, 1)


class Model(nn.Module):
    def __init__(self, *, tied=False, dtype=torch.float32):
        super().__init__()
        self.a = nn.Parameter(torch.arange(ROWS * 100.0).reshape(ROWS, 100).to(dtype))
        self.b = self.a if tied else nn.Parameter(self.a.detach() + 1)


class Rewriting(Model):
    """Takes its state in a way of its own."""

    def load_state_dict(self, state_dict, *args, **kwargs):
        return super().load_state_dict(dict(state_dict), *args, **kwargs)


def manifest_of(model, name="model"):
    entries, at = [], 0
    for path, one in model.state_dict().items():
        region = Region((0, 0), tuple(one.shape))
        stored = StoredRegion(region, "f.safetensors", at, one.nbytes, "0")
        entries.append(TensorEntry(f"{name}/{path}", name, "F32", tuple(one.shape), (stored,)))
        at += one.nbytes
    return Manifest("r", CHECKPOINT, None, "", {}, (), tuple(entries), ())


def test_a_module_and_its_optimizer_are_filled_where_they_are():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    optimizer.step()
    found = in_place_targets(
        {"model": Part(model), "optimizer": Part(NamedOptimizer(model, optimizer))}
    )
    assert found["model"] == {"model/a": model.a, "model/b": model.b}
    assert found["model"]["model/a"] is model.a, "so that loading it copies nothing"
    moments = {id(state["momentum_buffer"]) for state in optimizer.state.values()}
    assert {id(one) for one in found["optimizer"].values()} == moments


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(Part(Model(), optional=True), id="an older checkpoint may lack it"),
        pytest.param(Part(Model(), "rank"), id="each rank has its own"),
        pytest.param(Part(Values(w=torch.ones(ROWS, 100))), id="may take less than it is given"),
        pytest.param(Part(Rewriting()), id="has its own way"),
        pytest.param(Part(Model().to("meta")), id="has no memory"),
    ],
)
def test_what_may_keep_something_of_a_damaged_checkpoint_is_not_touched(part):
    assert in_place_targets({"model": part}) == {}


def test_tensors_with_gaps_are_not_read_into():
    model = Model()
    model.a = nn.Parameter(torch.ones(100, ROWS).t())
    assert in_place_targets({"model": Part(model)}) == {}


def test_parts_that_share_memory_are_not_touched():
    model, other = Model(), Model()
    other.a = model.a
    parts = {"model": Part(model), "other": Part(other), "third": Part(Model())}
    assert in_place_targets(parts).keys() == {"third"}
    other.a = nn.Parameter(model.a.detach()[10:])
    assert in_place_targets({"model": Part(model), "other": Part(other)}) == {}


def test_only_what_is_stored_as_it_is_here_is_read_in_place():
    model = Model()
    here = in_place_targets({"model": Part(model)})
    assert matching_targets(here, manifest_of(model)) == here["model"]
    more = Model()
    more.c = nn.Parameter(torch.ones(2, 2))
    assert matching_targets(here, manifest_of(more)) == {}
    assert matching_targets(in_place_targets({"model": Part(more)}), manifest_of(model)) == {}
    half = in_place_targets({"model": Part(Model(dtype=torch.float16))})
    assert matching_targets(half, manifest_of(model)) == {}
    tied = in_place_targets({"model": Part(Model(tied=True))})
    assert matching_targets(tied, manifest_of(model)) == {}, "both would be read into one"


def test_regions_that_overlap_in_a_file_have_no_place():
    model = Model()
    manifest = manifest_of(model)
    landing = LoadPlan({"model": Part(model)}, in_place=True)
    (places,) = landing.places(manifest).values()
    assert [(one.start, one.stop) for one in places] == [(0, 120_000), (120_000, 240_000)]
    first, second = manifest.tensors
    moved = StoredRegion(second.regions[0].region, "f.safetensors", 119_999, 120_000, "0")
    tangled = TensorEntry(second.name, "model", "F32", second.shape, (moved,))
    forged = Manifest("r", CHECKPOINT, None, "", {}, (), (first, tangled), ())
    assert landing.places(forged) == {}


@pytest.fixture
def nothing_is_small(monkeypatch):
    monkeypatch.setattr(reading, "SMALL_BYTES", 0)


@pytest.mark.usefixtures("nothing_is_small")
def test_live_memory_is_all_the_memory_that_large_tensors_take():
    store, model = MemoryStore(), Model()
    one = open_one(store)
    one.resume({"model": Part(model)})
    one.save(1, {"model": Part(model)}, CheckpointInfo())
    one.close()
    there = Model()
    landing = LoadPlan({"model": Part(there)}, in_place=True)
    proved = reading.read_wanted(store, CHECKPOINT, reading.ReadRequest(places=landing.places))
    large = [one for one in proved.manifest.tensors if one.name in ("model/a", "model/b")]
    for entry, live in zip(large, (there.a, there.b), strict=True):
        (stored,) = entry.regions
        read = view_of(proved.files[stored.file], stored.start, stored.size_bytes)
        assert torch.frombuffer(read, dtype=torch.float32).data_ptr() == live.data_ptr()


@pytest.mark.usefixtures("nothing_is_small")
@pytest.mark.parametrize(
    ("stored", "live"),
    [(False, True), (True, False), (True, True), (False, False)],
    ids=lambda tied: "tied" if tied else "apart",
)
def test_tied_tensors_come_back_as_they_do_without(stored, live):
    store, model = MemoryStore(), Model(tied=stored)
    one = open_one(store)
    one.resume({"model": Part(model)})
    one.save(1, {"model": Part(model)}, CheckpointInfo())
    one.close()
    there = Model(tied=live)
    with torch.no_grad():
        there.a.zero_()
    expected = Model(tied=live)
    expected.load_state_dict(model.state_dict())
    again = open_one(store)
    if stored != live:
        with pytest.raises(IncompatibleCheckpoint, match="one tied tensor"):
            open_one(store).resume({"model": Part(there)})
    again.resume({"model": Part(there)}, policy=ChangePolicy(allowed=frozenset({"model"})))
    again.close()
    assert torch.equal(there.a, expected.a)
    assert torch.equal(there.b, expected.b)


@pytest.mark.usefixtures("nothing_is_small")
def test_what_parity_gives_back_comes_to_the_live_memory():
    store, model = MemoryStore(), Model()
    one = open_one(store, parity=1)
    one.resume({"model": Part(model)})
    one.save(1, {"model": Part(model)}, CheckpointInfo())
    one.close()
    key = CHECKPOINT.key("model.r00000.safetensors")
    store.objects[key] = store.objects[key][:-1] + b"\1"
    there = Model()
    with torch.no_grad():
        there.a.zero_()
        there.b.zero_()
    addresses = [there.a.data_ptr(), there.b.data_ptr()]
    again = open_one(store)
    again.resume({"model": Part(there)})
    again.close()
    assert torch.equal(there.a, model.a)
    assert torch.equal(there.b, model.b)
    assert [there.a.data_ptr(), there.b.data_ptr()] == addresses
