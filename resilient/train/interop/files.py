"""A checkpoint folder of Hugging Face's Trainer (5.x), proved as far as its files allow.

It has no digests, so what can be held against something is: the checksums inside torch's files,
the sizes in the header of safetensors, and the numbers that several files must agree on. Nothing
is unpickled but by ``torch.load(weights_only=True)``; ``training_args.bin``, which nothing else
could read, is left alone.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
import zipfile
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from resilient.errors import IncompatibleCheckpoint, IntegrityError, NothingToResume
from resilient.train.interop.tensors import unpack

if TYPE_CHECKING:
    from collections.abc import Mapping

STATE = "trainer_state.json"
WEIGHTS = "model.safetensors"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
INDEX = "model.safetensors.index.json"
OPTIMIZER = "optimizer.pt"
SCHEDULER = "scheduler.pt"
SCALER = "scaler.pt"
CONFIG = "config.json"
UNFINISHED = "checkpoint-is-incomplete.txt"

_RANDOM = re.compile(r"rng_state_(\d+)\.pth")
LAST = re.compile(r"checkpoint-(\d+)")
_SPOILED = (zipfile.BadZipFile, UnpicklingError)
# What a random state of NumPy is pickled with.
_ARRAYS = [
    np._core.multiarray._reconstruct,  # type: ignore[attr-defined]  # noqa: SLF001 - its pickled name
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
    codecs.encode,
]


def is_transformers_folder(path: str | Path) -> bool:
    """Say whether ``path`` is a folder that Hugging Face's Trainer saved, and none of ours."""
    folder = Path(path)
    return (folder / STATE).is_file() and not (folder / "manifest.json").exists()


class TransformersFiles:
    """The files of one checkpoint folder, each proved when it is read.

    Args:
        folder: ``checkpoint-<step>``, under any name.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the model, or only of its adapter, from one or several files.

        Raises:
            IncompatibleCheckpoint: it holds none that this can read.
            IntegrityError: a file is damaged, or one that the index names is missing.
        """
        if (self.folder / WEIGHTS).exists():
            return self._tensors(WEIGHTS)
        if (self.folder / ADAPTER_WEIGHTS).exists():
            return self._tensors(ADAPTER_WEIGHTS)
        if not (self.folder / INDEX).exists():
            raise IncompatibleCheckpoint(
                f"`{self.folder}` holds neither {WEIGHTS} nor {INDEX}",
                hint="save with Transformers 5, or load with from_pretrained and save again",
            )
        places = self.document(INDEX)["weight_map"]
        found: dict[str, torch.Tensor] = {}
        for file in sorted(set(places.values())):
            found |= self._tensors(file)
        if set(found) != set(places):
            differ = sorted(set(found) ^ set(places))
            raise IntegrityError(
                f"{INDEX} and the files that it names differ in {differ[:3]}",
                key=str(self.folder / INDEX),
            )
        return found

    def optimizer(self) -> dict[str, Any]:
        """Return the optimizer's state by position, as ``torch.optim`` has it.

        Raises:
            IncompatibleCheckpoint: there is none: only the model was saved.
            IntegrityError: it is damaged.
        """
        if not (self.folder / OPTIMIZER).exists():
            raise IncompatibleCheckpoint(
                f"`{self.folder}` holds no {OPTIMIZER}: going on would start the optimizer afresh",
                hint="load the weights with from_pretrained and begin a new run from them",
            )
        found: dict[str, Any] = self.load(OPTIMIZER)
        return found

    def scaler(self) -> dict[str, Any] | None:
        """Return the gradient scaler's state, None without fp16."""
        return self.load(SCALER) if (self.folder / SCALER).exists() else None

    def random_state(self, rank: int) -> dict[str, Any] | None:
        """Return the random state of a rank as ours has it; None if none was saved."""
        names = (f"rng_state_{rank}.pth", *(("rng_state.pth",) if rank == 0 else ()))
        name = next((one for one in names if (self.folder / one).exists()), None)
        if name is None:
            return None
        found = self.load(name)
        kind, key, position, has_gauss, gauss = found["numpy"]
        state = {
            "python": found["python"],
            "numpy": {
                "bit_generator": kind,
                "state": {"key": key, "pos": position},
                "has_gauss": has_gauss,
                "gauss": gauss,
            },
            "cpu": found["cpu"],
        }
        if "cuda" in found:
            cuda = found["cuda"]
            state["cuda"] = [cuda] if isinstance(cuda, torch.Tensor) else list(cuda)
        return state

    def document(self, name: str) -> Any:
        """Return a JSON file of the folder.

        Raises:
            IntegrityError: it is none.
        """
        return self._parse((self.folder / name).read_bytes(), name)

    def load(self, name: str) -> Any:
        """Return a file of torch's, its checksums proved, with nothing but data taken from it.

        Raises:
            IntegrityError: it is damaged, or holds what is no data.
        """
        file = self.folder / name
        try:
            with zipfile.ZipFile(file) as content:
                spoiled = content.testzip()
            if spoiled is None:
                with torch.serialization.safe_globals(_ARRAYS):
                    return torch.load(file, map_location="cpu", weights_only=True)
            trouble = f"the checksum of `{spoiled}` in it is wrong"
        except (*_SPOILED, RuntimeError, ValueError, EOFError, LookupError) as error:
            trouble = str(error).partition("\n")[0]
        raise IntegrityError(
            f"`{file}` cannot be read: {trouble}", key=str(file), hint="take another checkpoint"
        )

    def _tensors(self, name: str) -> dict[str, torch.Tensor]:
        file = self.folder / name
        try:
            return unpack(file.read_bytes(), str(file))
        except FileNotFoundError as error:
            raise IntegrityError(f"`{file}` is missing", key=str(file)) from error

    def _parse(self, data: bytes, name: str = STATE) -> Any:
        try:
            found = json.loads(data)
            if isinstance(found, dict):
                return found
            trouble = "no object"
        except (ValueError, RecursionError) as error:
            trouble = str(error)
        raise IntegrityError(
            f"`{self.folder / name}` is no JSON of a checkpoint: {trouble}",
            key=str(self.folder / name),
            hint="take another checkpoint",
        )


