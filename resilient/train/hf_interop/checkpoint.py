"""Checkpoint folder of Hugging Face's Trainer (5.x), verified as far as its files allow.

The folder has no digests. This module therefore verifies the checksums inside torch's files, the
sizes in safetensors headers, and numbers that several files share. Pickled files are loaded only as
data, without executing code (:mod:`resilient.train.hf_interop.readers`). ``training_args.bin``
contains pickled objects. Only its plain values are read, and no object is created.

Weights and optimizer state may be in separate files, in unsharded files of FSDP, or in a DeepSpeed
folder. With FSDP's ``SHARDED_STATE_DICT`` they are in torch's distributed checkpoints.
"""

from __future__ import annotations

import hashlib
import re
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from resilient.errors import (
    IncompatibleCheckpoint,
    IntegrityError,
    KeyNotFound,
    NothingToResume,
    StoreError,
)
from resilient.layouts.hf_trainer import read_arguments
from resilient.layouts.run_options import plain_arguments
from resilient.layouts.weights import adapter_files, is_adapter_file
from resilient.redaction import shell_quote
from resilient.train.hf_interop.readers import (
    ZeroFolder,
    load_torch,
    nested,
    read_dcp,
    unpack,
    with_groups,
)
from resilient.train.hf_interop.source_folder import SourceFolder

if TYPE_CHECKING:
    from collections.abc import Mapping

STATE = "trainer_state.json"
WEIGHTS = "model.safetensors"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
DEFAULT_ADAPTER = "default"
"""Adapter that PEFT saves in the checkpoint itself; other adapters have a subfolder."""
INDEX = "model.safetensors.index.json"
OPTIMIZER = "optimizer.pt"
SCHEDULER = "scheduler.pt"
SCALER = "scaler.pt"
# Scaler of our run on a CPU: Transformers has none there and fails on such a file.
SCALER_OF_CPU = "scaler_of_cpu.pt"
CONFIG = "config.json"
UNFINISHED = "checkpoint-is-incomplete.txt"

_RANDOM = re.compile(r"rng_state_(\d+)\.pth")
LAST = re.compile(r"checkpoint-(\d+)")
_BIN, _BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_ADAPTER_BIN = "adapter_model.bin"
_WEIGHTS = (WEIGHTS, _BIN, ADAPTER_WEIGHTS, _ADAPTER_BIN, INDEX, _BIN_INDEX)
"""Weight files in the order in which Transformers looks for them."""
# Names under which FSDP and DeepSpeed save their state, with any trainer.
_SHARDED_MODEL, _SHARDED_OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
_WHOLE_MODEL, _WHOLE_OPTIMIZER = "pytorch_model_fsdp.bin", "optimizer.bin"
_OPTIMIZERS = (OPTIMIZER, _WHOLE_OPTIMIZER)
_ENGINE_TAG = "latest"


def is_transformers_folder(path: str | Path) -> bool:
    """Return whether ``path`` is a folder saved by Hugging Face's Trainer, and not by ours."""
    folder = Path(path)
    return (folder / STATE).is_file() and not (folder / "manifest.json").exists()


