"""What is said of universal checkpoints, torchtitan's and Megatron's is what they hold."""

from __future__ import annotations

import json
import shutil
import struct
import warnings
from collections import Counter

import pytest
import torch
import torch.distributed.checkpoint as dcp

from resilient.layouts.model import MODEL, OPTIMIZER, OTHER
from resilient.layouts.resumability import assess_resumability
from resilient.layouts.torch_zip import resolve_pieces
from resilient.storage.folder import open_folder
from tests.helpers.foreign_folders import (
    NAMES,
    STEP,
    UNIVERSAL,
    alter,
    look,
    shapes,
    verdict,
    write_megatron,
    write_slices,
    write_titan,
    write_universal,
)

DATA, RANDOM = "the place in the data", "the random state"


def values_of(folder, contents):
    """Return the numbers where each tensor is said to be, by what DeepSpeed calls its file."""
    place, found = open_folder(str(folder)), {}
    for one in contents.tensors:
        piece = resolve_pieces(place, place.list(), one.pieces[0], one.dtype)
        data = place.read(piece.file, piece.start + 4 * piece.first, one.size_bytes)
        name, kind = one.name, "fp32"
        if one.part == OPTIMIZER:
            name, _, kind = one.name.removeprefix("state.").rpartition(".")
        found[f"{name}/{kind}"] = list(struct.unpack(f"<{one.elements}f", data))
    steps = folder.glob("zero/*/step.pt")
    return found | {f"{one.parent.name}/step": [float(contents.step)] for one in steps}


@pytest.mark.parametrize("stage", [2, 3])
def test_a_universal_checkpoint_is_what_torch_loads_of_its_files(tmp_path, stage):
    folder = write_universal(tmp_path, stage)
    told = json.loads((UNIVERSAL / f"zero{stage}.json").read_text())
    found = look(folder)
    assert (found.layout, found.step) == ("deepspeed-universal", told["step"])
    named = {name: tuple(one) for name, one in told["shapes"].items()}
    assert shapes(found, MODEL) == named
    kinds = ("exp_avg", "exp_avg_sq")
    moments = {f"state.{name}.{kind}": it for name, it in named.items() for kind in kinds}
    assert shapes(found, OPTIMIZER) == moments
    assert found.optimizer.rates == tuple(told["rates"])
    assert found.schedule.step == told["schedule"]
    assert found.optimizer.step == (told["step"] if stage == 2 else None)
    assert found.versions == {"deepspeed": told["version"]}
    assert values_of(folder, found) == told["values"]
    assert assess_resumability(found, "there").why == (RANDOM,)
    assert look(tmp_path).tensors[0].files[0].startswith("global_step3/zero/")


def moved(value):
    value["param"] = torch.zeros(1, 7)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda at: (at / "zero/0.bias/exp_avg.pt").unlink(), "exp_avg.pt: it is missing"),
        (lambda at: (at / "zero/0.bias/fp32.pt").unlink(), "fp32.pt: it is missing"),
        (lambda at: shutil.rmtree(at / "zero/0.bias"), "zero/0.bias: the parameter is missing"),
        (lambda at: (at / "zero/0.bias/fp32.pt").write_bytes(b"x" * 70), "not a file of torch"),
        (lambda at: (at / "zero/optimizer_state.pt").unlink(), "optimizer_state.pt"),
        (lambda at: next(at.glob("*model_states.pt")).unlink(), "model states are missing"),
        (
            lambda at: alter(at / "zero/0.bias/fp32.pt", moved),
            "7 elements, but the parameter has 2",
        ),
        (lambda at: torch.save([], at / "zero/0.bias/fp32.pt"), "holds no tensor"),
        (
            lambda at: torch.save(
                {"module": {"w": torch.ones(1)}, "param_shapes": {"w": "x"}},
                at / "mp_rank_00_model_states.pt",
            ),
            "an invalid shape",
        ),
    ],
)
def test_what_deepspeed_would_miss_in_a_universal_checkpoint_is_told(tmp_path, spoil, why):
    folder = write_universal(tmp_path)
    spoil(folder)
    found = verdict(folder)
    assert found.answer == "no"
    assert why in " ".join(found.why)


def test_a_universal_checkpoint_of_mixed_steps_or_moved_is_told(tmp_path):
    folder = write_universal(tmp_path)
    torch.save(torch.tensor(2.0), folder / "zero/0.bias/step.pt")
    assert "different steps, 2 and 3" in str(look(folder).problems)
    for one in (folder / "zero").glob("*/step.pt"):
        torch.save(torch.tensor(8.0), one)
    assert "made 8 updates by step 3" in str(look(folder).problems)
    (tmp_path / "latest_universal").write_text("global_step4")
    assert "names `global_step4`, which does not exist" in str(verdict(tmp_path).why)


