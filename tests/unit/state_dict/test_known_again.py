"""What is known again is what would be found anew; whatever else changed is seen."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
import torch
from torch import nn

from resilient.distributed.launch_env import World
from resilient.errors import SaveFailed
from resilient.state_dict.capture_cache import CachedTensors, CaptureCache
from resilient.state_dict.flatten import flatten
from resilient.state_dict.host_copy import DeferredCopies, HostCopyBatch, TensorCopy, target_in
from resilient.state_dict.optimizer import NamedOptimizer
from resilient.state_dict.rng_state import RandomState
from resilient.state_dict.save_planner import tree_to_json
from resilient.state_dict.snapshot import Part, capture
from resilient.state_dict.staging import StagingBuffers, stable_storages, stage, state_memory

BASE = torch.arange(12.0).reshape(3, 4)
OTHER = torch.ones(3, 4)


def a_value():
    return {
        "weights": OrderedDict(a=BASE, b=OTHER),
        "state": {"one": {"m": BASE[0], "v": OTHER[1]}, "two": {"m": BASE[1], "n": 3}},
        "groups": [{"lr": 0.1, "gain": OTHER[0], "names": ["one", "two"], "betas": (0.9, 0.99)}],
        "lone": OTHER[2],
        "nothing": {},
    }


def same_as_anew(recall: CaptureCache, value) -> None:
    tree, tensors = recall.flatten("p", value)
    expected, named = flatten("p", value)
    assert tree_to_json(tree) == tree_to_json(expected)
    assert list(tensors) == list(named)
    for name, one in named.items():
        assert tensors[name].dtype == one.dtype
        assert tensors[name].is_set_to(one)


def test_the_same_memory_is_the_same_object_though_plain_values_changed():
    recall = CaptureCache()
    _, before = recall.flatten("p", a_value())
    assert isinstance(before, CachedTensors)
    value = a_value()
    value["groups"][0]["lr"] = 0.2
    value["state"]["two"]["n"] = 4
    tree, after = recall.flatten("p", value)
    assert after is before
    assert tree_to_json(tree) == tree_to_json(flatten("p", value)[0])


def of_other_memory(value):
    value["lone"] = OTHER[2].clone()


def tied(value):
    value["state"]["one"]["v"] = value["state"]["one"]["m"]


def seen_otherwise(value):
    value["weights"]["a"] = BASE.view(torch.int32)


def of_other_shape(value):
    value["weights"]["a"] = BASE.reshape(4, 3)


def turned(value):
    value["weights"]["a"] = BASE.as_strided((3, 4), (1, 3))


def shorter(value):
    value["weights"]["a"] = BASE[:2]


def counted_apart(value):
    value["weights"]["a"] = BASE.data
    BASE.add_(0)


def with_a_new_key(value):
    value["state"]["three"] = {"m": BASE[2]}


def with_a_key_less(value):
    del value["state"]["one"]["v"]


def in_other_order(value):
    value["state"]["one"] = {"v": OTHER[1], "m": BASE[0]}


def named_otherwise(value):
    value["state"] = {"uno": value["state"].pop("one"), **value["state"]}


def of_a_plainer_kind(value):
    value["weights"] = dict(value["weights"])


def with_a_tag(value):
    value["nothing"] = {"$tensor": 1}


def where_a_number_was(value):
    value["state"]["two"] = {"m": 3, "n": BASE[1]}


def a_number_of_other_kind(value):
    value["groups"][0]["lr"] = 1
    value["state"]["two"]["n"] = True


def no_number(value):
    value["groups"][0]["lr"] = float("nan")


def a_list(value):
    value["groups"][0]["betas"] = [0.9, 0.99]


def a_tensor_in_a_list(value):
    value["groups"][0]["names"] = ["one", BASE[0]]


def an_array(value):
    value["nothing"] = BASE.numpy()


def with_numbers_for_keys(value):
    value["nothing"] = {1: 2}


def where_a_fraction_was(value):
    group = value["groups"][0]
    group["lr"], group["gain"] = group["gain"], group["lr"]


CHANGES = [
    of_other_memory, tied, seen_otherwise, of_other_shape, turned, shorter, counted_apart,
    with_a_new_key, with_a_key_less, in_other_order, named_otherwise, of_a_plainer_kind, with_a_tag,
    where_a_number_was, a_number_of_other_kind, no_number, a_list, a_tensor_in_a_list, an_array,
    with_numbers_for_keys, where_a_fraction_was,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda one: one.__name__)
def test_what_changed_is_seen_and_seen_again_when_it_is_back(change):
    recall = CaptureCache()
    same_as_anew(recall, a_value())
    changed = a_value()
    change(changed)
    same_as_anew(recall, changed)
    same_as_anew(recall, changed)
    same_as_anew(recall, a_value())
    same_as_anew(recall, changed)


def test_places_of_tensors_in_lists_are_seen():
    recall = CaptureCache()
    for value in ({"a": [BASE[0], 1, [BASE[1]]]}, {"a": [1, BASE[0], [BASE[1]]]},
                  {"a": [BASE[0], [BASE[1]], 1]}, {"a": [BASE[0], BASE[1]]},
                  {"a": (BASE[0], BASE[1])}, {"a": [[BASE[0]], BASE[1]]}):  # fmt: skip
        same_as_anew(recall, value)
        same_as_anew(recall, value)


def test_changes_are_counted_by_the_live_tensor():
    recall, live = CaptureCache(), nn.Parameter(torch.ones(4))
    recall.flatten("p", {"a": live, "b": BASE})
    # Of the same memory, but torch counts its changes apart.
    other = nn.Parameter(live.data)
    with torch.no_grad():
        live.add_(1).add_(1)
    _, tensors = recall.flatten("p", {"a": other, "b": BASE})
    with torch.no_grad():
        other.add_(1)
    assert tensors["p/a"]._version == other._version


@pytest.mark.parametrize(
    "odd",
    [torch.eye(3).to_sparse(), torch.empty(3, 4, device="meta"), torch.eye(3).to("meta")],
    ids=["sparse", "meta", "meta again"],
)
def test_what_has_no_bytes_is_refused_though_bytes_were_there(odd):
    recall = CaptureCache()
    recall.flatten("p", {"a": BASE})
    with pytest.raises(Exception, match="no plain bytes"):
        recall.flatten("p", {"a": odd})


class Trained:
    """A model and its optimizer, as they are held."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.steps = 0
        self.model = nn.Sequential(nn.Linear(200, 300), nn.BatchNorm1d(300), nn.Linear(300, 5))
        self.optimizer = torch.optim.AdamW(self.model[0].parameters())
        self.parts = {
            "model": Part(self.model),
            "optimizer": Part(NamedOptimizer(self.model, self.optimizer)),
            "rng": Part(RandomState(), "rank"),
        }

    def step(self) -> None:
        random.seed(len(self.optimizer.state) + self.steps)
        self.steps += 1
        self.model(torch.randn(4, 200)).sum().backward()
        self.optimizer.step()

    def files(self, arena, world, recall=None) -> dict[str, bytes]:
        snapshot = capture(1, self.parts, world.rank, recall)
        small = state_memory(self.parts) if recall is not None else ()
        staged = stage(snapshot, world, arena, stable_storages(self.parts), small)
        staged.rest.make(modestly=recall is not None)
        staged.rest.require_unchanged()
        return {one.name: bytes(one.data) for one in staged.files}


