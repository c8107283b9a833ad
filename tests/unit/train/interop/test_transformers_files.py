"""What of a folder of Transformers is believed, and what is said of one that is spoiled."""

from __future__ import annotations

import json
import zipfile

import pytest
import torch

from resilient.errors import IncompatibleCheckpoint, IntegrityError, NothingToResume
from resilient.train.data.sampler import place_in_epoch
from resilient.train.hf_interop.checkpoint import TransformersCheckpoint, is_transformers_folder
from resilient.train.hf_interop.conversion import Naming, callback_states, naming_of, parts_of, tie
from resilient.train.hf_interop.import_check import open_source
from tests.helpers.hf_runs import HERE

LINE = Naming((("lin.weight",), ("lin.bias",)), ())


def edit(folder, **changes):
    file = folder / "trainer_state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def everything(folder):
    return parts_of(TransformersCheckpoint(folder), LINE, "checkpoint-7-g1")


def test_a_checkpoint_is_told_from_other_folders(theirs, tmp_path):
    assert is_transformers_folder(theirs)
    assert not is_transformers_folder(tmp_path)
    (theirs / "manifest.json").write_text("{}")
    assert not is_transformers_folder(theirs)


def test_everything_is_there_under_our_names(theirs):
    parts = everything(theirs)
    optimizer = parts["optimizer"].stateful.state_dict()
    assert [one["params"] for one in optimizer["param_groups"]] == [["lin.weight"], ["lin.bias"]]
    assert set(parts) >= {"model", "scheduler", "data", "callbacks", "best", "meters_0"}
    assert parts["model"].stateful.state_dict()["seen"].item() == 28
    assert parts["rng_state_0"].stateful.state_dict()["cpu"].dtype == torch.uint8


def test_moments_go_to_the_parameter_that_they_are_of():
    folder = HERE / "gpt2_all" / "run" / "checkpoint-8"
    from resilient.train.optimizers.builtin import parameter_groups
    from tests.helpers.hf_runs import gpt2

    model = gpt2()
    naming = naming_of(model, parameter_groups(model, 0.01))
    parts = parts_of(TransformersCheckpoint(folder), naming, "")
    state = parts["optimizer"].stateful.state_dict()["state"]
    shapes = {name: one.shape for name, one in model.named_parameters()}
    assert {name: one["exp_avg"].shape for name, one in state.items()} == shapes
    weights = parts["model"].stateful.state_dict()
    assert weights["lm_head.weight"] is weights["transformer.wte.weight"]
    turned = Naming((naming.trained[0][::-1], naming.trained[1]), naming.tied)
    with pytest.raises(IncompatibleCheckpoint, match=r"the moments of .* have the shape"):
        parts_of(TransformersCheckpoint(folder), turned, "")


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_flipped_bit_is_seen(theirs, name):
    file = theirs / name
    with zipfile.ZipFile(file) as content:
        largest = max(content.infolist(), key=lambda one: one.file_size)
        held = content.read(largest)
    data = bytearray(file.read_bytes())
    data[bytes(data).index(held) + len(held) // 2] ^= 4
    file.write_bytes(data)
    with pytest.raises(IntegrityError, match=f"{name}.*cannot be read"):
        everything(theirs)


@pytest.mark.parametrize(
    ("name", "keep"), [("optimizer.pt", 700), ("model.safetensors", 200), ("model.safetensors", 5)]
)
def test_a_torn_file_is_seen(theirs, name, keep):
    (theirs / name).write_bytes((theirs / name).read_bytes()[:keep])
    with pytest.raises(IntegrityError, match=name):
        everything(theirs)


def test_what_is_no_data_is_not_loaded(theirs):
    class Harm:
        def __reduce__(self):
            return (exec, ("raise SystemExit(9)",))

    torch.save({"python": Harm()}, theirs / "rng_state.pth")
    with pytest.raises(IntegrityError, match=r"rng_state\.pth.*cannot be read"):
        everything(theirs)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("optimizer.pt", "optimizer again"),
        ("scheduler.pt", "schedule again"),
        ("model.safetensors", "holds no weights"),
    ],
)
def test_what_is_missing_is_not_made_up(theirs, name, said):
    (theirs / name).unlink()
    with pytest.raises(IncompatibleCheckpoint, match=said):
        everything(theirs)


def test_folder_mixes_checkpoints_is_a_loss_that_strict_refuses(theirs):
    edit(theirs, global_step=6)
    assert open_source(theirs).lost == ("the consistency of its files",)
    with pytest.raises(IncompatibleCheckpoint, match="loss of the consistency of its files"):
        open_source(theirs, strict=True)


def test_a_folder_that_is_none_or_not_finished_is_refused(theirs, tmp_path):
    with pytest.raises(NothingToResume, match=r"no trainer_state.json"):
        TransformersCheckpoint(tmp_path)
    (theirs / "checkpoint-is-incomplete.txt").touch()
    with pytest.raises(IntegrityError, match="never finished"):
        TransformersCheckpoint(theirs)
    (theirs / "checkpoint-is-incomplete.txt").unlink()
    (theirs / "trainer_state.json").write_text("[]")
    with pytest.raises(IntegrityError, match="not a JSON object"):
        TransformersCheckpoint(theirs)


def test_a_rank_whose_random_state_is_lost_is_named(theirs):
    (theirs / "rng_state.pth").rename(theirs / "rng_state_1.pth")
    with pytest.raises(IntegrityError, match=r"ranks \[1\]: some are missing"):
        everything(theirs)


def test_another_model_is_refused(theirs):
    with pytest.raises(IncompatibleCheckpoint, match=r"groups of \[1, 1\] .* \[2\]"):
        parts_of(TransformersCheckpoint(theirs), Naming((("a", "b"),), ()), "")


