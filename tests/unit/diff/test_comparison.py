"""Two whole checkpoints: layouts against each other, what torch says, memory, remote sides."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path

import fsspec
import pytest
import safetensors.torch
import torch

from resilient.checkpoint.catalog import committed, read_manifest
from resilient.diff import compare as compare_module
from resilient.diff import foreign, native
from resilient.diff.compare import compare
from resilient.layouts.detect import read_layout
from resilient.storage.folder import open_folder
from resilient.storage.open import open_store
from tests.helpers.hf_runs import HERE, SHARED

NEEDS_RUNS = pytest.mark.skipif(
    not SHARED.is_dir(), reason="the recorded runs are not beside this clone"
)
EARLY = HERE / "gpt2_all" / "run" / "checkpoint-8"


def side(path):
    folder = open_folder(str(path))
    listing = folder.list()
    return foreign.open_foreign(folder, listing, read_layout(folder, listing))


def run(case):
    return SHARED / case / "run" / "checkpoint-8"


def by_name(found):
    return {one.name: one for one in found.tensors}


def check_tensor(change, one, other):
    """Hold what is said of a tensor against what torch says of what torch loaded."""
    found = change.measures
    assert change.is_equal == bool((one.view(torch.uint8) == other.view(torch.uint8)).all())
    left, right = one.double().reshape(-1), other.double().reshape(-1)
    assert found.changed == int((one != other).sum())
    assert found.max_abs == float((left - right).abs().max())
    if float(left.norm()):
        distance = float((left - right).norm() / left.norm())
        assert found.relative == pytest.approx(distance, rel=1e-9)
    if float(left.norm()) and float(right.norm()):
        wanted = float(left @ right / left.norm() / right.norm())
        assert found.cosine == pytest.approx(wanted, rel=1e-9)


@pytest.fixture
def late(tmp_path):
    """A copy that went on: weights, moments, the log and a generator are not what they were."""
    path = Path(shutil.copytree(EARLY, tmp_path / "checkpoint-16"))
    weights = safetensors.torch.load_file(path / "model.safetensors")
    moved = {name: one * 1.5 if "ln_1" in name else one for name, one in weights.items()}
    safetensors.torch.save_file(moved, path / "model.safetensors")
    optimizer = torch.load(path / "optimizer.pt", weights_only=True)
    optimizer["state"][3]["exp_avg"] += 1
    optimizer["param_groups"][1]["lr"] = 0.25
    torch.save(optimizer, path / "optimizer.pt")
    state = json.loads((path / "trainer_state.json").read_text())
    state["log_history"][-1]["loss"] = float("nan")
    state["global_step"] = 16
    (path / "trainer_state.json").write_text(json.dumps(state))
    return path


def test_a_checkpoint_is_the_same_as_itself():
    found = compare(side(EARLY), side(EARLY))
    assert not found.differs
    assert len(found.tensors) == 112
    assert all(one.is_equal for one in found.tensors)
    assert {one.kind for one in found.random} == {"python", "numpy", "cpu"}
    assert all(one.same and one.draws == 0 for one in found.random)
    assert found.same_fields["groups"] == 24


@pytest.mark.parametrize("block", [7, 1 << 20])
def test_what_changed_is_found_and_measured_as_torch_does(late, block, monkeypatch):
    monkeypatch.setattr(compare_module, "BLOCK_ELEMENTS", block)
    found = compare(side(EARLY), side(late))
    assert found.differs
    changes = by_name(found)
    before = safetensors.torch.load_file(EARLY / "model.safetensors")
    after = safetensors.torch.load_file(late / "model.safetensors")
    for name, one in before.items():
        check_tensor(changes[f"model/{name}"], one, after[name])
    states = [torch.load(at / "optimizer.pt", weights_only=True)["state"] for at in (EARLY, late)]
    for number, state in states[0].items():
        for kind, one in state.items():
            name = f"optimizer/{number}.{kind}"
            check_tensor(changes[name], one.reshape(-1), states[1][number][kind].reshape(-1))
    moved = {one.name for one in found.tensors if not one.is_equal}
    assert moved == {f"model/{name}" for name in before if "ln_1" in name} | {"optimizer/3.exp_avg"}
    assert [one.is_equal for one in found.tensors] == sorted(one.is_equal for one in found.tensors)
    assert not found.tensors[0].is_equal
    assert found.history == (9, 9, 8)
    fields = {(one.section, one.name): (one.before, one.after) for one in found.fields}
    assert fields["groups", "1.lr"][1] == 0.25
    assert fields["trainer", "global_step"] == (8, 16)


def test_what_became_no_number_is_told_first(tmp_path):
    torch.save({"a": torch.ones(4), "b": torch.ones(4)}, tmp_path / "one.pt")
    broken = torch.tensor([1.0, 1.0, float("nan"), 1.0])
    torch.save({"a": torch.ones(4) * 1e9, "b": broken}, tmp_path / "two.pt")
    found = compare(side(tmp_path / "one.pt"), side(tmp_path / "two.pt"))
    assert [one.name for one in found.tensors] == ["model/b", "model/a"]


def test_only_what_is_wanted_is_read(late):
    found = compare(side(EARLY), side(late), is_selected=lambda name: name.endswith("ln_1.bias"))
    assert len(found.tensors) == 2


def test_a_side_may_be_anywhere_that_is_read_by_ranges(late):
    remote = fsspec.filesystem("memory")
    for file in late.iterdir():
        remote.pipe(f"/diff/{late.name}/{file.name}", file.read_bytes())
    near, far = side(late), side(f"memory://diff/{late.name}")
    found = compare(near, far)
    remote.rm("/diff", recursive=True)
    assert not found.differs
    assert len(found.tensors) == 112


@pytest.fixture
def own(tmp_path):
    return Path(shutil.copytree(HERE.parent / "format-2", tmp_path / "own"))


def own_side(url):
    store = open_store(str(url))
    return native.open_native(store, read_manifest(store, committed(store)[0]))


def test_a_checkpoint_of_ours_may_be_anywhere_too(own):
    remote = fsspec.filesystem("memory")
    for file in own.rglob("*.*"):
        remote.pipe(f"/own/{file.relative_to(own)}", file.read_bytes())
    found = compare(own_side(own), own_side("memory://own"))
    remote.rm("/own", recursive=True)
    assert not found.differs
    assert len(found.tensors) == 6


@pytest.mark.parametrize(
    ("lost", "note", "unknown"),
    [
        (
            "model.r00001.safetensors",
            "",
            {"model/half", "model/wte.weight", "model/lm_head.weight"},
        ),
        ("trainer_state.json", "a: trainer_state.json: it is missing", set()),
    ],
)
def test_a_file_of_ours_that_is_gone_is_told_and_the_rest_is_compared(own, lost, note, unknown):
    before = own_side(HERE.parent / "format-2")
    (own / "checkpoint-2-g1" / lost).unlink()
    found = compare(own_side(own), before)
    assert {one.name for one in found.tensors if one.is_equal is None} == unknown
    assert all("is missing" in one.why for one in found.tensors if one.is_equal is None)
    assert found.notes == ((note,) if note else ())
    assert found.differs


def test_a_second_name_of_the_same_weights_is_no_difference(tmp_path):
    first, other = torch.randn(9, 4), torch.randn(9, 4)
    torch.save({"wte.w": first, "b.w": other, "head.w": first}, tmp_path / "twice.pt")
    torch.save({"wte.w": first, "b.w": other}, tmp_path / "once.pt")
    copied = {"wte.w": first, "b.w": other, "head.w": first.clone()}
    safetensors.torch.save_file(copied, tmp_path / "copied.safetensors")
    for name in ("twice.pt", "copied.safetensors"):
        for pair in ((name, "once.pt"), ("once.pt", name)):
            found = compare(*(side(tmp_path / one) for one in pair))
            assert found.tied == ("model/head.w",)
            assert found.only == ((), ())
    torch.save({"wte.w": first, "b.w": other, "head.w": first + 1}, tmp_path / "twice.pt")
    found = compare(side(tmp_path / "twice.pt"), side(tmp_path / "once.pt"))
    assert [one.name for one in found.only[0]] == ["head.w"]
    assert found.differs


def test_shapes_that_differ_and_bytes_that_are_gone_are_told(tmp_path):
    torch.save({"a": torch.zeros(4), "b": torch.zeros(4)}, tmp_path / "one.pt")
    torch.save({"a": torch.zeros(5), "b": torch.zeros(4)}, tmp_path / "two.pt")
    found = by_name(compare(side(tmp_path / "one.pt"), side(tmp_path / "two.pt")))
    assert found["model/a"].why == "the shapes differ"
    assert found["model/a"].is_equal is False
    assert found["model/b"].is_equal is True
    data = bytearray((tmp_path / "two.pt").read_bytes())
    at = data.index(b"PK\x03\x04", data.index(b"data/1") - 40)
    data[at : at + 4] = b"gone"
    (tmp_path / "two.pt").write_bytes(data)
    broken = compare(side(tmp_path / "one.pt"), side(tmp_path / "two.pt"))
    assert by_name(broken)["model/b"].is_equal is None
    assert broken.differs


def test_memory_does_not_grow_with_the_tensors(tmp_path):
    elements = 24 << 20
    head = {"w": {"dtype": "F32", "shape": [elements], "data_offsets": [0, 4 * elements]}}
    text = json.dumps(head).encode()
    for name in ("a", "b"):
        with (tmp_path / f"{name}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + 4 * elements)  # a hole: no disk is needed
    sides = [side(tmp_path / f"{name}.safetensors") for name in ("a", "b")]
    told = []
    tracemalloc.start()
    found = compare(*sides, on_progress=lambda done, of: told.append((done, of)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert not found.differs
    assert told[-1][1] == 4 * elements
    assert peak < 96 << 20, f"{peak >> 20} MiB of {4 * elements >> 20}"


@NEEDS_RUNS
@pytest.mark.filterwarnings("ignore")  # of the peers
def test_arguments_are_those_that_transformers_unpickles():
    path = run("gpt2_all")
    theirs_too = vars(torch.load(path / "training_args.bin", weights_only=False))
    said = side(path).fields["config"]
    plain = {
        name: one
        for name, one in theirs_too.items()
        if isinstance(one, bool | int | float | str) and not name.startswith("_")
    }
    assert len(plain) > 70
    # A word of an enumeration is its value.
    assert {name: said[name] for name in plain} == {
        name: getattr(one, "value", one) for name, one in plain.items()
    }


@NEEDS_RUNS
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("gpt2_fsdp2_full", "gpt2_fsdp2_sharded"),
        ("gpt2_ds_z1", "gpt2_ds_z2"),
        ("gpt2_ds_z3", "gpt2_fsdp1_sharded"),
        ("gpt2_ddp2_all", "gpt2_fsdp2_sharded"),
        ("gpt2_all", "gpt2_fsdp2_full"),
    ],
)
def test_runs_of_two_strategies_have_all_weights_and_moments_in_common(one, other):
    found = compare(side(run(one)), side(run(other)))
    assert found.notes == ()
    names = by_name(found)
    assert "optimizer/transformer.h.1.mlp.c_fc.weight.exp_avg_sq" in names
    moments = [name for name in names if name.startswith("optimizer/") and ".fp32" not in name]
    assert len(moments) == 84
    assert not any(each.why for each in found.tensors)
    masters = [each for tensors in found.only for each in tensors]
    assert all(each.name.endswith(".fp32") for each in masters)
