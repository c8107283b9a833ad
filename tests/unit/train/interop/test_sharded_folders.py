"""What FSDP and DeepSpeed leave in a folder of Transformers: read by name, or told to be wrong."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from torch import nn

from resilient.errors import IncompatibleCheckpoint, IntegrityError
from resilient.strategies.module_wrapper import ForwardRedirect, named_in
from resilient.train.hf_interop.checkpoint import TransformersCheckpoint
from resilient.train.hf_interop.conversion import Naming, naming_of, parts_of
from resilient.train.hf_interop.importer import HFCheckpointImported
from tests.helpers.sharded_folders import STEP, optimizer, values, write_fsdp, write_zero

LINE = Naming((("lin.weight",), ("lin.bias",)), ())


def everything(folder, naming=LINE):
    parts = parts_of(TransformersCheckpoint(folder), naming, f"checkpoint-{STEP}-g1")
    return {name: part.stateful.state_dict() for name, part in parts.items()}


def require_whole(parts):
    for name, one in values(0).items():
        assert torch.equal(parts["model"][name], one)
    expected, found = optimizer(), parts["optimizer"]
    assert [one["params"] for one in found["param_groups"]] == [["lin.weight"], ["lin.bias"]]
    assert [one["weight_decay"] for one in found["param_groups"]] == [0.1, 0.0]
    assert tuple(found["param_groups"][0]["betas"]) == (0.9, 0.99)
    for name, state in expected["state"].items():
        assert found["state"][name].keys() == state.keys()
        for kind, one in state.items():
            assert torch.equal(found["state"][name][kind], one), (name, kind)


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_what_fsdp_saved_is_taken_by_name(theirs, kind):
    write_fsdp(theirs, kind)
    require_whole(everything(theirs))


@pytest.mark.parametrize(
    ("stage", "ranks", "vectors"), [(1, 2, 2), (2, 3, 2), (3, 1, 2), (3, 2, 2), (3, 3, 1)]
)
def test_partitions_of_deepspeed_become_whole(theirs, stage, ranks, vectors):
    write_zero(theirs, stage, ranks, vectors=vectors)
    parts = everything(theirs)
    require_whole(parts)
    assert parts["model"]["seen"].item() == 28


def test_the_optimizer_of_other_parameters_is_refused(theirs):
    write_fsdp(theirs, "full")
    other = Naming((("lin.weight",), ("lin.scale",)), ())
    with pytest.raises(IncompatibleCheckpoint, match=r"differ in `lin.bias` and 1 more"):
        everything(theirs, other)


def test_groups_are_in_the_order_of_this_model(theirs):
    write_fsdp(theirs, "full")
    edited = torch.load(theirs / "scheduler.pt", weights_only=True)
    edited["base_lrs"] = [0.1, 0.2]
    torch.save(edited, theirs / "scheduler.pt")
    found = everything(theirs, Naming((("lin.bias",), ("lin.weight",)), ()))
    assert [one["weight_decay"] for one in found["optimizer"]["param_groups"]] == [0.0, 0.1]
    assert found["scheduler"]["base_lrs"] == [0.2, 0.1]
    found = everything(theirs, Naming((("lin.bias", "lin.weight"),), ()))
    assert [one["weight_decay"] for one in found["optimizer"]["param_groups"]] == [0.1, 0.0]
    assert found["scheduler"]["base_lrs"] == [0.1, 0.2]


def test_a_group_without_parameters_is_left_out(theirs):
    write_fsdp(theirs, "full")
    state = optimizer()
    state["param_groups"].insert(1, {"lr": 0.5, "weight_decay": 0.3, "params": []})
    torch.save(state, theirs / "optimizer.bin")
    require_whole(everything(theirs))


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_own_empty_group_takes_the_saved_rates(theirs, kind):
    write_fsdp(theirs, kind)
    if kind == "full":  # a file that is sharded by name has no group without parameters
        state = optimizer()
        state["param_groups"].insert(1, {"lr": 0.5, "weight_decay": 0.3, "params": []})
        torch.save(state, theirs / "optimizer.bin")
    schedule = torch.load(theirs / "scheduler.pt", weights_only=True)
    schedule["base_lrs"] = [0.1, 0.5, 0.2]
    torch.save(schedule, theirs / "scheduler.pt")
    found = everything(theirs, Naming((("lin.weight",), (), ("lin.bias",)), ()))
    groups = [group["params"] for group in found["optimizer"]["param_groups"]]
    assert groups == [["lin.weight"], *([[]] if kind == "full" else []), ["lin.bias"]]
    assert found["scheduler"]["base_lrs"] == [0.1, 0.5, 0.2]
    if kind == "full":
        found = everything(theirs, Naming((("lin.bias",), ("lin.weight",), ()), ()))
        assert found["scheduler"]["base_lrs"] == [0.2, 0.1, 0.5]


def test_a_tensor_with_two_names_is_trained_under_ours(theirs):
    write_fsdp(theirs, "full")
    tied = Naming((("head.weight",), ("lin.bias",)), (("lin.weight", "head.weight"),))
    found = everything(theirs, tied)
    moment = found["optimizer"]["state"]["head.weight"]["exp_avg"]
    assert torch.equal(moment, values(100)["lin.weight"])
    assert torch.equal(found["model"]["head.weight"], values(0)["lin.weight"])


@pytest.mark.parametrize("name", ["pytorch_model_fsdp_0", "optimizer_0"])
def test_a_flipped_bit_in_a_slice_is_seen(theirs, name):
    write_fsdp(theirs, "sharded")
    file = next((theirs / name).glob("*.distcp"))
    data = bytearray(file.read_bytes())
    held = values(0 if "model" in name else 100)["lin.weight"].numpy().tobytes()
    data[bytes(data).index(held) + 5] ^= 4
    file.write_bytes(data)
    with pytest.raises(IntegrityError, match=rf"{name}.*cannot be read: the checksum"):
        everything(theirs)


@pytest.mark.parametrize(
    ("keep", "said"), [(None, "is missing"), (0, "cannot be read"), (900, "cannot be read")]
)
def test_a_torn_file_of_slices_is_seen(theirs, keep, said):
    write_fsdp(theirs, "sharded")
    file = next((theirs / "optimizer_0").glob("*.distcp"))
    data = file.read_bytes()
    file.unlink()
    if keep is not None:
        file.write_bytes(data[:keep])
    with pytest.raises(IntegrityError, match=said):
        everything(theirs)


def edit_index(folder, change):
    file = folder / ".metadata"
    index = pickle.loads(file.read_bytes())  # noqa: S301 - the test wrote it
    index.storage_meta = None  # holds a path of another class now
    change(index)
    file.write_bytes(pickle.dumps(index))


def test_a_tensor_that_is_not_there_as_a_whole_is_seen(theirs):
    write_fsdp(theirs, "sharded")
    folder = theirs / "pytorch_model_fsdp_0"
    edit_index(folder, lambda one: one.state_dict_metadata["model.lin.weight"].chunks.clear())
    with pytest.raises(IntegrityError, match=r"`model\.lin\.weight` is not complete there"):
        everything(theirs)


def test_an_index_that_leads_elsewhere_is_not_followed(theirs):
    write_fsdp(theirs, "sharded")

    def lead(index):
        for one in index.storage_data.values():
            one.relative_path = f"../pytorch_model_fsdp_0/{one.relative_path}"

    edit_index(theirs / "pytorch_model_fsdp_0", lead)
    with pytest.raises(IntegrityError, match="it is outside of the folder"):
        everything(theirs)


class Harm:
    def __reduce__(self):
        return (exec, ("raise SystemExit(9)",))


@pytest.mark.parametrize(
    ("write", "file"),
    [
        (lambda folder: write_fsdp(folder, "sharded"), "pytorch_model_fsdp_0/.metadata"),
        (lambda folder: write_fsdp(folder, "full"), "optimizer.bin"),
        (lambda folder: write_fsdp(folder, "full"), "pytorch_model_fsdp.bin"),
        (lambda folder: write_zero(folder, 1, 2), f"global_step{STEP}/mp_rank_00_model_states.pt"),
    ],
)
def test_what_is_no_data_is_not_loaded(theirs, write, file):
    write(theirs)
    (theirs / file).write_bytes(pickle.dumps(Harm()))
    with pytest.raises(IntegrityError, match="cannot be read"):
        everything(theirs)
    if not file.endswith(".metadata"):  # which is a bare pickle
        torch.save({"module": Harm()}, theirs / file)
        with pytest.raises(IntegrityError, match="cannot be read"):
            everything(theirs)


def test_partitions_that_lack_or_are_of_another_step_are_seen(theirs):
    engine = write_zero(theirs, 1, 2)
    first = engine / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    last = engine / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    held = last.read_bytes()
    last.unlink()
    with pytest.raises(IntegrityError, match="has 1 partitions of 2"):
        everything(theirs)
    first.rename(last)
    with pytest.raises(IntegrityError, match=r"partitions of ranks \[1\]"):
        everything(theirs)
    last.rename(first)
    last.write_bytes(held)
    file = theirs / "trainer_state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "global_step": 8}))
    moved = theirs.rename(theirs.parent / "mine")
    with pytest.raises(IntegrityError, match="it is of step 7, not of 8"):
        everything(moved)


@pytest.mark.parametrize(
    ("tag", "said"), [("global_step9", "is missing"), ("..", "names no folder")]
)
def test_a_tag_that_names_nothing_here_is_seen(theirs, tag, said):
    write_zero(theirs, 1, 2)
    (theirs / "latest").write_text(tag)
    with pytest.raises(IntegrityError, match=said):
        everything(theirs)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"config": {"round_robin_gradients": True}}, "round_robin_gradients"),
        ({"param_shapes": []}, "does not state the content of its partitions"),
    ],
)
def test_partitions_that_are_cut_otherwise_are_refused(theirs, told, said):
    write_zero(theirs, 2, 2, **told)
    with pytest.raises(IncompatibleCheckpoint, match=said):
        everything(theirs)


def test_a_model_that_deepspeed_cut_in_layers_is_refused(theirs):
    engine = write_zero(theirs, 1, 2)
    (engine / "mp_rank_01_model_states.pt").write_bytes(b"")
    with pytest.raises(IncompatibleCheckpoint, match="layers DeepSpeed cut over ranks"):
        everything(theirs)


def test_a_schedule_of_deepspeed_is_not_made_up(theirs):
    write_zero(theirs, 1, 2)
    (theirs / "scheduler.pt").unlink()
    with pytest.raises(IncompatibleCheckpoint, match="as of a schedule of DeepSpeed's own"):
        everything(theirs)


def test_what_cannot_be_taken_over_is_told(theirs):
    write_zero(theirs, 1, 2, dynamic_loss_scale=True)
    lost = TransformersCheckpoint(theirs).losses
    said = HFCheckpointImported("theirs", "checkpoint-7-g1", STEP, lost).message()
    assert said.endswith(", without the loss scale of DeepSpeed's fp16, which starts again")
    assert "without" not in HFCheckpointImported("theirs", "checkpoint-7-g1", STEP).message()


def test_a_model_in_flat_shards_has_the_names_that_it_had():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    model[2].weight = model[0].weight
    model[1].weight.requires_grad_(False)
    named = named_in(model)
    own = [[model[0].weight, model[1].bias], [model[0].bias]]
    ForwardRedirect(model, nn.Identity(), named)
    for one in model:
        one.weight = nn.Parameter(torch.zeros(1))
    found = naming_of(model, [{"params": one} for one in own])
    assert found.trained == (("0.weight", "1.bias"), ("0.bias",))
    assert found.tied == (("0.weight", "2.weight"),)
    vectors = naming_of(model, [{"params": [nn.Parameter(torch.zeros(9))]}])
    assert vectors.trained == (("0.weight", "0.bias", "1.bias"),)