def with_empty_groups(folder, at):
    """Insert groups without parameters into the optimizer and the schedule."""
    optimizer = torch.load(folder / "optimizer.pt", weights_only=True)
    schedule = torch.load(folder / "scheduler.pt", weights_only=False)
    for place in at:
        empty = {**optimizer["param_groups"][0], "params": [], "lr": 100.0 + place}
        optimizer["param_groups"].insert(place, empty)
        for name in ("base_lrs", "_last_lr", "lr_lambdas"):
            schedule[name].insert(place, {} if name == "lr_lambdas" else 100.0 + place)
    torch.save(optimizer, folder / "optimizer.pt")
    torch.save(schedule, folder / "scheduler.pt")


@pytest.mark.parametrize("at", [(1,), (0,), (2,), (0, 3), (1, 2)])
def test_own_empty_groups_take_the_saved_ones(theirs, at):
    with_empty_groups(theirs, at)
    saved = torch.load(theirs / "optimizer.pt", weights_only=True)["param_groups"]
    names = iter(LINE.trained)
    trained = tuple(next(names) if group["params"] else () for group in saved)
    parts = parts_of(TransformersCheckpoint(theirs), Naming(trained, ()), "")
    found = parts["optimizer"].stateful.state_dict()["param_groups"]
    assert [group["params"] for group in found] == [list(group) for group in trained]
    assert [group["lr"] for group in found] == [group["lr"] for group in saved]
    rates = torch.load(theirs / "scheduler.pt", weights_only=False)["_last_lr"]
    assert parts["scheduler"].stateful.state_dict()["_last_lr"] == rates


def test_saved_empty_groups_without_own_ones_are_left_out(theirs):
    rates = torch.load(theirs / "scheduler.pt", weights_only=False)["_last_lr"]
    with_empty_groups(theirs, (0, 2))
    parts = everything(theirs)
    found = parts["optimizer"].stateful.state_dict()["param_groups"]
    assert [group["params"] for group in found] == [["lin.weight"], ["lin.bias"]]
    assert parts["scheduler"].stateful.state_dict()["_last_lr"] == rates


@pytest.mark.parametrize("trained", [((), *LINE.trained), (*LINE.trained, ())])
def test_own_empty_group_without_a_saved_one_is_refused(theirs, trained):
    with_empty_groups(theirs, (1,))
    with pytest.raises(IncompatibleCheckpoint, match=r"groups of \[1, 0, 1\] .* this model \["):
        parts_of(TransformersCheckpoint(theirs), Naming(trained, ()), "")


def test_weights_in_several_files_are_put_together(theirs):
    from safetensors.torch import load_file, save_file

    whole = load_file(theirs / "model.safetensors")
    places = {}
    for nth, name in enumerate(sorted(whole)):
        places[name] = f"model-{nth}.safetensors"
        save_file({name: whole[name]}, theirs / places[name])
    (theirs / "model.safetensors").unlink()
    index = theirs / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    found = TransformersCheckpoint(theirs).weights()
    assert all(torch.equal(found[name], one) for name, one in whole.items())
    index.write_text(json.dumps({"weight_map": {**places, "more": "model-0.safetensors"}}))
    with pytest.raises(IntegrityError, match=r"\['more'\], which are in no file"):
        TransformersCheckpoint(theirs).weights()


@pytest.mark.parametrize(
    ("epoch", "batch", "ranks", "size", "place"),
    [
        (0.5, 4, 1, 64, (0, 32)),
        (1.0, 4, 1, 64, (1, 0)),
        (0.8, 4, 1, 58, (0, 48)),
        (2 + 14 / 15, 4, 1, 58, (2, 56)),
        (13 / 14, 4, 1, 58, (0, 52)),  # the last batch dropped
        (0.25, 4, 2, 64, (0, 16)),
        (0.9999999999, 4, 1, 64, (1, 0)),
    ],
)
def test_the_place_follows_from_the_epoch(epoch, batch, ranks, size, place):
    assert place_in_epoch({"epoch": epoch, "batch": batch, "ranks": ranks}, size) == place


def test_a_place_in_another_training_set_is_refused():
    with pytest.raises(ValueError, match="was trained on another set"):
        place_in_epoch({"epoch": 0.5, "batch": 4, "ranks": 1}, 68)


def test_callbacks_of_one_class_are_kept_apart():
    saved = [{"attributes": {"count": 1}}, {"attributes": {"count": 2}}]
    control = {"args": {"should_training_stop": True, "should_save": True}, "attributes": {}}
    state = {"stateful_callbacks": {"Counts": saved, "TrainerControl": control}}
    assert callback_states(state) == {
        "Counts": {"count": 1},
        "Counts_2": {"count": 2},
        "TrainerControl": {"should_training_stop": False, "should_epoch_stop": False},
    }


@pytest.mark.parametrize(("waited", "has_ended"), [(2, False), (3, True)])
def test_stop_flag_is_taken_from_early_stopping_alone(waited, has_ended):
    early = {
        "args": {"early_stopping_patience": 3},
        "attributes": {"early_stopping_patience_counter": waited},
    }
    control = {"args": {"should_training_stop": True}, "attributes": {}}
    state = {"stateful_callbacks": {"EarlyStoppingCallback": early, "TrainerControl": control}}
    assert callback_states(state)["TrainerControl"]["should_training_stop"] is has_ended


def test_a_tensor_that_is_tied_to_nothing_stays_missing():
    one = torch.ones(1)
    assert tie({"a": one}, (("a", "b"), ("c", "d"))) == {"a": one, "b": one}
