"""Random states that were lost, made again from what defines them: the seed and the step.

With canonical reduction all random numbers are seeded anew after the passes of each step, so where
nothing was drawn from then until the save, the state is a function of seed, step and the number of
micro-batches. Whether it is so for a lost file, nobody has to guess: the manifest has its digest.
Other runs draw on from step to step, and what they drew is nowhere else.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import torch

from resilient.errors import IntegrityError, KeyNotFound
from resilient.format.digest import digest_file
from resilient.format.names import rank_part_file
from resilient.opening import open_checkpointer
from resilient.state.arena import Arena
from resilient.state.capture import Part, capture
from resilient.state.rng import RandomState
from resilient.state.stage import stage
from resilient.train.data.sampling import seed_between_steps
from resilient.train.interop.exporting import read_parts
from resilient.world.world import World

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.format.manifest import Manifest
    from resilient.storage.store import Store

_PART = "rng_state"
_DEVICES_MAX = 17
"""Devices that one process sees, and none."""


class Derived:
    """A place of files that were made from something else, by their keys.

    Attributes:
        url: what from, for people.
    """

    def __init__(self, url: str, files: Mapping[str, bytes]) -> None:
        self.url = url
        self._files = files

    def get(self, key: str) -> bytes:
        """Return a file.

        Raises:
            KeyNotFound: it was not made.
        """
        try:
            return self._files[key]
        except KeyError as error:
            raise KeyNotFound(f"no `{key}` follows from {self.url}", key=key) from error

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return some bytes of a file.

        Raises:
            KeyNotFound: it was not made.
        """
        return self.get(key)[start : start + length]


def random_states_of(
    url: str, manifest: Manifest, *, storage_options: Mapping[str, Any] | None = None
) -> Store | None:
    """Return a place with the random states that seed and step define; None if they do not.

    What it holds is to be proved like any other copy. This process's own states are as before.

    Crash: reads only.

    Args:
        url: the repository.
        manifest: of the checkpoint.
        storage_options: how to reach the repository.
    """
    config, step = manifest.config, manifest.checkpoint.step
    batch, micro = (
        config.get(name) for name in ("global_train_batch_size", "per_device_train_batch_size")
    )
    if config.get("reduction") != "canonical" or not (batch and micro and step):
        return None
    seed = _seed(url, manifest, storage_options)
    before = RandomState().state_dict()
    try:
        seed_between_steps(seed, step - 1, int(batch) // int(micro))
        ranks = int(manifest.world["size"])
        files = {
            manifest.checkpoint.key(rank_part_file(_PART, one)): _file(manifest, step, one, ranks)
            for one in range(ranks)
        }
    finally:
        RandomState().load_state_dict(before)
    return cast("Store", Derived("the run's seed and step", files))


def _seed(url: str, manifest: Manifest, storage_options: Mapping[str, Any] | None) -> int:
    """Return the seed of the run; a part of the checkpoint outranks its arguments."""
    spine = open_checkpointer(url, storage_options=storage_options)
    try:
        with suppress(IntegrityError, KeyNotFound):
            return int(read_parts(spine, manifest, ["reduction"])["reduction"]["seed"])
    finally:
        spine.close()
    return int(manifest.config.get("seed", 42))


class _Seeded:
    """The random state of this process, and that of so many devices of CUDA seeded alike.

    A generator of CUDA is its seed and how far it was drawn, so no device is needed to say both.
    """

    def __init__(self, devices: int) -> None:
        self._devices = devices

    def state_dict(self) -> dict[str, Any]:
        """Return both."""
        state = RandomState().state_dict()
        if self._devices:
            data = struct.pack("<Qq", torch.initial_seed() & 0xFFFFFFFFFFFFFFFF, 0)
            one = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            state["cuda"] = [one.clone() for _ in range(self._devices)]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nobody loads it."""


def _file(manifest: Manifest, step: int, rank: int, ranks: int) -> bytes:
    """Return the file of a rank's random state as it is now in this process.

    How many devices a rank saw is said nowhere: it is the number with which it is as committed.
    """
    name = rank_part_file(_PART, rank)
    entry = next((one for one in manifest.files if one.name == name), None)
    made = [_bytes_of(name, step, World(rank, ranks), devices) for devices in range(_DEVICES_MAX)]
    fitting = [one for one in made if entry and digest_file(one) == entry.proof]
    return (fitting or made)[0]


def _bytes_of(name: str, step: int, world: World, devices: int) -> bytes:
    parts = {_PART: Part(_Seeded(devices), "rank")}
    staged = stage(capture(step, parts, world.rank), world, Arena())
    return next(bytes(one.data) for one in staged.files if one.name == name)
