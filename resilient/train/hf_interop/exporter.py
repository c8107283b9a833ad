"""Export of checkpoints: as a folder for Transformers' Trainer, or as tensors by name.

The Trainer of Transformers can resume from the exported folder. This form requires a checkpoint
that the Trainer of this package has saved. The tensor form is safetensors, a file for
``torch.load``, or torch's DCP. Checkpoints of other tools can be exported in this form too.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from resilient.checkpoint.catalog import read_manifest
from resilient.checkpoint.refs import resolve
from resilient.checkpoint.signed_store import reading_signed
from resilient.checkpoint.signing import read_signing
from resilient.diff.safetensors_export import write_parts
from resilient.engine_factory import open_engine
from resilient.errors import ConfigError, IncompatibleCheckpoint
from resilient.format.keys import rank_part
from resilient.redaction import shell_quote
from resilient.state_dict.snapshot import Part
from resilient.state_dict.staging import to_safetensors
from resilient.storage.local import LocalStore
from resilient.storage.open import open_store
from resilient.train.data.sampler import BatchLayout
from resilient.train.hf_interop.checkpoint import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    DEFAULT_ADAPTER,
    OPTIMIZER,
    SCALER,
    SCALER_OF_CPU,
    SCHEDULER,
    STATE,
    WEIGHTS,
)
from resilient.train.model.artifacts import (
    ADAPTER,
    PROCESSING,
    SIDECAR_FILES,
    path_inside,
    write_sidecar_files,
)
from resilient.train.optimizers.builtin import is_decayed_name
from resilient.train.step_count import steps_after

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from resilient.checkpoint_engine import CheckpointEngine
    from resilient.diff.model import CheckpointView
    from resilient.format.keys import CheckpointId
    from resilient.format.manifest import Manifest

# Fields of Transformers' state (5.23), which rejects a file with any other.
_STATE = (
    *("best_global_step", "best_metric", "best_model_checkpoint", "epoch", "eval_steps"),
    *("global_step", "is_hyper_param_search", "is_local_process_zero", "is_world_process_zero"),
    *("log_history", "logging_steps", "max_steps", "num_input_tokens_seen", "num_train_epochs"),
    *("save_steps", "stateful_callbacks", "total_flos", "train_batch_size", "trial_name"),
    "trial_params",
)
_CONTROL = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate")
_GROUPS = 2
_BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs")


def weights(model: Mapping[str, Any], optimizer: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a model; a tensor with several names has its trained name."""
    trained_names = {name for group in optimizer["param_groups"] for name in group["params"]}
    names: dict[int, str] = {}
    for name, value in model.items():
        if isinstance(value, torch.Tensor) and (id(value) not in names or name in trained_names):
            names[id(value)] = name
    return {name: model[name] for name in names.values()}