def another_group(trained):
    trained.optimizer.add_param_group({"params": [*trained.model[2].parameters()], "lr": 0.5})


def a_new_buffer(trained):
    trained.model[1].register_buffer("more", torch.ones(7))


def other_precision(trained):
    trained.model[2].to(torch.float64).to(torch.float32)
    trained.model.register_buffer("halves", torch.ones(3, dtype=torch.float16))


def other_memory_of_a_parameter(trained):
    trained.model[0].weight.data = trained.model[0].weight.data.clone() + 1


def other_memory_of_a_storage(trained):
    address, storage = trained.model[0].weight.data_ptr(), trained.model[0].weight.untyped_storage()
    trained.model.share_memory()
    assert storage.data_ptr() == trained.model[0].weight.data_ptr() != address


def no_state(trained):
    trained.optimizer.state.clear()


@pytest.mark.parametrize("world", [World(0, 1), World(0, 2), World(1, 2)], ids=str)
@pytest.mark.parametrize(
    "change",
    [another_group, a_new_buffer, other_precision, other_memory_of_a_parameter,
     other_memory_of_a_storage, no_state],
    ids=lambda one: one.__name__,
)  # fmt: skip
def test_what_is_staged_step_by_step_is_what_is_staged_anew(change, world):
    trained, recall, slots = Trained(), CaptureCache(), [StagingBuffers(), StagingBuffers()]
    for turn in range(8):
        if turn == 4:
            change(trained)
        if turn != 4 or change is not no_state:
            trained.step()
        held = trained.files(slots[turn % 2], world, recall)
        assert held == trained.files(StagingBuffers(), world)


def test_nothing_is_remembered_of_memory_that_a_file_no_longer_has():
    trained, recall, arena = Trained(), CaptureCache(), StagingBuffers()
    trained.step()
    trained.files(arena, World(), recall)
    trained.files(arena, World(), recall)
    assert len(arena.splits._schedules) > 0
    arena.close()
    assert len(arena.splits._schedules) == 0
    assert trained.files(arena, World(), recall) == trained.files(StagingBuffers(), World())


def test_a_copy_is_made_again_of_what_is_there_then():
    source = torch.arange(6.0)
    buffer = memoryview(bytearray(source.nbytes))
    copy = HostCopyBatch([TensorCopy("x", source, target_in(buffer, 0, source))])
    copy.make(modestly=True)
    source.add_(1)
    assert copy.changed() == ["x"]
    copy.renew()
    copy.make(modestly=True)
    assert not copy.changed()
    assert bytes(buffer) == source.numpy().tobytes()


def test_a_copy_is_made_again_from_where_the_storage_is_then():
    source = torch.arange(6.0)
    buffer = memoryview(bytearray(source.nbytes))
    copy = HostCopyBatch([TensorCopy("x", source, target_in(buffer, 0, source))])
    copy.make(modestly=True)
    source.share_memory_()
    source.add_(1)
    copy.renew()
    copy.make(modestly=True)
    assert bytes(buffer) == source.numpy().tobytes()


def test_a_change_that_is_counted_after_the_copy_was_made_is_seen():
    """torch counts a change in place once it is made."""
    source = torch.arange(6.0)
    buffer = memoryview(bytearray(source.nbytes))
    copies = DeferredCopies(
        [HostCopyBatch([TensorCopy("x", source, target_in(buffer, 0, source))])]
    )
    copies.make()
    copies.require_unchanged()
    source.add_(1)
    with pytest.raises(SaveFailed, match="`x` and 0 others changed"):
        copies.require_unchanged()


def test_what_is_no_longer_steady_is_copied_at_once():
    trained, recall, arena = Trained(), CaptureCache(), StagingBuffers()
    trained.step()
    for steady in (stable_storages(trained.parts), frozenset(), stable_storages(trained.parts)):
        rest = stage(capture(1, trained.parts, 0, recall), World(), arena, steady).rest
        assert bool(len(rest)) == bool(steady)
