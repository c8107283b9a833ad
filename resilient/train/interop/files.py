"""A checkpoint folder of Hugging Face's Trainer (5.x), proved as far as its files allow.

It has no digests, so what can be held against something is: the checksums inside torch's files,
the sizes in the header of safetensors, and the numbers that several files must agree on. Nothing
is unpickled but as data (:mod:`resilient.train.interop.archives`); ``training_args.bin``, which
nothing else could read, is left alone.

Weights and optimizer are in files of their own, in distributed checkpoints of torch (FSDP with
``SHARDED_STATE_DICT``), in whole files of FSDP, or in a folder of DeepSpeed's.
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from resilient.errors import IncompatibleCheckpoint, IntegrityError, NothingToResume
from resilient.showing import quoted
from resilient.train.interop.archives import load_torch, nested, with_groups
from resilient.train.interop.dcp import read_dcp
from resilient.train.interop.tensors import unpack
from resilient.train.interop.zero import ZeroFolder

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
# That of a run of ours on a CPU, where Transformers has none and fails at its file.
SCALER_OF_CPU = "scaler_of_cpu.pt"
CONFIG = "config.json"
UNFINISHED = "checkpoint-is-incomplete.txt"

_RANDOM = re.compile(r"rng_state_(\d+)\.pth")
LAST = re.compile(r"checkpoint-(\d+)")
# Where FSDP and DeepSpeed put their state, by whatever trainer they are used.
_SHARDED_MODEL, _SHARDED_OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
_WHOLE_MODEL, _WHOLE_OPTIMIZER = "pytorch_model_fsdp.bin", "optimizer.bin"
_OPTIMIZERS = (OPTIMIZER, _WHOLE_OPTIMIZER)
_ENGINE_TAG = "latest"


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
        if self.engine is not None:
            return self.engine.weights()
        for name in (WEIGHTS, ADAPTER_WEIGHTS):
            if (self.folder / name).exists():
                return self._tensors(name)
        if (self.folder / INDEX).exists():
            return self._indexed()
        return self._of_fsdp()

    def _of_fsdp(self) -> dict[str, torch.Tensor]:
        """Return the tensors of a model as FSDP saved it."""
        found: dict[str, torch.Tensor]
        if (self.folder / _SHARDED_MODEL).is_dir():
            found = self._distributed(_SHARDED_MODEL, "model")
        elif (self.folder / _WHOLE_MODEL).exists():
            found = self.load(_WHOLE_MODEL)
        else:
            raise IncompatibleCheckpoint(
                f"`{self.folder}` holds neither {WEIGHTS} nor {INDEX}, {_SHARDED_MODEL} or "
                f"{_WHOLE_MODEL}",
                hint="save with Transformers 5, or load with from_pretrained and save again",
            )
        return found

    def _indexed(self) -> dict[str, torch.Tensor]:
        """Return the tensors of a model that lies in several files."""
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
        """Return the optimizer's state, as ``torch.optim`` has it: by position, or by name.

        Raises:
            IncompatibleCheckpoint: there is none: only the model was saved.
            IntegrityError: it is damaged.
        """
        if self.engine is not None:
            return self.engine.optimizer()
        if (self.folder / _SHARDED_OPTIMIZER).is_dir():
            return with_groups(self._distributed(_SHARDED_OPTIMIZER, "optimizer"))
        name = next((one for one in _OPTIMIZERS if (self.folder / one).exists()), None)
        if name is None:
            raise IncompatibleCheckpoint(
                f"`{self.folder}` holds no {OPTIMIZER}, {_WHOLE_OPTIMIZER}, {_SHARDED_OPTIMIZER} "
                "or state of DeepSpeed's: going on would start the optimizer afresh",
                hint="load the weights with from_pretrained and begin a new run from them",
            )
        found: dict[str, Any] = self.load(name)
        return found

    def scaler(self) -> dict[str, Any] | None:
        """Return the gradient scaler's state, None without fp16."""
        there = [one for one in (SCALER, SCALER_OF_CPU) if (self.folder / one).exists()]
        return self.load(there[0]) if there else None

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
        return load_torch(self.folder / name, str(self.folder / name))

    def known_step(self) -> int | None:
        """Return the step that the trainer had made, None if it is not known."""
        return None

    @cached_property
    def engine(self) -> ZeroFolder | None:
        """What DeepSpeed's engine saved, if one trained.

        Raises:
            IntegrityError: it is damaged.
            IncompatibleCheckpoint: its layout is not known.
        """
        tag, step = self.folder / _ENGINE_TAG, self.known_step()
        named = f"global_step{step}"
        if tag.exists():
            named = tag.read_text("utf-8", "replace").strip()
        elif not (self.folder / named).is_dir():
            return None
        if Path(named).name != named or named == "..":
            raise IntegrityError(f"`{tag}` names no folder: {named!r}", key=str(tag))
        return ZeroFolder(self.folder / named, step)

    @property
    def losses(self) -> tuple[str, ...]:
        """What of it is not taken over, in words."""
        engine = self.engine
        scales = engine is not None and engine.has_loss_scale
        return ("the loss scale of DeepSpeed's fp16, which begins anew",) if scales else ()

    def _distributed(self, name: str, root: str) -> dict[str, Any]:
        """Return what a distributed checkpoint holds below one name.

        Raises:
            IntegrityError: it is damaged, or holds nothing of that name.
        """
        found = nested(read_dcp(self.folder / name))
        if not isinstance(found.get(root), dict):
            raise IntegrityError(
                f"`{self.folder / name}` holds no `{root}`", key=str(self.folder / name)
            )
        held: dict[str, Any] = found[root]
        return held

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
        what = f"`{folder}` holds no {STATE}: it is no checkpoint of a Trainer"
        if not file.is_file():
            raise NothingToResume(what, hint=f"resilient ckpt inspect {quoted(str(folder))}")
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

    def known_step(self) -> int:
        """Return the step that the trainer had made."""
        return self.step

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
            whose = ", as of a schedule of DeepSpeed's own" if self.engine is not None else ""
            raise IncompatibleCheckpoint(
                f"`{self.folder}` holds no {SCHEDULER}{whose}: going on would start the schedule "
                "afresh",
                hint="take the schedule out of DeepSpeed's config, save once, and take that",
            )
        found: dict[str, Any] = self.load(SCHEDULER)
        lambdas, last = found.get("lr_lambdas"), found.get("last_epoch", 0)
        # With fp16 some steps are skipped; a schedule never goes further than the steps.
        skips = any((self.folder / one).exists() for one in (SCALER, SCALER_OF_CPU))
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
