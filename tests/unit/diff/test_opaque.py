"""What no reader understands is compared by its bytes: two checkpoints are never silently equal."""

from __future__ import annotations

import pickle
import shutil

import numpy as np
import pytest
import torch

from resilient.checkpoint.catalog import committed, read_manifest
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.clock import SystemClock
from resilient.diff import foreign, native
from resilient.diff.compare import compare
from resilient.engine_factory import open_engine
from resilient.events import Emitter
from resilient.layouts.detect import read_layout
from resilient.state_dict.statefuls import collect_parts
from resilient.storage.folder import open_folder
from resilient.storage.open import open_store
from tests.helpers.hf_runs import HERE

RUN = HERE / "gpt2_all" / "run" / "checkpoint-8"


def side(path):
    folder = open_folder(str(path))
    listing = folder.list()
    return foreign.open_foreign(folder, listing, read_layout(folder, listing))


def told(one, other):
    found = compare(side(one), side(other))
    return found.differs, [(it.place, it.is_in) for it in found.opaque]


@pytest.fixture
def pair(tmp_path):
    return tuple(shutil.copytree(RUN, tmp_path / name / "checkpoint-8") for name in "ab")


def saved(folder, name, value):
    torch.save(value, folder / name)


def resaved(folder, name, change):
    value = torch.load(folder / name, weights_only=False)
    change(value)
    torch.save(value, folder / name)


SPARSE = torch.eye(3).to_sparse()
OTHERS = {
    "an array in a schedule": ("scheduler.pt", np.arange(3), np.arange(1, 4)),
    "a set in a schedule": ("scheduler.pt", {1, 2}, {1, 3}),
    "a frozen set in a schedule": ("scheduler.pt", frozenset({1}), frozenset({2})),
    "an object in a schedule": ("scheduler.pt", complex(1, 2), complex(1, 3)),
    "long bytes in a schedule": ("scheduler.pt", bytes(300), bytes(299) + b"\1"),
    "a generator that is not known": ("rng_state.pth", np.arange(3), np.arange(1, 4)),
    "a sparse tensor of an optimizer": ("optimizer.pt", SPARSE, SPARSE * 2),
    "a number of an optimizer's state": ("optimizer.pt", {"state": {0: {"n": 1}}}, {"state": {}}),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_value_that_no_field_tells_is_compared_by_its_bytes(what, pair):
    name, one, other = OTHERS[what]
    for folder in pair:
        resaved(folder, name, lambda held: held.update(extra=one))
    assert told(*pair) == (False, [])
    resaved(pair[1], name, lambda held: held.update(extra=other))
    differs, places = told(*pair)
    assert differs
    assert all(place.startswith(f"{name}: extra") for place, _ in places)
    assert places


@pytest.mark.parametrize(
    "name", ["scaler.pt", "custom_checkpoint_0.pkl", "sampler.bin", "tokenizer.json", "notes/x"]
)
def test_a_file_that_nobody_opens_is_compared(name, pair):
    for folder, number in zip(pair, (1, 1), strict=True):
        (folder / name).parent.mkdir(exist_ok=True)
        saved(folder, name, {"scale": number})
    assert told(*pair) == (False, [])
    saved(pair[1], name, {"scale": 2})
    differs, places = told(*pair)
    assert differs
    assert places[0][0].startswith(name)
    (pair[1] / name).unlink()
    differs, places = told(*pair)
    assert differs
    assert places[0][1] == "a"


def test_what_a_pickle_of_another_kind_holds_is_compared_by_the_whole_file(pair):
    for folder, number in zip(pair, (1, 2), strict=True):
        (folder / "state.pkl").write_bytes(pickle.dumps({"n": number}))
    assert told(*pair) == (True, [("state.pkl", "both")])


def test_the_order_of_a_set_and_of_a_dict_says_nothing(pair):
    words = [f"word{number}" for number in range(20)]
    for folder, given in zip(pair, (words, words[::-1]), strict=True):
        value = {"extra": {"set": set(given), "dict": dict.fromkeys(given, 1)}}
        torch.save(value, folder / "more.pt", pickle_protocol=4)
    assert told(*pair) == (False, [])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantized_tensors_and_views_of_nothing_known_are_compared(tmp_path):
    for name, number in (("a", 1.0), ("b", 2.0), ("c", 1.0)):
        (tmp_path / name).mkdir()
        made = torch.quantize_per_tensor(torch.full((2,), number), 1.0, 0, torch.quint8)
        torch.save({"q": made, "w": torch.ones(2)}, tmp_path / name / "model.pt")
    pairs = [(tmp_path / "a" / "model.pt", tmp_path / name / "model.pt") for name in "bc"]
    assert told(*pairs[0]) == (True, [("q", "both")])
    assert told(*pairs[1]) == (False, [])


def own_side(path, count):
    """Save our own checkpoint, whose optimizer counts with a number that is no tensor."""
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    for one in model.parameters():
        optimizer.state[one] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.zeros_like(one),
            "exp_avg_sq": torch.zeros_like(one),
            "count": count,
        }
    things = collect_parts({"model": model, "optimizer": optimizer}, 1, rng=True)
    checkpointer = open_engine(str(path), emit=Emitter(SystemClock()))
    checkpointer.resume({})
    checkpointer.save(1, things.parts, CheckpointInfo(config={}, data={}))
    checkpointer.close()
    store = open_store(str(path))
    return native.open_native(store, read_manifest(store, committed(store)[0]))


@pytest.mark.parametrize(("count", "differs"), [(7, False), (8, True)])
def test_the_rest_of_our_own_optimizer_is_compared(count, differs, tmp_path):
    found = compare(own_side(tmp_path / "a", 7), own_side(tmp_path / "b", count))
    assert [one for one in found.fields if one.section != "software"] == []
    assert bool(found.opaque) == differs
    assert all(".count" in one.place for one in found.opaque)
