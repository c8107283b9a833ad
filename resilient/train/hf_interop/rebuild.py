"""Rebuild of damaged checkpoints from their intact data, with a report of the lost state.

The damaged checkpoint is not changed. Intact data is written to a new folder in the format of
Transformers. The Trainer of Transformers and the Trainer of this package can continue from this
folder. They initialize the lost state again. ``rebuilt.json`` in this folder lists the lost state
and the sources of the remaining state.

If ``resilient ckpt repair`` cannot repair a checkpoint of this package, this module extracts the
intact parts. The manifest (the list of the files and their digests) must exist, because all data is
verified against the manifest.

If the run used canonical reduction (``reduction="canonical"``), lost states of random generators
are recomputed. In such a run, all generators are reseeded after the passes of each step. If no
number was drawn between the reseeding and the save, the states depend only on the seed, the step
and the number of micro-batches. The digest in the manifest shows whether the recomputed file equals
the lost file. In other runs, the generators continue from step to step without a new seed, so their
states cannot be recomputed.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from resilient.checkpoint.catalog import read_manifest
from resilient.checkpoint.refs import resolve
from resilient.checkpoint.restore.reconstruct import reconstruct_file
from resilient.checkpoint.signing import check_contents, check_signature, read_signing
from resilient.distributed.launch_env import World
from resilient.engine_factory import open_engine
from resilient.errors import (
    ConfigError,
    IncompatibleCheckpoint,
    IntegrityError,
    KeyNotFound,
    NothingToResume,
)
from resilient.format.digest import digest_file
from resilient.format.keys import rank_part, rank_part_file
from resilient.layouts.detect import read_layout
from resilient.layouts.incomplete import saved_name
from resilient.layouts.resumability import assess_resumability
from resilient.layouts.training_state import schedule_of
from resilient.layouts.weights import adapter_files
from resilient.redaction import shell_quote
from resilient.state_dict.resharding import assemble
from resilient.state_dict.rng_state import RandomState
from resilient.state_dict.snapshot import Part, capture
from resilient.state_dict.staging import StagingBuffers, stage
from resilient.storage.folder import open_folder
from resilient.storage.open import open_store
from resilient.train.data.sampler import seed_between_steps
from resilient.train.hf_interop import exporter
from resilient.train.hf_interop.checkpoint import (
    INDEX,
    LAST,
    OPTIMIZER,
    SCALER,
    SCHEDULER,
    STATE,
    UNFINISHED,
    WEIGHTS,
    TransformersCheckpoint,
    TransformersFiles,
    adam_steps,
)
from resilient.train.hf_interop.exporter import read_parts, write_model_files
from resilient.train.state import TrainerControl, TrainerState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from resilient.format.manifest import Manifest
    from resilient.storage.store import Store

REPORT = "rebuilt.json"
CONSEQUENCES = {
    "optimizer": "its moments are lost: a resume starts them at zero, and the schedule again",
    "scheduler": "the schedule is lost: a resume starts it and the moments again",
    "scaler": "the loss scale of fp16 starts again",
    "random state": "dropout and augmentation draw other numbers",
    "place in the data": "the first epoch starts again, so samples are repeated",
    "history": "no losses and metrics before this step",
    "best model": "the next evaluation counts as the best so far",
    "callbacks": "their counters start again",
}


@dataclass(frozen=True, slots=True)
class RebuildPlan:
    """Content of a rebuilt checkpoint.

    Attributes:
        folder: Path of the folder.
        step: Number of finished optimizer steps.
        known: Source of each recovered item.
        lost: Consequence of each lost item.
    """

    folder: str
    step: int
    known: Mapping[str, str] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)

    @property
    def restores_progress(self) -> bool:
        """True if a resume restores the optimizer and the schedule, not only the weights."""
        return not {"optimizer", "scheduler"} & set(self.lost)


def rebuild_folder(source: str | Path, out: str | Path) -> RebuildPlan:
    """Rebuild a Transformers checkpoint whose ``trainer_state.json`` is lost.

    The step comes from the schedule, the optimizer and the folder's name, which must agree. The
    length of an epoch and the history up to this step come from a sibling folder, another
    ``checkpoint-<step>`` beside it.

    Crash: leaves a folder ``.<name>.partial`` beside ``out``; the source is only read.

    Args:
        source: Folder of the checkpoint.
        out: Target folder, best ``.../checkpoint-<step>``; it must not exist.

    Raises:
        ConfigError: ``out`` exists, the state is intact, or the step is unknown.
        IncompatibleCheckpoint: There are no weights.
        IntegrityError: The weights are damaged, or files are of several steps.
    """
    files, target = TransformersFiles(source), Path(out)
    require_new(target)
    _require_finished(files.folder)
    _require_lost(files)
    files.weights()
    contents, lost_files = _readable(files)
    step, source_by_step = _step_of(files, contents)
    state, sources, losses = _state_from_sibling(files.folder, step)
    plan = RebuildPlan(
        str(target),
        step,
        {"weights": str(files.folder), "step": source_by_step, **sources},
        {name: CONSEQUENCES[name] for name in (*lost_files, *losses, "best model", "callbacks")},
    )
    skipped_names = {STATE, UNFINISHED, *(name for names in lost_files.values() for name in names)}

    def fill(draft: Path) -> None:
        for place in {files.folder} | _adapter_folders(files.folder):
            copied = draft / place.relative_to(files.folder)
            copied.mkdir(exist_ok=True)
            for path in place.iterdir():
                if path.is_file() and path.name not in skipped_names:
                    shutil.copy2(path, copied / path.name)

    return write_rebuilt(target, plan, state, fill)


def is_weights_folder(path: str | Path) -> bool:
    """Return whether a path is a folder with a model's weights, and no native checkpoint."""
    folder = Path(path)
    is_model = any((folder / name).is_file() for name in (WEIGHTS, INDEX))
    is_native = (folder / "manifest.json").exists()
    return not is_native and (is_model or bool(_adapter_folders(folder)))


