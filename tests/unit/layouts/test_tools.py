"""What is said of checkpoints of accelerate and of Lightning is what they load."""

from __future__ import annotations

import shutil

import pytest
import torch

from resilient.diff import foreign
from resilient.diff.model import GROUPS, SCHEDULE, TRAINER
from resilient.layouts.model import MODEL, OPTIMIZER, OTHER
from resilient.layouts.resumability import assess_resumability
from resilient.storage.folder import open_folder
from tests.helpers.foreign_folders import (
    alter,
    look,
    shapes,
    verdict,
    write_accelerate,
    write_lightning,
    write_slices,
)
from tests.helpers.sharded_folders import optimizer, values

DATA, RANDOM = "the place in the data", "the random state"


def spoiled(path, tmp_path, spoil):
    copy = shutil.copytree(path, tmp_path / "copy" / path.name)
    spoil(copy)
    return copy


@pytest.fixture(scope="module")
def accelerated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("accelerate") / "checkpoint_0"
    return folder, *write_accelerate(folder)


def test_a_folder_of_accelerate_is_what_accelerate_loads(accelerated):
    folder, accelerator, model, optimizer, schedule = accelerated
    with torch.no_grad():
        model.weight.zero_()
    accelerator.load_state(str(folder))
    found = look(folder)
    assert found.layout == "accelerate"
    weights = {name: tuple(one.shape) for name, one in model.state_dict().items()}
    assert shapes(found, MODEL) == weights
    state = optimizer.state_dict()
    held = {f"state.{at}.{name}" for at, one in state["state"].items() for name in one}
    assert set(shapes(found, OPTIMIZER)) == held
    assert found.optimizer.step == found.step == int(state["state"][0]["step"]) == 3
    assert found.optimizer.rates == (state["param_groups"][0]["lr"],)
    assert found.schedule.step == schedule.state_dict()["last_epoch"] == 3
    assert found.schedule.rates == tuple(schedule.get_last_lr())
    assert (found.rng.ranks, found.world) == ((0,), 1)
    assert shapes(found, OTHER) == {"held": (3,)}
    assert assess_resumability(found, "there").why == (DATA,)
    assert assess_resumability(found, "there").command == "accelerator.load_state('there')"


def again(folder, name, **options):
    torch.save({"seen": 1, **options}, folder / name)


@pytest.mark.parametrize(
    ("spoil", "answer", "why"),
    [
        (lambda at: (at / "random_states_0.pkl").unlink(), "partly", "random state"),
        (lambda at: (at / "random_states_0.pkl").write_bytes(b"x"), "partly", "random state"),
        (lambda at: (at / "model.safetensors").unlink(), "no", "no weights"),
        (lambda at: (at / "optimizer.bin").unlink(), "no", "optimizer.bin: it is missing"),
        (lambda at: (at / "optimizer.bin").write_bytes(b"x" * 90), "no", "optimizer.bin"),
        (lambda at: (at / "scheduler.bin").unlink(), "no", "had a schedule"),
        (lambda at: (at / "scheduler.bin").write_bytes(b"x" * 90), "no", "scheduler.bin"),
        (lambda at: torch.save({"count": 3}, at / "scheduler.bin"), "partly", DATA),
        (lambda at: torch.save({}, at / "scheduler.bin"), "no", "scheduler.bin"),
        (lambda at: again(at, "custom_checkpoint_2.pkl"), "no", "custom_checkpoint_1.pkl"),
        (lambda at: (at / "custom_checkpoint_0.pkl").write_bytes(b""), "no", "is empty"),
        (lambda at: again(at, "random_states_2.pkl"), "partly", "random state"),
        (lambda at: again(at, "scheduler_2.bin"), "no", "scheduler_1.bin"),
        (lambda at: again(at, "optimizer_2.bin"), "no", "optimizer_1.bin"),
        (lambda at: shutil.copy(at / "model.safetensors", at / "model_2.safetensors"), "no",
         "model_1.safetensors"),
        (lambda at: alter(at / "scheduler.bin", lambda it: it.update(_last_lr=[0.75])), "partly",
         "consistency"),
    ],
)  # fmt: skip
def test_what_accelerate_would_stop_at_is_told(accelerated, tmp_path, spoil, answer, why):
    found = verdict(spoiled(accelerated[0], tmp_path, spoil))
    assert found.answer == answer
    assert why in " ".join(found.why)


def test_a_place_in_the_data_is_taken_from_a_loader_or_from_the_script(accelerated, tmp_path):
    both = spoiled(accelerated[0], tmp_path, lambda at: again(at, "dl_state_dict.bin"))
    assert verdict(both).answer == "yes"
    shutil.copy(both / "random_states_0.pkl", both / "random_states_1.pkl")
    assert f"{DATA} of all ranks but one" in verdict(both).why
    again(both, "custom_checkpoint_1.pkl", batches_done=4)
    assert look(both).data == {"kept by the script itself": "batches_done"}
    assert verdict(both).answer == "yes"


