"""Whatever is in a folder that another tool left, it is told what it is: no crash, no escape.

Each target is a small checkpoint of one layout. One of its files is spoiled: as bytes, as a value
of JSON, or inside a zip whose checksums are made right again, so that these are no shelter. Reading
never raises. ``--fuzz-runs`` says how often; ``make fuzz`` takes many.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import tracemalloc
from contextlib import suppress
from pathlib import Path
from random import Random

import numpy as np
import pytest
import safetensors.torch
import torch

from resilient.diff import foreign
from resilient.diff.foreign_verify import verify_foreign
from resilient.errors import KeyNotFound
from resilient.layouts.detect import read_layout
from resilient.layouts.resumability import assess_resumability
from resilient.storage.folder import DirectoryListing
from tests.helpers.foreign_folders import write_megatron, write_slices, write_titan, write_universal
from tests.helpers.mutations import spoiled_bytes, spoiled_value
from tests.helpers.resumming import recompute_sums
from tests.helpers.sharded_folders import optimizer, values, write_zero

PEAK_BYTES_MAX = 96 << 20
PROVED_EVERY, COMPARED_EVERY = 8, 16
FOLDERS_EACH = 20
"""Inputs of others for one of these, each of which is a whole folder."""
MEASURED = 100
"""Of how many inputs the memory is watched, which makes reading three times as slow."""
SCHEDULE = {"last_epoch": 7, "_step_count": 8, "_last_lr": [0.5, 0.5], "base_lrs": [0.5, 0.5]}
STATES = {"python": (3, (1, 2), None), "cpu": torch.arange(16, dtype=torch.uint8)}
OF_ACCELERATE = {"step": 7, "random_state": (3, (1, 2), None), "torch_manual_seed": STATES["cpu"]}
LOOPS = {"fit_loop": {"epoch_loop.batch_progress": {"is_last_batch": False,
                                                   "current": {"completed": 2}},
                      "state_dict": {}}}  # fmt: skip


class Held:
    """Files in memory as a folder, or as one file."""

    url = "memory://held"

    def __init__(self, files, *, is_file):
        self._files, self._is_file = files, is_file

    def list(self):
        sizes = {name: len(data) for name, data in self._files.items()}
        return DirectoryListing(sizes, is_file=self._is_file)

    def read(self, name, start, length):
        if name not in self._files:
            raise KeyNotFound(name, key=name)
        return self._files[name][start : start + length]


def trainer(folder):
    safetensors.torch.save_file(values(0), folder / "model.safetensors")
    torch.save(optimizer(), folder / "optimizer.pt")
    torch.save(SCHEDULE, folder / "scheduler.pt")
    drawn = {"python": Random(7).getstate(), "numpy": np.random.RandomState(7).get_state()}
    cpu = torch.Generator().manual_seed(7).get_state()
    torch.save({**drawn, "cpu": cpu}, folder / "rng_state.pth")
    state = {
        "global_step": 7,
        "train_batch_size": 4,
        "epoch": 0.5,
        "best_global_step": 7,
        "log_history": [{"step": 7}],
        "stateful_callbacks": {"TrainerControl": {"args": {}, "attributes": {}}},
    }
    state["best_model_checkpoint"] = "run/checkpoint-7"
    (folder / "trainer_state.json").write_text(json.dumps(state))


def accelerated(folder):
    safetensors.torch.save_file(values(0), folder / "model.safetensors")
    torch.save(optimizer(), folder / "optimizer.bin")
    torch.save(SCHEDULE, folder / "scheduler.bin")
    torch.save(OF_ACCELERATE, folder / "random_states_0.pkl")
    torch.save({"seen": 3, "held": torch.arange(3)}, folder / "custom_checkpoint_0.pkl")


def lightning(folder):
    value = {
        "pytorch-lightning_version": "2.6.6",
        "epoch": 1,
        "global_step": 7,
        "state_dict": values(0),
        "optimizer_states": [optimizer()],
        "lr_schedulers": [SCHEDULE],
        "loops": LOOPS,
        "callbacks": {"ModelCheckpoint{}": {"dirpath": "a", "best_model_path": "a/b.ckpt"}},
        "hyper_parameters": {"width": 4},
    }
    torch.save(value, folder / "last.ckpt")


def lightning_sharded(folder):
    write_slices({"model": values(0), "optimizer_0": optimizer()}, folder)
    rest = {"pytorch-lightning_version": "2.6.6", "global_step": 7, "lr_schedulers": [SCHEDULE]}
    torch.save({**rest, "loops": LOOPS}, folder / "meta.pt")


def engine(folder):
    for name in ("model.safetensors", "optimizer.pt"):
        (folder / name).touch()
    write_zero(folder, 2, 2)


def slices(folder):
    write_slices({"model": values(0), "optimizer": optimizer(), "epoch": 3}, folder)


def script(folder):
    state = {"model": values(0), "optimizer": optimizer(), "scheduler": SCHEDULE, "step": 7}
    torch.save(state, folder / "last.pt")


def old_script(folder):
    state = {"model": values(0), "optimizer": optimizer(), "step": 7}
    torch.save(state, folder / "last.pt", _use_new_zipfile_serialization=False)


def shards(folder):
    mapped = {}
    for number, (name, one) in enumerate(values(0).items()):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        safetensors.torch.save_file({name: one}, folder / file)
        mapped[name] = file
    index = {"metadata": {"total_size": 20}, "weight_map": mapped}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


TARGETS = {
    "hf-trainer": trainer,
    "accelerate": accelerated,
    "lightning": lightning,
    "lightning sharded": lightning_sharded,
    "deepspeed": engine,
    "deepspeed-universal": write_universal,
    "dcp": slices,
    "torchtitan": lambda folder: shutil.move(write_titan(folder), folder / "it"),
    "megatron": write_megatron,
    "torch": script,
    "torch legacy": old_script,
    "hf-model": shards,
}


def seed(name):
    """Return the files of one layout, and whether it is a file by itself."""
    with tempfile.TemporaryDirectory() as at:
        TARGETS[name](folder := Path(at))
        root = folder / "it" if (folder / "it").is_dir() else folder
        found = [one for one in sorted(root.rglob("*")) if one.is_file()]
        files = {str(one.relative_to(root)): one.read_bytes() for one in found}
    return files, name in ("lightning", "torch", "torch legacy")


def spoiled(random, files):
    """Return the files with one of them spoiled, gone, or in another's place."""
    name = random.choice(sorted(files))
    data, others = files[name], list(files.values())
    way = random.random()
    if way < 0.05:
        return {one: it for one, it in files.items() if one != name}
    if way < 0.1:
        return files | {name: random.choice(others)}
    if name.endswith(".json") and way < 0.6:
        with suppress(ValueError, RecursionError, AttributeError):
            return files | {name: json.dumps(spoiled_value(random, json.loads(data))).encode()}
    if data.startswith(b"PK") and way < 0.8:
        return files | {name: spoiled_inside(random, data)}
    return files | {name: spoiled_bytes(random, data, others)}