def _adapter_folders(folder: Path) -> set[Path]:
    """Return the folders of adapters in a checkpoint; the checkpoint itself may be one of them."""
    files = [path for pattern in ("*", "*/*") for path in folder.glob(pattern) if path.is_file()]
    names = adapter_files(path.relative_to(folder).as_posix() for path in files)
    return {folder / name for name in names}


def require_new(target: Path) -> None:
    """Require that a folder does not exist.

    Raises:
        ConfigError: The folder exists.
    """
    if target.exists():
        raise ConfigError(f"`{target}` exists already", hint=f"ls -l {shell_quote(target)}")


def write_rebuilt(
    target: Path, plan: RebuildPlan, state: TrainerState, fill: Callable[[Path], None]
) -> RebuildPlan:
    """Write a folder: the files that ``fill`` writes, the state, and the report of the losses."""
    draft = target.with_name(f".{target.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    fill(draft)
    # Transformers looks up this callback at a save, and raises if its state is missing.
    callbacks = {"TrainerControl": TrainerControl().state(), **state.stateful_callbacks}
    state = replace(state, stateful_callbacks=callbacks)
    state.save_to_json(draft / STATE)
    text = json.dumps(asdict(plan), indent=2, sort_keys=True) + "\n"
    (draft / REPORT).write_text(text, encoding="utf-8")
    draft.rename(target)
    return plan


def _require_lost(files: TransformersFiles) -> None:
    try:
        TransformersCheckpoint(files.folder)
    except (NothingToResume, IntegrityError):
        return
    raise ConfigError(
        f"the {STATE} of `{files.folder}` is intact: there is nothing to rebuild",
        hint=f"resilient ckpt verify {shell_quote(files.folder)}",
    )


def _require_finished(folder: Path) -> None:
    """Refuse a save that never finished, because its files may be incomplete.

    Raises:
        IntegrityError: The folder has the mark of an unfinished save, or is a staging folder.
    """
    if not (folder / UNFINISHED).exists() and not saved_name(folder.name):
        return
    siblings = sorted(_whole(folder.absolute().parent.glob("checkpoint-*")), key=_step)
    resumable = (step for step in reversed(siblings) if _is_resumable(str(step.folder)))
    sibling = next(resumable, None)
    raise IntegrityError(
        f"cannot rebuild `{folder}`: its save was never finished. Nothing was written",
        key=str(folder),
        hint=f"resilient ckpt inspect {shell_quote(sibling.folder if sibling else folder)}",
    )


def _is_resumable(path: str) -> bool:
    folder = open_folder(path)
    contents = read_layout(folder, folder.list())
    return contents is not None and assess_resumability(contents, path).answer != "no"


def _step(checkpoint: TransformersCheckpoint) -> int:
    return checkpoint.step


def _readable(files: TransformersFiles) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return the content of intact files, and the lost items by their file names.

    A file that never existed also counts as lost. The scaler is an exception, because only fp16 has
    a scaler.
    """
    names = {"optimizer": [OPTIMIZER], "scheduler": [SCHEDULER], "scaler": [SCALER]}
    names["random state"] = [path.name for path in files.folder.glob("rng_state*.pth")]
    contents: dict[str, Any] = {}
    lost_files: dict[str, list[str]] = {}
    for label, file_names in names.items():
        for name in file_names:
            if (files.folder / name).exists():
                try:
                    contents[name] = files.load(name)
                except IntegrityError:
                    lost_files.setdefault(label, []).append(name)
            elif label != "scaler":
                lost_files[label] = []
        if not file_names:
            lost_files[label] = []
    return contents, lost_files


def _step_of(files: TransformersFiles, contents: Mapping[str, Any]) -> tuple[int, str]:
    """Return the step and its sources.

    Raises:
        ConfigError: No source gives the step.
        IntegrityError: The sources disagree.
    """
    steps: dict[str, int] = {}
    if match := LAST.fullmatch(files.folder.name):
        steps["the folder's name"] = int(match[1])
    if SCHEDULER in contents:
        schedule_state = schedule_of(contents[SCHEDULER])
        # A schedule driven by a metric counts evaluations.
        if schedule_state is not None and schedule_state.step is not None:
            steps[SCHEDULER] = schedule_state.step
    if optimizer_steps := (adam_steps(contents[OPTIMIZER]) if OPTIMIZER in contents else set()):
        steps[OPTIMIZER] = max(optimizer_steps)
    if not steps:
        raise ConfigError(
            f"the step of `{files.folder}` is unknown",
            hint="rename it to checkpoint-STEP",
        )
    step = max(steps.values())
    # With fp16 the optimizer and the schedule both skip some steps.
    skips = SCALER in contents and steps.get("the folder's name") == step
    if len(set(steps.values())) > 1 and not skips:
        text = ", ".join(f"{name} {number}" for name, number in steps.items())
        raise IntegrityError(
            f"the files of `{files.folder}` are of several steps: {text}",
            key=str(files.folder),
            hint="the folder mixes two checkpoints: take another",
        )
    return step, ", ".join(name for name, number in steps.items() if number == step)


def _state_from_sibling(folder: Path, step: int) -> tuple[TrainerState, dict[str, str], list[str]]:
    """Return a basic state, the items taken from a sibling folder, and the unknown items."""
    sibling = _nearest_sibling(folder, step)
    if sibling is None:
        return TrainerState(global_step=step), {}, ["place in the data", "history"]
    sibling_state = sibling.state
    entries = [entry for entry in sibling_state["log_history"] if entry.get("step", 0) <= step]
    limits = {
        name: sibling_state[name]
        for name in ("max_steps", "num_train_epochs")
        if name in sibling_state
    }
    state = TrainerState(
        global_step=step,
        epoch=_epoch_at(step, sibling),
        train_batch_size=int(sibling_state.get("train_batch_size") or 0),
        log_history=entries,
        **limits,
    )
    state = replace(
        state, **{name: sibling_state[name] for name in _CADENCES if name in sibling_state}
    )
    sources = {"place in the data": str(sibling.folder), "history": str(sibling.folder)}
    if sibling.step >= step:
        return state, sources, []
    sources["history"] += f", up to step {sibling.step}"
    return state, sources, ["history"]


_CADENCES = ("logging_steps", "eval_steps", "save_steps")


def _epoch_at(step: int, sibling: TransformersCheckpoint) -> float:
    """Return the epoch of a step: from the log, or from the sibling's steps per epoch."""
    logged = [entry for entry in sibling.state["log_history"] if entry.get("step") == step]
    exact = next((entry["epoch"] for entry in logged if "epoch" in entry), None)
    return float(sibling.state["epoch"]) * step / sibling.step if exact is None else float(exact)


def _nearest_sibling(folder: Path, step: int) -> TransformersCheckpoint | None:
    """Return the intact sibling checkpoint that knows most about the same run."""
    siblings = list(_whole(path for path in folder.absolute().parent.glob("checkpoint-*")))
    later_siblings = [sibling for sibling in siblings if sibling.step >= step]
    if later_siblings:
        return min(later_siblings, key=lambda sibling: sibling.step)
    return max(siblings, key=lambda sibling: sibling.step, default=None)


def _whole(folders: Iterable[Path]) -> Iterable[TransformersCheckpoint]:
    for folder in folders:
        try:
            checkpoint = TransformersCheckpoint(folder)
        except (NothingToResume, IntegrityError, IncompatibleCheckpoint):
            continue
        if checkpoint.step > 0:
            yield checkpoint


# Part -> item that is lost if the part is lost.
_LOSSES = {
    "optimizer": "optimizer",
    "scheduler": "scheduler",
    "scaler": "scaler",
    "callbacks": "callbacks",
    "trainer_state": "history",
}


def rebuild_checkpoint(
    url: str,
    out: str | Path,
    ref: str = "latest",
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> RebuildPlan:
    """Write the intact parts of a checkpoint, with a state that marks the other parts as lost.

    Crash: leaves a folder ``.<name>.partial`` beside ``out``; the repository is only read.

    Args:
        url: URL of the repository.
        out: Target folder, best ``.../checkpoint-<step>``; it must not exist.
        ref: Checkpoint reference, as for ``resilient ckpt``.
        storage_options: Access options of the repository; by default those of the environment.

    Raises:
        ConfigError: ``out`` exists, or the whole checkpoint is intact.
        IntegrityError: The manifest or the weights are damaged.
        SignatureRefused: ``RESILIENT_REQUIRE_SIGNATURE`` is set, and the key has not signed it.
        IncompatibleCheckpoint: The checkpoint has no model.
    """
    target = Path(out)
    require_new(target)
    store = open_store(url, storage_options=storage_options or {})
    manifest = read_manifest(store, resolve(store, ref))
    signed = check_signature(store, manifest, read_signing(os.environ))
    parts, damaged_parts = _read(url, manifest, storage_options)
    if "model" not in parts:
        parts["model"] = _weights(store, manifest, signed)
    if not damaged_parts:
        raise ConfigError(
            f"{manifest.checkpoint} is intact: there is nothing to rebuild",
            hint=f"resilient ckpt export {manifest.checkpoint} {shell_quote(url)} "
            f"--out {shell_quote(target)}",
        )
    if "optimizer" not in parts:
        parts.pop("scheduler", None)  # its groups refer to the optimizer's
        damaged_parts.add("scheduler")
    state, ranks = _state(manifest, parts)
    lost_items = {_LOSSES[file] for file in damaged_parts if file in _LOSSES}
    if ranks < int(manifest.world["size"]):
        lost_items.add("random state")
    if "trainer_state" in damaged_parts:
        lost_items.add("best model")
    source = f"{manifest.checkpoint} of {url}"
    sources = dict.fromkeys(("weights", "step", "place in the data"), source)
    # The state gives the position by Transformers' count, even if the manifest has none.
    if "global_batch" not in manifest.data and "trainer_state" not in parts:
        sources.pop("place in the data")
        lost_items.add("place in the data")
    consequences = {name: CONSEQUENCES[name] for name in sorted(lost_items)}
    plan = RebuildPlan(str(target), state.global_step, sources, consequences)
    return write_rebuilt(target, plan, state, lambda draft: _fill(draft, parts, ranks))


def _read(
    url: str, manifest: Manifest, storage_options: Mapping[str, Any] | None
) -> tuple[dict[str, Mapping[str, Any]], set[str]]:
    """Return the parts that verification found intact, and the names of the other parts."""
    engine = open_engine(url, storage_options=storage_options)
    intact_parts: dict[str, Mapping[str, Any]] = {}
    damaged_parts = set()
    try:
        for entry in manifest.parts:
            try:
                intact_parts |= read_parts(engine, manifest, [entry.name])
            except (IntegrityError, KeyNotFound):
                damaged_parts.add(entry.name)
    finally:
        engine.close()
    return intact_parts, damaged_parts


def _weights(
    store: Store, manifest: Manifest, signed: Mapping[str, str] | None
) -> dict[str, torch.Tensor]:
    """Return the tensors of a model whose document is lost, with every byte verified.

    A tied weight has only one name, because its other names were in the lost document.

    Raises:
        IncompatibleCheckpoint: There are no tensors.
        IntegrityError: A tensor is damaged, or differs from the signed one.
    """
    model_tensors = [tensor for tensor in manifest.tensors if tensor.part == "model"]
    if not model_tensors:
        raise IncompatibleCheckpoint(f"{manifest.checkpoint} holds no model to build a state for")
    names = {region.file for tensor in model_tensors for region in tensor.regions}
    files = {
        name: reconstruct_file([store], manifest, manifest.file(name)) for name in sorted(names)
    }
    if signed is not None:
        check_contents(manifest, signed, files)
    return {tensor.name.removeprefix("model/"): assemble(tensor, files) for tensor in model_tensors}


def _state(manifest: Manifest, parts: Mapping[str, Mapping[str, Any]]) -> tuple[TrainerState, int]:
    """Return the known fields of the state, and the number of ranks with random states."""
    names = [rank_part("rng_state", rank) for rank in range(int(manifest.world["size"]))]
    ranks = len(names) if all(name in parts for name in names) else 0
    state = TrainerState()
    if "trainer_state" in parts:
        state.load_state_dict(parts["trainer_state"])
        return state, ranks
    state.global_step = manifest.checkpoint.step
    data = manifest.data
    if "global_batch" in data:
        batch_size = data["global_batch"] // int(
            manifest.config.get("gradient_accumulation_steps", 1)
        )
        batches = math.ceil(data["dataset_size"] / batch_size)
        state.epoch = data["epoch"] + math.ceil(data["samples"] / batch_size) / batches
        # Transformers counts a folder's ranks by their random states.
        state.train_batch_size = batch_size // max(1, ranks)
    return state, ranks


def _fill(draft: Path, parts: Mapping[str, Mapping[str, Any]], ranks: int) -> None:
    write_model_files(draft, parts)
    if "optimizer" in parts:
        optimizer = parts["optimizer"]
        torch.save(exporter.optimizer_by_position(optimizer), draft / OPTIMIZER)
        if "scheduler" in parts:
            groups = optimizer["param_groups"]
            torch.save(exporter.scheduler_by_group(parts["scheduler"], groups), draft / SCHEDULER)
    for rank in range(ranks):
        own_state = parts[rank_part("rng_state", rank)]
        name = "rng_state.pth" if ranks == 1 else f"rng_state_{rank}.pth"
        torch.save(exporter.random_state(own_state, is_alone=ranks == 1), draft / name)


_PART = "rng_state"
_DEVICES_MAX = 17
"""Numbers of devices that one process may see, including none."""


class DerivedSource:
    """Store of files that were derived from other data, by their keys.

    Attributes:
        url: Description of the source for messages.
    """

    def __init__(self, url: str, files: Mapping[str, bytes]) -> None:
        self.url = url
        self._files = files

    def get(self, key: str) -> bytes:
        """Return a file.

        Raises:
            KeyNotFound: The file was not derived.
        """
        try:
            return self._files[key]
        except KeyError as error:
            raise KeyNotFound(f"no `{key}` follows from {self.url}", key=key) from error

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return a range of a file.

        Raises:
            KeyNotFound: The file was not derived.
        """
        return self.get(key)[start : start + length]


def random_states_of(
    url: str, manifest: Manifest, *, storage_options: Mapping[str, Any] | None = None
) -> Store | None:
    """Return a store of random states recomputed from seed and step; None if impossible.

    The caller must verify the files like any other copy. The random states of this process do not
    change.

    Crash: reads only.

    Args:
        url: URL of the repository.
        manifest: Manifest of the checkpoint.
        storage_options: Access options of the repository.
    """
    config, step = manifest.config, manifest.checkpoint.step
    batch, micro = (
        config.get(name) for name in ("global_train_batch_size", "per_device_train_batch_size")
    )
    if config.get("reduction") != "canonical" or not (batch and micro and step):
        return None
    seed = _seed(url, manifest, storage_options)
    random_state = RandomState().state_dict()
    try:
        seed_between_steps(seed, step - 1, int(batch) // int(micro))
        ranks = int(manifest.world["size"])
        files = {
            manifest.checkpoint.key(rank_part_file(_PART, rank)): _file(manifest, step, rank, ranks)
            for rank in range(ranks)
        }
    finally:
        RandomState().load_state_dict(random_state)
    return cast("Store", DerivedSource("the run's seed and step", files))


def _seed(url: str, manifest: Manifest, storage_options: Mapping[str, Any] | None) -> int:
    """Return the seed of the run; a part of the checkpoint takes precedence over its arguments."""
    engine = open_engine(url, storage_options=storage_options)
    try:
        with suppress(IntegrityError, KeyNotFound):
            return int(read_parts(engine, manifest, ["reduction"])["reduction"]["seed"])
    finally:
        engine.close()
    return int(manifest.config.get("seed", 42))


class _Seeded:
    """Random state of this process and of ``devices`` CUDA devices with the same seed.

    The state of a CUDA generator is a seed and an offset, so no device is needed to make it.
    """

    def __init__(self, devices: int) -> None:
        self._devices = devices

    def state_dict(self) -> dict[str, Any]:
        """Return the random states of the process and of the devices."""
        state = RandomState().state_dict()
        if self._devices:
            data = struct.pack("<Qq", torch.initial_seed() & 0xFFFFFFFFFFFFFFFF, 0)
            tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            state["cuda"] = [tensor.clone() for _ in range(self._devices)]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: the state is only saved."""


def _file(manifest: Manifest, step: int, rank: int, ranks: int) -> bytes:
    """Return the file of a rank's random state, made from this process's current state.

    The number of a rank's devices is not recorded. Each number is tried until the digest of the
    file equals the committed digest.
    """
    name = rank_part_file(_PART, rank)
    entry = next((file for file in manifest.files if file.name == name), None)
    candidates = [
        _bytes_of(name, step, World(rank, ranks), devices) for devices in range(_DEVICES_MAX)
    ]
    fitting = [path for path in candidates if entry and digest_file(path) == entry.proof]
    return (fitting or candidates)[0]


def _bytes_of(name: str, step: int, world: World, devices: int) -> bytes:
    parts = {_PART: Part(_Seeded(devices), "rank")}
    staged = stage(capture(step, parts, world.rank), world, StagingBuffers())
    return next(bytes(file.data) for file in staged.files if file.name == name)
