"""Loads of one training state by all contenders, from page cache and from disk.

Each contender has two figures: ``cold`` with nothing in the page cache, ``warm`` with everything.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.harness import installed
from benchmarks.peers import saving
from benchmarks.peers.rounds import Contender, Figures, Maker, timed
from benchmarks.peers.trainers import Accelerated, Transformed
from resilient.checkpoint.restore.read import ReadRequest, read_wanted
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.clock import SystemClock
from resilient.engine_factory import open_engine
from resilient.events import Emitter
from resilient.state_dict.resharding import LoadPlan, load
from resilient.storage.open import open_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.peers.training import Training

READ_BYTES = 16 << 20


def makers(training: Training, folder: Path) -> dict[str, Maker]:
    """Return the makers of the contenders on this machine, by name; each one saves once."""

    def peer(save: Callable[[Path], object], load: Callable[[Path], object]) -> Maker:
        return lambda: saved(folder, save, load)

    found = {
        "raw": peer(partial(saving.raw, training), raw_of(training)),
        "ours": lambda: ours_of(training, folder / "ours"),
        "torch_save": peer(partial(saving.torch_save, training), partial(torch_load, training)),
        "dcp": peer(partial(saving.dcp_save, training), partial(dcp_load, training)),
    }
    if installed("safetensors"):
        found["safetensors"] = peer(
            partial(saving.safetensors, training), partial(safetensors_load, training)
        )
    if installed("accelerate"):
        found["accelerate"] = lambda: both(folder, Accelerated(training))
    if installed("transformers"):
        found["hf"] = lambda: both(folder, Transformed(training, folder))
    return found


def both(folder: Path, peer: Accelerated | Transformed) -> Contender:
    """Return a contender that saves and loads with a peer."""
    return saved(folder, peer.save, peer.load)


def saved(
    folder: Path, save: Callable[[Path], object], load: Callable[[Path], object]
) -> Contender:
    """Save once, and return a contender that loads the save from disk and then from page cache."""
    place = folder / f"saved-{len(list(folder.iterdir()))}"
    place.mkdir()
    save(place)
    saving.sync(place)
    return lambda _: cold_and_warm(place, partial(load, place))


def cold_and_warm(place: Path, load: Callable[[], object]) -> Figures:
    """Return the seconds of ``load`` with files outside the page cache, and with files in it.

    A reader that leaves nothing in the page cache has no advantage in the second case.
    """
    for path in place.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    return {"cold": timed(load), "warm": timed(load)}


def raw_of(training: Training) -> Callable[[Path], None]:
    """Return a function that reads one file in one stream into memory that was touched before."""
    memory = torch.ones(training.size_bytes, dtype=torch.uint8).numpy().data

    def load(place: Path) -> None:
        with (place / "raw").open("rb", buffering=0) as file:
            at = 0
            while came := file.readinto(memory[at : at + READ_BYTES]):
                at += came
        assert at == training.size_bytes

    return load


def ours_of(training: Training, folder: Path) -> Contender:
    """Load both parts as a resume does, and verify them in place."""
    checkpointer = open_engine(str(folder), emit=Emitter(SystemClock(), ()))
    parts = training.parts()
    checkpointer.resume(parts)
    checkpoint = checkpointer.save(1, parts, CheckpointInfo())
    checkpointer.close()
    store = open_store(str(folder))

    def load_all() -> None:
        landing = LoadPlan(parts, in_place=True)
        proved = read_wanted(store, checkpoint, ReadRequest(parts, places=landing.places))
        load(proved.manifest, proved.files, parts, 0, landing)

    return lambda _: cold_and_warm(folder, load_all)


def torch_load(training: Training, place: Path) -> None:
    """Load with ``torch.load`` and two calls of ``load_state_dict``."""
    state = torch.load(place / "state.pt", weights_only=True)
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])


def safetensors_load(training: Training, place: Path) -> None:
    """Load with safetensors' own reader, and copy into the live tensors."""
    from safetensors.torch import load_file

    loaded = load_file(place / "state.safetensors")
    for name, tensor in training.tensors().items():
        tensor.copy_(loaded[name])


def dcp_load(training: Training, place: Path) -> None:
    """Load with ``dcp.load``, which fills the live tensors in place."""
    dcp.load(dict(training.tensors()), checkpoint_id=place, no_dist=True)