class TransformersFiles:
    """Files of one checkpoint folder, each verified when it is read.

    Args:
        folder: ``checkpoint-<step>``, under any name.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.source = SourceFolder(folder)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the model, or only of its adapters, from one or several files.

        The names of an adapter in a subfolder begin with the name of this folder and a ``/``.

        Raises:
            IncompatibleCheckpoint: The folder has no weights in a readable form.
            IntegrityError: A file is damaged, or a file named in the index is missing.
        """
        if self.engine is not None:
            return self.engine.weights()
        name = next((weight for weight in _WEIGHTS if self.source.has(weight)), "")
        if name.endswith(".index.json"):
            return self._indexed(name)
        adapters = adapter_files(self.source.listing.sizes)
        if adapters and (is_adapter_file(name) if name else not self._is_fsdp):
            return {
                f"{folder}{key}": tensor
                for folder, file in sorted(adapters.items())
                for key, tensor in self._tensors(file).items()
            }
        return self._tensors(name) if name else self._read_fsdp()

    @property
    def _is_fsdp(self) -> bool:
        return self.source.has_folder(_SHARDED_MODEL) or self.source.has(_WHOLE_MODEL)

    def _read_fsdp(self) -> dict[str, torch.Tensor]:
        """Return the tensors of a model as FSDP saved it."""
        if self.source.has_folder(_SHARDED_MODEL):
            return self._distributed(_SHARDED_MODEL, "model")
        if self.source.has(_WHOLE_MODEL):
            return self._tensors(_WHOLE_MODEL)
        raise IncompatibleCheckpoint(
            f"`{self.folder}` holds no weights: neither {', '.join(_WEIGHTS)} nor "
            f"{_SHARDED_MODEL} or {_WHOLE_MODEL}",
            hint=f"resilient ckpt inspect {shell_quote(str(self.folder))}",
        )

    def _indexed(self, index: str) -> dict[str, torch.Tensor]:
        """Return the tensors of a model in several files, as Transformers reads them.

        A tensor that the index does not name is still taken from its file.
        """
        places = self.document(index).get("weight_map")
        if not isinstance(places, dict) or not all(
            isinstance(place, str) for place in places.values()
        ):
            raise IntegrityError(
                f"`{self.folder / index}` has no `weight_map` of names",
                key=str(self.folder / index),
                hint=f"resilient ckpt repair {shell_quote(str(self.folder))}",
            )
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(set(places.values())):
            tensors |= self._tensors(file)
        if missing_tensors := sorted(set(places) - set(tensors)):
            raise IntegrityError(
                f"{index} names {missing_tensors[:3]}, which are in no file",
                key=str(self.folder / index),
                hint=f"resilient ckpt repair {shell_quote(str(self.folder))}",
            )
        return tensors

    def optimizer(self) -> dict[str, Any]:
        """Return the optimizer's state in the form of ``torch.optim``: by position, or by name.

        Raises:
            IncompatibleCheckpoint: There is no optimizer, because only the model was saved.
            IntegrityError: A file is damaged.
        """
        if self.engine is not None:
            return self.engine.optimizer()
        if self.source.has_folder(_SHARDED_OPTIMIZER):
            return with_groups(self._distributed(_SHARDED_OPTIMIZER, "optimizer"))
        name = next((optimizer for optimizer in _OPTIMIZERS if self.source.has(optimizer)), None)
        if name is None:
            raise IncompatibleCheckpoint(
                f"`{self.folder}` holds no {OPTIMIZER}, {_WHOLE_OPTIMIZER}, {_SHARDED_OPTIMIZER} "
                "or state of DeepSpeed: a resume would start the optimizer again",
                hint="load the weights with from_pretrained and start a new run from them",
            )
        state: dict[str, Any] = self.load(name)
        return state

    def scaler(self) -> dict[str, Any] | None:
        """Return the gradient scaler's state; None without fp16."""
        scaler_files = [name for name in (SCALER, SCALER_OF_CPU) if self.source.has(name)]
        return self.load(scaler_files[0]) if scaler_files else None

    def random_state(self, rank: int) -> dict[str, Any] | None:
        """Return the random state of a rank in our form; None if none was saved."""
        names = [f"rng_state_{rank}.pth"]
        if rank == 0:
            # A single process saves without a number; a numbered file beside it is a leftover.
            names.insert(0 if self.ranks_known == 1 else 1, "rng_state.pth")
        name = next((candidate for candidate in names if self.source.has(candidate)), None)
        if name is None:
            return None
        random_state = self.load(name)
        kind, key, position, has_gauss, gauss = random_state["numpy"]
        state = {
            "python": random_state["python"],
            "numpy": {
                "bit_generator": kind,
                "state": {"key": key, "pos": position},
                "has_gauss": has_gauss,
                "gauss": gauss,
            },
            "cpu": random_state["cpu"],
        }
        if "cuda" in random_state:
            cuda = random_state["cuda"]
            state["cuda"] = [cuda] if isinstance(cuda, torch.Tensor) else list(cuda)
        return state

    def document(self, name: str) -> Any:
        """Return a JSON file of the folder.

        Raises:
            IntegrityError: The file is not valid JSON.
        """
        return self.source.document(name)

    def arguments(self) -> dict[str, Any]:
        """Return the plain values of the run's arguments; an empty dict if they cannot be read."""
        try:
            return plain_arguments(read_arguments(self.source.folder, self.source.listing))
        except StoreError:
            return {}

    def load(self, name: str) -> Any:
        """Return the data in a torch file after verifying its checksums.

        Raises:
            IntegrityError: The file is damaged, or holds objects that are not data.
        """
        with self.source.open(name) as file:
            return load_torch(file, str(self.folder / name))

    def known_step(self) -> int | None:
        """Return the number of finished steps of the trainer; None if unknown."""
        return None

    @property
    def ranks_known(self) -> int | None:
        """Number of training processes; None if only random states show it."""
        return None

    @property
    def has_progress(self) -> bool:
        """True if optimizer and schedule are both present; Transformers loads both or none."""
        if self.engine is not None:
            return True
        has_optimizer = self.source.has_folder(_SHARDED_OPTIMIZER) or any(
            self.source.has(optimizer) for optimizer in _OPTIMIZERS
        )
        return has_optimizer and self.source.has(SCHEDULER)

    @cached_property
    def engine(self) -> ZeroFolder | None:
        """DeepSpeed engine's part of the checkpoint, if DeepSpeed was used.

        Raises:
            IntegrityError: The engine's folder is damaged.
            IncompatibleCheckpoint: The layout of the engine's folder is unknown.
        """
        step = self.known_step()
        engine_tag = f"global_step{step}"
        if self.source.has(_ENGINE_TAG):
            engine_tag = self.source.line(_ENGINE_TAG)
        elif not self.source.has_folder(engine_tag):
            return None
        if Path(engine_tag).name != engine_tag or engine_tag == "..":
            tag = self.folder / _ENGINE_TAG
            raise IntegrityError(f"`{tag}` names no folder: {engine_tag!r}", key=str(tag))
        return ZeroFolder(self.source, engine_tag, step)

    @property
    def losses(self) -> tuple[str, ...]:
        """Parts of the checkpoint that are not imported, in words."""
        engine = self.engine
        scales = engine is not None and engine.has_loss_scale
        return ("the loss scale of DeepSpeed's fp16, which starts again",) if scales else ()

    def _distributed(self, name: str, root: str) -> dict[str, Any]:
        """Return the content of a distributed checkpoint below one name.

        Raises:
            IntegrityError: The checkpoint is damaged, or has no such name.
        """
        nested_state = nested(read_dcp(self.source, name))
        if not isinstance(nested_state.get(root), dict):
            raise IntegrityError(
                f"`{self.folder / name}` holds no `{root}`", key=str(self.folder / name)
            )
        state: dict[str, Any] = nested_state[root]
        return state

    def _tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Return the tensors of a safetensors or torch file."""
        if name.endswith(".safetensors"):
            return unpack(self.source.read(name), str(self.folder / name))
        tensors = self.load(name)
        if not isinstance(tensors, dict) or not all(isinstance(item, str) for item in tensors):
            raise IntegrityError(
                f"`{self.folder / name}` holds no tensors by name", key=str(self.folder / name)
            )
        return {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor)}


class TransformersCheckpoint(TransformersFiles):
    """One checkpoint folder; files are read and verified on demand.

    Args:
        folder: ``checkpoint-<step>``, under any name.

    Attributes:
        state: Content of ``trainer_state.json``.
        state_digest: SHA-256 of that file, in hex.
        world: Number of ranks, from files of the folder; None: count the random states.

    Raises:
        NothingToResume: The folder does not exist, or has no checkpoint.
        IntegrityError: The state is damaged, or the save never finished.
    """

    def __init__(self, folder: str | Path) -> None:
        text = f"`{folder}` holds no {STATE}: it is not a checkpoint of a Trainer"
        hint = f"resilient ckpt inspect {shell_quote(str(folder))}"
        try:
            super().__init__(folder)
        except KeyNotFound as error:
            raise NothingToResume(text, hint=hint) from error
        if not self.source.has(STATE):
            raise NothingToResume(text, hint=hint)
        if self.source.has(UNFINISHED):
            raise IntegrityError(
                f"`{folder}` was never finished: it still has {UNFINISHED}",
                key=str(self.folder / UNFINISHED),
                hint="take the checkpoint before it",
            )
        data = self.source.read(STATE)
        self.state_digest = hashlib.sha256(data).hexdigest()
        self.state = self.document(STATE)
        self.world: int | None = None
        self._require_fields()

    @cached_property
    def digest(self) -> str:
        """SHA-256 over names, sizes and contents of all files that an import reads, in hex."""
        return self.source.digest()

    @property
    def step(self) -> int:
        """Number of finished optimizer steps."""
        return int(self.state["global_step"])

    def known_step(self) -> int:
        """Return the trainer's number of finished steps."""
        return self.step

    @property
    def ranks_known(self) -> int | None:
        """Number of training processes; None if only random states show it."""
        return self.world

    @property
    def ranks(self) -> int:
        """Number of training processes; each of them saved its random state.

        Raises:
            IntegrityError: Random states are missing, and no other file shows the number of ranks.
        """
        if self.world:
            return self.world
        numbers = sorted(
            int(match[1])
            for name in self.source.names()
            if (match := _RANDOM.fullmatch(name)) is not None
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
            IncompatibleCheckpoint: There is no scheduler.
            IntegrityError: The file is damaged.
        """
        if not self.source.has(SCHEDULER):
            origin_text = ", as of a schedule of DeepSpeed's own" if self.engine is not None else ""
            raise IncompatibleCheckpoint(
                f"`{self.folder}` holds no {SCHEDULER}{origin_text}: a resume would start the "
                "schedule again",
                hint="remove the schedule from DeepSpeed's config, save once, and resume from that "
                "save",
            )
        state: dict[str, Any] = self.load(SCHEDULER)
        lambdas = state.get("lr_lambdas")
        if lambdas is not None:
            # Our schedules take their numbers from arguments, so there is nothing to restore.
            state["lr_lambdas"] = [None] * len(lambdas)
        return state

    def _require_fields(self) -> None:
        """Raise if the state lacks a field that every resume needs."""
        missing_fields = [name for name in ("global_step", "log_history") if name not in self.state]
        if missing_fields:
            raise IntegrityError(
                f"`{self.folder / STATE}` has no `{missing_fields[0]}`",
                key=str(self.folder / STATE),
                hint=f"resilient ckpt repair {shell_quote(str(self.folder))}",
            )


def adam_steps(optimizer: Mapping[str, Any]) -> set[int]:
    """Return the step counts of an optimizer's parameters."""
    steps = (value.get("step") for value in optimizer["state"].values())
    return {int(step) for step in steps if step is not None}
