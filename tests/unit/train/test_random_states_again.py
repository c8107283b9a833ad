"""A lost random state is made again where seed and step define it, and proved; else it is told."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from resilient.checkpoint.catalog import committed, read_manifest
from resilient.errors import KeyNotFound
from resilient.format.keys import CheckpointId
from resilient.state_dict.rng_state import RandomState
from resilient.state_dict.snapshot import Part
from resilient.storage.local import LocalStore
from resilient.train.arguments import TrainingArguments
from resilient.train.callbacks.base import TrainerCallback
from resilient.train.data.sampler import seed_between_steps
from resilient.train.hf_interop.rebuild import random_states_of
from resilient.train.trainer import Trainer
from resilient_cli.app import main
from tests.helpers.manifests import Values, begin, save
from tests.unit.train.models import Noisy

CANONICAL = {"reduction": "canonical", "global_train_batch_size": 12}


class Net(nn.Module):
    """A classifier that draws random numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 3))

    def forward(self, x, labels):
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Draws(TrainerCallback):
    """Draws between steps, so that seed and step do not define what is saved."""

    def on_step_end(self, args, state, control, **kwargs):
        torch.rand(1)


def train(folder, callbacks=(), **options):
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        max_steps=4,
        save_steps=2,
        seed=11,
        disable_tqdm=True,
        use_cpu=True,
        log_level="error",
        **options,
    )
    Trainer(Net(), arguments, train_dataset=Noisy(50), callbacks=callbacks).train()
    return committed(LocalStore(folder))


def test_with_canonical_reduction_each_is_rebuilt_bit_for_bit(tmp_path, capsys):
    found = train(tmp_path, **CANONICAL)
    assert len(found) == 2
    for checkpoint in found:
        file = tmp_path / checkpoint.key("rng_state_0.safetensors")
        whole = file.read_bytes()
        file.unlink()
        before = torch.get_rng_state()
        assert main(["ckpt", "repair", str(checkpoint), str(tmp_path), "--apply", "--json"]) == 0
        assert torch.equal(torch.get_rng_state(), before)
        (fix,) = json.loads(capsys.readouterr().out)["fixes"]
        assert fix["source"] == "the run's seed and step"
        assert file.read_bytes() == whole


def test_each_rank_has_its_own_file_and_the_seed_of_the_checkpoint_counts(tmp_path):
    """The arguments name another seed than the part does that the run goes by."""
    store = LocalStore(tmp_path)
    begin(store)
    seed_between_steps(7, 2, 6)
    parts = {
        "rng_state": Part(RandomState(), "rank"),
        "reduction": Part(Values(seed=7, digest="", machine="")),
    }
    config = {"seed": 8, "global_train_batch_size": 12, "per_device_train_batch_size": 2}
    config["reduction"] = "canonical"
    world = {"size": 3, "strategy": "ddp"}
    newest = CheckpointId(1, 3)
    checkpoint = save(store, newest, ranks=3, parts=parts, config=config, world=world)
    made = random_states_of(str(tmp_path), read_manifest(store, checkpoint))
    for rank in range(3):
        key = checkpoint.key(f"rng_state_{rank}.safetensors")
        assert made.get(key) == store.get(key), rank
    with pytest.raises(KeyNotFound, match="follows from the run's seed and step"):
        made.get(checkpoint.manifest_key)


class OnDevices(RandomState):
    """As a run on two GPUs saves it: each generator is its seed, and how far it was drawn."""

    def __init__(self, seed, drawn):
        data = seed.to_bytes(8, "little") + drawn.to_bytes(8, "little")
        self.device = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def state_dict(self):
        return super().state_dict() | {"cuda": [self.device, self.device.clone()]}


@pytest.mark.parametrize("drawn", [0, 4])
def test_states_of_cuda_come_back_with_it_where_nothing_was_drawn_there(tmp_path, drawn):
    begin(store := LocalStore(tmp_path))
    seed_between_steps(7, 2, 6)
    part = Part(OnDevices(torch.initial_seed(), drawn), "rank")
    parts = {"rng_state": part, "reduction": Part(Values(seed=7, digest="", machine=""))}
    config = {"global_train_batch_size": 12, "per_device_train_batch_size": 2}
    config["reduction"] = "canonical"
    world = {"size": 1, "strategy": "ddp"}
    checkpoint = save(store, CheckpointId(1, 3), parts=parts, config=config, world=world)
    made = random_states_of(str(tmp_path), read_manifest(store, checkpoint))
    key = checkpoint.key("rng_state_0.safetensors")
    assert (made.get(key) == store.get(key)) == (not drawn)


@pytest.mark.parametrize(
    ("options", "callbacks"), [({}, ()), (CANONICAL, (Draws(),))], ids=["plain", "drawn"]
)
def test_where_other_numbers_were_drawn_it_is_lost_and_that_is_told(
    tmp_path, capsys, options, callbacks
):
    newest = train(tmp_path, callbacks, **options)[0]
    (tmp_path / newest.key("rng_state_0.safetensors")).unlink()
    assert main(["ckpt", "repair", str(newest), str(tmp_path), "--apply"]) == 1
    told = capsys.readouterr().out
    assert "cannot be computed from seed and step" in told
    assert "Training can resume from" in told
    assert not (tmp_path / newest.key("rng_state_0.safetensors")).exists()