def spoiled_inside(random, data):
    """Change a few bytes of the pickles in a file; its checksums are right all the same."""
    found, at = bytearray(data), data.find(b"\x80\x02", data.find(b"data.pkl"))
    end = max(data.find(b"PK", at), at + 8)
    for _ in range(random.choice((1, 1, 2, 5))):
        found[random.randrange(at, min(end, len(found)))] = random.randrange(256)
    with suppress(Exception):  # a slice of it that looked like the end of a zip
        return recompute_sums(bytes(found))
    return bytes(found)


def read(files, number, *, is_file):
    folder = Held(files, is_file=is_file)
    listing = folder.list()
    contents = read_layout(folder, listing)
    if contents is None:
        return "unknown"
    if number % PROVED_EVERY == 0:
        verify_foreign(folder, listing, contents)
    if number % COMPARED_EVERY == 0:
        foreign.open_foreign(folder, listing, contents)
    return assess_resumability(contents, folder.url).answer


@pytest.mark.parametrize("name", TARGETS)
def test_every_layout_is_known_when_it_is_whole(name):
    files, is_file = seed(name)
    folder = Held(files, is_file=is_file)
    assert read_layout(folder, folder.list()).layout == name.partition(" ")[0]
    assert read(files, 0, is_file=is_file) in ("yes", "partly") or name == "hf-model"


@pytest.mark.parametrize("name", TARGETS)
def test_spoiled_files_are_told_and_nothing_raises(name, request, record_property):
    files, is_file = seed(name)
    runs = -(-request.config.getoption("--fuzz-runs") // FOLDERS_EACH)
    begin = request.config.getoption("--fuzz-seed")
    answers, peak = [], 0
    tracemalloc.start(1)
    try:
        for number in range(begin, begin + runs):
            changed = spoiled(Random(f"{name}/{number}"), files)
            if number - begin == MEASURED:
                tracemalloc.stop()
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                answers.append(read(changed, number, is_file=is_file))
            except BaseException as error:
                raise AssertionError(f"{name}: --fuzz-seed {number}, first") from error
            peak = max(peak, tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    record_property("fuzz_runs", runs)
    assert 0 < peak <= PEAK_BYTES_MAX
    assert "no" in answers