def test_a_step_of_torchtitan_is_what_torch_reads(tmp_path):
    folder = write_titan(tmp_path)
    found = look(folder)
    theirs = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {name: tuple(one.size) for name, one in theirs.items() if hasattr(one, "size")}
    assert {one.name: one.shape for one in found.tensors} == tensors
    assert shapes(found, MODEL) == NAMES
    assert Counter(one.part for one in found.tensors) == {MODEL: 2, OPTIMIZER: 6, OTHER: 2}
    assert (found.layout, found.step) == ("torchtitan", STEP)
    assert (found.optimizer.step, found.schedule.step) == (STEP, STEP)
    assert found.schedule.rates == (0.25,)
    assert found.data == {"loaders": 2, "tokens": 4096}
    assert assess_resumability(found, "there").why == (RANDOM,)


def rewritten(folder, change):
    """Load what a folder holds, change it and save it as the same folder."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(folder, whole := folder.parent / "whole.pt")
    state = torch.load(whole, weights_only=False)
    change(state)
    for one in (folder / ".metadata", *folder.glob("*.distcp")):
        one.unlink()
    write_slices(state, folder)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda it: it["dataloader"].pop("dp_rank_1"), DATA),
        (lambda it: it.pop("dataloader"), DATA),
        (lambda it: it.pop("lr_scheduler"), "the schedule"),
        (lambda it: it["train_state"].update(step=torch.tensor(4)), "the consistency of its files"),
    ],
)
def test_what_torchtitan_would_begin_anew_is_told(tmp_path, change, why):
    folder = write_titan(tmp_path)
    rewritten(folder, change)
    assert verdict(folder).why == (why, RANDOM)


def test_an_iteration_of_megatron_is_what_torch_reads(tmp_path):
    folder = write_megatron(tmp_path)
    found = look(folder)
    theirs = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {name: tuple(one.size) for name, one in theirs.items() if hasattr(one, "size")}
    assert {one.name: one.shape for one in found.tensors} == tensors
    assert Counter(one.part for one in found.tensors) == {MODEL: 1, OPTIMIZER: 2}
    assert (found.layout, found.step, found.world) == ("megatron", STEP, 2)
    assert found.optimizer.slots == ("exp_avg", "fp32_param")
    assert (found.optimizer.step, found.optimizer.rates) == (STEP, (0.25,))
    assert (found.data, found.rng.ranks) == ({"samples": 72}, (0, 1))
    assert verdict(folder).answer == verdict(tmp_path).answer == "yes"
    assert verdict(tmp_path).command == f"pretrain_gpt.py --load {tmp_path}"


@pytest.mark.parametrize(
    ("spoil", "answer", "why"),
    [
        (lambda at: (at / "common.pt").unlink(), "no", "common.pt: it is missing"),
        (lambda at: torch.save([], at / "common.pt"), "no", "holds no state"),
        (lambda at: (at / "metadata.json").unlink(), "no", "metadata.json: it is missing"),
        (lambda at: (at / ".metadata").unlink(), "no", ".metadata: it is missing"),
        (lambda at: (at / "metadata.json").write_text('{"sharded_backend": "zarr"}'), "no", "zarr"),
        (lambda at: alter(at / "common.pt", lambda it: it.update(iteration=4)), "partly", "files"),
        (lambda at: alter(at / "common.pt", lambda it: it.pop("args") and None), "partly", DATA),
        (lambda at: alter(at / "common.pt", lambda it: it.pop("opt_param_scheduler") and None),
         "partly", "the schedule"),
        (lambda at: rewritten(at, lambda it: [it.pop(key) for key in list(it) if "rng" in key]),
         "partly", RANDOM),
    ],
)  # fmt: skip
def test_what_megatron_would_miss_is_told(tmp_path, spoil, answer, why):
    folder = write_megatron(tmp_path)
    spoil(folder)
    found = verdict(folder)
    assert found.answer == answer
    assert why in " ".join(found.why)


def test_a_tracker_of_megatron_that_names_nothing_is_told(tmp_path):
    write_megatron(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12")
    found = verdict(tmp_path)
    assert found.why[0].endswith("it names `iter_0000012/`, which does not exist")
    assert found.command == f"resilient ckpt inspect {tmp_path}/iter_0000009"


def test_newer_megatron_keeps_in_the_index_what_is_common(tmp_path):
    folder = write_megatron(tmp_path)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    (folder / "common.pt").unlink()
    assert "newer releases store it in the index" in str(look(folder).problems)