def optimizer_by_position(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state by parameter position, in Transformers' two groups.

    Transformers has a group with weight decay and one without, even if one of them is empty.
    """
    groups = with_both(optimizer["param_groups"], optimizer["param_groups"], _empty_like)
    numbers: dict[str, int] = {}
    for group in groups:
        numbers |= {name: len(numbers) + nth for nth, name in enumerate(group["params"])}
    state = {numbers[name]: dict(value) for name, value in optimizer["state"].items()}
    renumbered = [
        {**own_group, "params": [numbers[name] for name in own_group["params"]]}
        for own_group in groups
    ]
    state_by_position = dict(sorted(state.items()))
    return {**optimizer, "state": state_by_position, "param_groups": renumbered}


def scheduler_by_group(
    scheduler: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a scheduler's state for Transformers' two groups."""
    return {
        name: with_both(value, groups, lambda group: group)
        if name in _BY_GROUP and isinstance(value, list) and len(value) == len(groups)
        else value
        for name, value in scheduler.items()
    }


def with_both(values: Sequence[Any], groups: Sequence[Mapping[str, Any]], other: Any) -> list[Any]:
    """Return a value for each of the two groups if only one of them has parameters."""
    if len(groups) != 1:
        return list(values)
    decayed = groups[0]["weight_decay"] > 0 or any(map(is_decayed_name, groups[0]["params"]))
    both = [values[0], other(values[0])]
    return both if decayed else both[::-1]


def _empty_like(group: Mapping[str, Any]) -> dict[str, Any]:
    return {**group, "params": []}


def random_state(native_state: Mapping[str, Any], *, is_alone: bool) -> dict[str, Any]:
    """Return a rank's random state in Transformers' form."""
    numpy = native_state["numpy"]
    exported = {
        "python": native_state["python"],
        "numpy": (
            numpy["bit_generator"],
            numpy["state"]["key"],
            numpy["state"]["pos"],
            numpy["has_gauss"],
            numpy["gauss"],
        ),
        "cpu": native_state["cpu"],
    }
    if "cuda" in native_state:
        exported["cuda"] = native_state["cuda"][0] if is_alone else list(native_state["cuda"])
    return exported


def trainer_state(
    native_state: Mapping[str, Any], callbacks: Mapping[str, Any], best: str | None
) -> dict[str, Any]:
    """Return the content of Transformers' ``trainer_state.json``.

    Args:
        native_state: Part ``trainer_state.json`` of a native checkpoint.
        callbacks: Our part ``callbacks``: the control flags, and states by name.
        best: Path of the best model's checkpoint, if it is present.
    """
    flags = callbacks.get("TrainerControl", {})
    control = {"args": {name: bool(flags.get(name)) for name in (*_CONTROL, "should_log")}}
    stateful: dict[str, Any] = {"TrainerControl": {**control, "attributes": {}}}
    for name, state in callbacks.items():
        if name != "TrainerControl":
            saved_state = native_state.get("stateful_callbacks", {}).get(name, {})
            stateful[name] = {"args": saved_state.get("args", {}), "attributes": dict(state)}
    fields = {name: native_state[name] for name in _STATE if name in native_state}
    return {**fields, "stateful_callbacks": stateful, "best_model_checkpoint": best}


def require_their_place(data: Mapping[str, Any], config: Mapping[str, Any], step: int) -> None:
    """Raise unless the step alone determines the data position, as Transformers assumes.

    Args:
        data: Position data of the manifest.
        config: Arguments of the run.
        step: Number of finished optimizer steps.

    Raises:
        IncompatibleCheckpoint: The batch size or the number of ranks changed in between, or an
            epoch was cut short. Also if the current epoch's order is not the order of Transformers.
    """
    if "global_batch" not in data:
        return  # unchanged since the import from Transformers
    accumulation = int(config.get("gradient_accumulation_steps", 1))
    batch_size = int(data["global_batch"]) // accumulation
    drops_last = bool(config.get("dataloader_drop_last"))
    per_epoch = steps_after(
        BatchLayout(data["dataset_size"], batch_size, 1, drops_last), 0, accumulation
    )
    steps_in_epoch = steps_after(BatchLayout(data["samples"], batch_size, 1), 0, accumulation)
    if data["epoch"] * per_epoch + steps_in_epoch != step:
        raise IncompatibleCheckpoint(
            f"Transformers would continue at another data position: it counts {per_epoch} steps "
            f"per epoch, so that step {step} is not sample {data['samples']} of epoch "
            f"{data['epoch']}",
            hint="export a checkpoint from before the change of the batch size, the number of "
            "processes or the length of an epoch, or continue here",
        )
    # In the first epoch Transformers draws from the seed like our run with its random numbers.
    is_alike = data["epoch"] == 0 and config.get("random_numbers") == "transformers"
    if 0 < data["samples"] < data["dataset_size"] and not is_alike and _groups(config):
        raise IncompatibleCheckpoint(
            "Transformers draws the order of an epoch again when it resumes with samples grouped "
            f"by length: in the middle of epoch {data['epoch']} it would skip some samples and "
            "repeat others",
            hint="export a checkpoint from the end of an epoch, or continue here",
        )


def _groups(config: Mapping[str, Any]) -> bool:
    return config.get("train_sampling_strategy") == "group_by_length"


_NEEDED = ("model", "optimizer", "scheduler", "trainer_state", "callbacks")


@dataclass(slots=True)
class CapturedState:
    """Stateful that captures a part's state."""

    state: Mapping[str, Any] = field(default_factory=dict)

    def state_dict(self) -> Mapping[str, Any]:
        """Return the captured state."""
        return self.state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Capture the state."""
        self.state = state_dict


def export_checkpoint(
    url: str,
    folder: str | os.PathLike[str],
    ref: str = "latest",
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> CheckpointId:
    """Write a checkpoint in the form of Transformers' Trainer, for ``resume_from_checkpoint``.

    Every byte is verified before it is written, and the folder appears only when complete. State
    that another trainer cannot use (loss sums, parts that you registered) is not exported.

    Crash: leaves a folder ``.<name>.partial`` beside the target; the repository is only read.

    Args:
        url: URL of the repository.
        folder: Target folder, best ``.../checkpoint-<step>``; it must not exist.
        ref: Checkpoint reference, as for ``resilient ckpt``.
        storage_options: Access options of the repository; by default those of the environment.

    Returns:
        The exported checkpoint.

    Raises:
        ConfigError: The folder exists.
        IncompatibleCheckpoint: Our Trainer did not save the checkpoint, or the step does not
            determine the run's position in the data.
        IntegrityError: The checkpoint is damaged.
        SignatureRefused: ``RESILIENT_REQUIRE_SIGNATURE`` is set, and the key has not signed it.
    """
    target = Path(folder)
    if target.exists():
        raise ConfigError(f"`{target}` exists already", hint=f"ls -l {shell_quote(target)}")
    signing = read_signing(os.environ)
    store = reading_signed(open_store(url, storage_options=storage_options or {}), signing)
    checkpoint = resolve(store, ref)
    manifest = read_manifest(store, checkpoint)
    parts = _read(url, manifest, storage_options)
    _write(target, manifest, parts)
    return checkpoint


def _read(
    url: str, manifest: Manifest, storage_options: Mapping[str, Any] | None
) -> dict[str, Mapping[str, Any]]:
    """Return the states of the parts, by the names under which they are stored."""
    stored_names = {entry.name for entry in manifest.parts}
    missing_names = [name for name in _NEEDED if name not in stored_names]
    if missing_names:
        raise IncompatibleCheckpoint(
            f"{manifest.checkpoint} holds no `{missing_names[0]}`: Transformers resumes only from "
            "a Trainer's checkpoint",
            hint=f"resilient ckpt export {manifest.checkpoint} {shell_quote(url)} "
            "--format safetensors --out weights",
        )
    ranks = [rank_part("rng_state", rank) for rank in range(int(manifest.world["size"]))]
    optional = ("scaler", *ranks, *SIDECAR_FILES)
    engine = open_engine(url, storage_options=storage_options)
    try:
        return read_parts(engine, manifest, (*_NEEDED, *optional))
    finally:
        engine.close()


def read_parts(
    engine: CheckpointEngine, manifest: Manifest, names: Iterable[str]
) -> dict[str, Mapping[str, Any]]:
    """Return the states of the named parts that a checkpoint has, with every byte verified.

    Raises:
        KeyNotFound: Retention deleted the checkpoint.
        IntegrityError: The checkpoint is damaged.
    """
    stored_names = {entry.name for entry in manifest.parts}
    states = {name: CapturedState() for name in names if name in stored_names}
    for name, value in states.items():
        engine.load_part(manifest.checkpoint, name, Part(value))
    return {name: value.state for name, value in states.items()}


def _write(target: Path, manifest: Manifest, parts: Mapping[str, Mapping[str, Any]]) -> None:
    """Write all files beside the target, then rename the folder."""
    require_their_place(manifest.data, manifest.config, manifest.checkpoint.step)
    draft = target.with_name(f".{target.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    optimizer = parts["optimizer"]
    write_model_files(draft, parts)
    torch.save(optimizer_by_position(optimizer), draft / OPTIMIZER)
    groups = optimizer["param_groups"]
    torch.save(scheduler_by_group(parts["scheduler"], groups), draft / SCHEDULER)
    if "scaler" in parts:
        name = SCALER if _is_of_gpu(parts) else SCALER_OF_CPU
        torch.save(dict(parts["scaler"]), draft / name)
    _write_random_states(draft, parts)
    best = _exported_best(target, parts["trainer_state"])
    state = trainer_state(parts["trainer_state"], parts["callbacks"], best)
    _write_json(draft / STATE, state)
    draft.rename(target)


def write_model_files(draft: Path, parts: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the weights and their sidecar files; for an adapted model only the adapters.

    As in PEFT, each adapter except ``default`` has a subfolder with its name.

    Args:
        draft: Existing folder.
        parts: States by name; without an optimizer a tied weight has its first name.

    Raises:
        IncompatibleCheckpoint: A parameter beside the adapter is trained.
    """
    model, adapter = parts["model"], parts.get(ADAPTER)
    optimizer = parts.get("optimizer", {"param_groups": []})
    if adapter is None:
        tensors = weights(model, optimizer)
        LocalStore(draft).put(WEIGHTS, to_safetensors(tensors, {"format": "pt"}))
        write_sidecar_files(draft, parts)
        return
    adapters = {adapter.get("name", DEFAULT_ADAPTER): adapter, **adapter.get("others", {})}
    # A tied tensor has several names, and PEFT saves it under one of them.
    saved_ids = {id(model[name]) for one in adapters.values() for name in one["names"].values()}
    trained_names = {name for group in optimizer["param_groups"] for name in group["params"]}
    unsaved_names = sorted(name for name in trained_names if id(model[name]) not in saved_ids)
    if unsaved_names:
        raise IncompatibleCheckpoint(
            f"`{unsaved_names[0]}` is trained but not part of the adapter, so PEFT would not "
            "save it",
            hint="name its module in `modules_to_save` of the adapter's configuration",
        )
    for adapter_name, one in adapters.items():
        folder = draft if adapter_name == DEFAULT_ADAPTER else path_inside(draft, adapter_name)
        folder.mkdir(exist_ok=True)
        tensors = {key: model[name] for key, name in one["names"].items()}
        LocalStore(folder).put(ADAPTER_WEIGHTS, to_safetensors(tensors, {"format": "pt"}))
        _write_json(folder / ADAPTER_CONFIG, one["config"])
    write_sidecar_files(draft, {name: part for name, part in parts.items() if name == PROCESSING})


def _is_of_gpu(parts: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether the run had a GPU."""
    states = (state for name, state in parts.items() if name.startswith("rng_state_"))
    return any("cuda" in state for state in states)


def _write_random_states(draft: Path, parts: Mapping[str, Mapping[str, Any]]) -> None:
    states = [state for name, state in sorted(parts.items()) if name.startswith("rng_state_")]
    is_alone = len(states) == 1
    for rank in range(len(states)):
        own_state = parts[rank_part("rng_state", rank)]
        name = "rng_state.pth" if is_alone else f"rng_state_{rank}.pth"
        torch.save(random_state(own_state, is_alone=is_alone), draft / name)


def _exported_best(target: Path, state: Mapping[str, Any]) -> str | None:
    """Return the path of the best model's checkpoint, if this checkpoint is exported too."""
    name = state.get("best_model_checkpoint")
    if name is None:
        return None
    path = target.with_name(name)
    return str(path) if path == target or path.is_dir() else None


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


TORCH_FILE = "checkpoint.pt"


class ExportFormat(StrEnum):
    """Format of an export."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"
    DCP = "dcp"


def export_tensors(
    side: CheckpointView,
    folder: str | os.PathLike[str],
    kind: ExportFormat,
    on_progress: Callable[[int, int], None],
) -> list[str]:
    """Write the weights and the moments of a checkpoint to a new folder, each tensor whole.

    Other state is not written. :func:`export_checkpoint` writes all state that a resume needs.

    Crash: leaves a folder ``.<name>.partial`` beside the target; the checkpoint is only read.

    Args:
        side: The checkpoint; its bytes are verified.
        folder: Target folder; it must not exist.
        kind: ``safetensors`` streams; the other formats need memory for all data.
        on_progress: Called with the bytes read and the total bytes.

    Returns:
        The names of the files.

    Raises:
        ConfigError: The folder exists, or there are no tensors.
        Unreadable: A tensor cannot be read.
        StoreError: The checkpoint could not be read.
    """
    target = Path(folder)
    if target.exists():
        raise ConfigError(f"`{target}` exists already", hint=f"ls -l {shell_quote(target)}")
    draft = target.with_name(f".{target.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    files = write_parts(side, draft, on_progress)
    if not files:
        shutil.rmtree(draft)
        raise ConfigError(f"{side.url} holds no weights and no moments")
    if kind is not ExportFormat.SAFETENSORS:
        _convert(side, draft, files, kind)
    draft.rename(target)
    return sorted(path.name for path in target.iterdir())


def _convert(
    side: CheckpointView, draft: Path, files: Mapping[str, Path], kind: ExportFormat
) -> None:
    """Replace the files with those of a torch format."""
    # Imported here, because the import takes seconds.
    import torch
    from safetensors.torch import load_file

    state: dict[str, Any] = {part: load_file(path) for part, path in files.items()}
    if side.step is not None:
        state["step"] = side.step
    if kind is ExportFormat.TORCH:
        torch.save(state, draft / TORCH_FILE)
    else:
        from torch.distributed import checkpoint

        with warnings.catch_warnings():
            # torch warns that this function assumes a single process.
            warnings.simplefilter("ignore", UserWarning)
            checkpoint.save(state, checkpoint_id=str(draft / "dcp"), no_dist=True)
        for file in (draft / "dcp").iterdir():
            file.rename(draft / file.name)
        (draft / "dcp").rmdir()
    for path in files.values():
        path.unlink()