class TransformersCheckpoint(TransformersFiles):
    """One checkpoint folder; files are read and proved when they are asked for.

    Args:
        folder: ``checkpoint-<step>``, under any name.

    Attributes:
        state: what ``trainer_state.json`` says.
        digest: SHA-256 of that file, in hex; tells this checkpoint from any other.

    Raises:
        NothingToResume: there is no such folder, or it holds no checkpoint.
        IntegrityError: its state is damaged, or it was never finished.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        file = self.folder / STATE
        if not file.is_file():
            raise NothingToResume(f"`{folder}` holds no {STATE}: it is no checkpoint of a Trainer")
        if (self.folder / UNFINISHED).exists():
            raise IntegrityError(
                f"`{folder}` was never finished: it still has {UNFINISHED}",
                key=str(self.folder / UNFINISHED),
                hint="take the checkpoint before it",
            )
        data = file.read_bytes()
        self.digest = hashlib.sha256(data).hexdigest()
        self.state = self._parse(data)
        self._require_agreement()

    @property
    def step(self) -> int:
        """The optimizer steps that were made."""
        return int(self.state["global_step"])

    @property
    def ranks(self) -> int:
        """How many processes trained: each left its random state."""
        numbers = sorted(
            int(match[1])
            for one in self.folder.iterdir()
            if (match := _RANDOM.fullmatch(one.name)) is not None
        )
        if numbers != list(range(len(numbers))):
            raise IntegrityError(
                f"`{self.folder}` holds the random state of ranks {numbers}: some are missing",
                key=str(self.folder),
            )
        return max(1, len(numbers))

    def scheduler(self) -> dict[str, Any]:
        """Return the scheduler's state.

        Raises:
            IncompatibleCheckpoint: there is none.
            IntegrityError: it is damaged, or of another step.
        """
        if not (self.folder / SCHEDULER).exists():
            raise IncompatibleCheckpoint(
                f"`{self.folder}` holds no {SCHEDULER}: going on would start the schedule afresh"
            )
        found: dict[str, Any] = self.load(SCHEDULER)
        lambdas, last = found.get("lr_lambdas"), found.get("last_epoch", 0)
        # With fp16 some steps are skipped; a schedule never goes further than the steps.
        skips = (self.folder / SCALER).exists()
        if lambdas is not None and (last > self.step or (last < self.step and not skips)):
            raise IntegrityError(
                f"{SCHEDULER} is of step {last} and {STATE} of step {self.step}",
                key=str(self.folder / SCHEDULER),
                hint="the folder mixes two checkpoints: take another",
            )
        if lambdas is not None:
            # A schedule of ours has its numbers in its arguments, and none to take back.
            found["lr_lambdas"] = [None] * len(lambdas)
        return found

    def _require_agreement(self) -> None:
        """Raise if the state lacks what going on needs, or the folder's name says otherwise."""
        lacks = [one for one in ("global_step", "epoch", "log_history") if one not in self.state]
        if lacks:
            raise IntegrityError(
                f"`{self.folder / STATE}` has no `{lacks[0]}`", key=str(self.folder / STATE)
            )
        named = LAST.fullmatch(self.folder.name)
        if named and int(named[1]) != self.step:
            raise IntegrityError(
                f"`{self.folder}` holds the state of step {self.step}",
                key=str(self.folder / STATE),
                hint="the folder mixes two checkpoints, or was renamed: take another",
            )


def adam_steps(optimizer: Mapping[str, Any]) -> set[int]:
    """Return the numbers of steps that an optimizer's parameters have made."""
    found = (one.get("step") for one in optimizer["state"].values())
    return {int(one) for one in found if one is not None}