def test_fsdp_of_accelerate_is_read_and_its_ranks_are_counted(accelerated, tmp_path):
    folder = spoiled(accelerated[0], tmp_path, lambda at: None)
    for name in ("model.safetensors", "optimizer.bin"):
        (folder / name).unlink()
    write_slices({"model": values(0)}, folder / "pytorch_model_fsdp_0")
    write_slices({"optimizer": optimizer()}, folder / "optimizer_0")
    slices = folder / "pytorch_model_fsdp_0"
    found = look(folder)
    assert (found.title, found.step) == ("accelerate's `save_state`, FSDP with sharded state", 7)
    assert set(shapes(found, MODEL).values()) == {(1, 4), (1,)}
    shutil.copy(slices / "__0_0.distcp", slices / "__2_0.distcp")
    assert "ranks without a random state" not in str(look(folder).problems), "a leftover"
    (slices / "__0_0.distcp").unlink()
    index = slices / ".metadata"
    index.write_bytes(index.read_bytes().replace(b"__0_0.distcp", b"__2_0.distcp"))
    assert "ranks without a random state: 1, 2" in str(look(folder).problems)
    (folder / "pytorch_model_fsdp_0/.metadata").unlink()
    assert verdict(folder).why[0].startswith("pytorch_model_fsdp_0/.metadata: it is missing")


@pytest.fixture(scope="module")
def lit(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lightning")
    return write_lightning(folder)


def test_a_file_of_lightning_is_what_torch_loads_for_it(lit):
    found, value = look(lit), torch.load(lit, weights_only=False)
    assert (found.layout, found.step, found.epoch) == ("lightning", 6, value["epoch"])
    weights = {name: tuple(one.shape) for name, one in value["state_dict"].items()}
    assert shapes(found, MODEL) == weights
    state = value["optimizer_states"][0]
    assert found.optimizer.step == int(state["state"][0]["step"]) == value["global_step"]
    assert found.optimizer.rates == (state["param_groups"][0]["lr"],)
    assert found.schedule.rates == tuple(value["lr_schedulers"][0]["_last_lr"])
    assert found.versions == {"lightning": value["pytorch-lightning_version"]}
    assert assess_resumability(found, "there").why == (RANDOM,)
    assert assess_resumability(found, "there").command == "trainer.fit(model, ckpt_path='there')"


def within(value):
    """Make of what was saved at the end of an epoch what is saved in its middle."""
    progress = value["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    progress["is_last_batch"] = False
    progress["current"]["completed"] = 2


def kept(value):
    within(value)
    value["loops"]["fit_loop"]["state_dict"] = {"combined_loader": [{"at": 2}]}


@pytest.mark.parametrize(
    ("change", "answer", "why"),
    [
        (lambda it: it.pop("optimizer_states"), "no", "save_weights_only"),
        (lambda it: it.pop("lr_schedulers"), "no", "lr_schedulers"),
        (lambda it: it.pop("state_dict"), "no", "no weights"),
        (lambda it: it.pop("loops"), "partly", f"{DATA} and the step"),
        (lambda it: it.update(optimizer_states=[]), "partly", "the optimizer's state"),
        (lambda it: it.update(lr_schedulers=[]), "partly", "the schedule"),
        (lambda it: it["loops"]["fit_loop"].pop("epoch_progress"), "partly", "the epoch"),
        (
            lambda it: it["loops"]["fit_loop"].pop("epoch_loop.batch_progress"),
            "partly",
            "the batch in the epoch",
        ),
        (lambda it: it.update(lr_schedulers=[{}]), "partly", "the schedule"),
        (lambda it: it.update(optimizer_states=[{}]), "no", "optimizer's state in it is invalid"),
        (lambda it: it.update(global_step=4), "partly", "consistency"),
        (within, "partly", DATA),
        (kept, "partly", RANDOM),
    ],
)
def test_what_lightning_would_stop_at_or_begin_anew_is_told(lit, tmp_path, change, answer, why):
    shutil.copy(lit, path := tmp_path / "some.ckpt")
    alter(path, lambda it: change(it) and None)
    found = verdict(path)
    assert found.answer == answer
    assert why in " ".join(found.why)
    assert (DATA in found.why) == (change is within)


def test_a_folder_of_lightning_has_what_is_not_sharded_in_one_file(lit, tmp_path):
    value = torch.load(lit, weights_only=False)
    value.pop("state_dict")
    held = optimizer()
    for one in held["state"].values():
        one["step"] = torch.tensor(6.0)
    sharded = {"model": values(0), "optimizer_0": held}
    write_slices(sharded, folder := tmp_path / "last.ckpt")
    value.pop("optimizer_states")
    torch.save(value, folder / "meta.pt")
    found = look(folder)
    assert (found.layout, found.step, found.world) == ("lightning", 6, 1)
    assert found.optimizer.step == 6
    assert assess_resumability(found, "there").why == (RANDOM,)
    torch.save([], folder / "meta.pt")
    assert verdict(folder).answer == "no"
    (folder / ".metadata").unlink()
    assert verdict(folder).why == (".metadata: it is missing",)


def side(path):
    folder = open_folder(str(path))
    return foreign.open_foreign(folder, folder.list(), look(path))


def test_both_can_be_compared_value_by_value(accelerated, lit):
    folder, _, _, optimizer, _ = accelerated
    ours = side(folder)
    assert set(ours.random) == {(0, "python"), (0, "numpy"), (0, "cpu")}
    assert ours.fields[SCHEDULE]["last_epoch"] == 3
    rates = [one["lr"] for one in optimizer.state_dict()["param_groups"]]
    assert [one for name, one in ours.fields[GROUPS].items() if name.endswith(".lr")] == rates
    state = torch.load(lit, weights_only=False)["optimizer_states"][0]
    held = [one for name, one in side(lit).fields[GROUPS].items() if name.endswith(".lr")]
    assert held == [one["lr"] for one in state["param_groups"]]
    assert (side(lit).fields[TRAINER]["epoch"], side(lit).notes) == (2, ())
