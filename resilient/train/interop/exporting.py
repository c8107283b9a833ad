"""A checkpoint of ours as a folder from which stock Transformers goes on."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from resilient.errors import ConfigError, IncompatibleCheckpoint
from resilient.format.names import rank_part
from resilient.opening import open_checkpointer
from resilient.showing import quoted
from resilient.state.capture import Part
from resilient.state.stage import pack
from resilient.storage.local import LocalStore
from resilient.storage.open import open_store
from resilient.train.interop import theirs
from resilient.train.interop.files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    OPTIMIZER,
    SCALER,
    SCALER_OF_CPU,
    SCHEDULER,
    STATE,
    WEIGHTS,
)
from resilient.train.model.papers import ADAPTER, PAPERS, PROCESSING, write_papers
from resilient.vault.registry.catalog import read_manifest
from resilient.vault.registry.references import resolve
from resilient.vault.registry.signed_store import reading_signed
from resilient.vault.registry.signing import read_signing

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from resilient.checkpointer import Checkpointer
    from resilient.format.manifest import Manifest
    from resilient.format.names import CheckpointId

_NEEDED = ("model", "optimizer", "scheduler", "trainer_state", "callbacks")


@dataclass(slots=True)
class Held:
    """Takes a part's state and keeps it."""

    state: Mapping[str, Any] = field(default_factory=dict)

    def state_dict(self) -> Mapping[str, Any]:
        """Return what was taken."""
        return self.state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the state."""
        self.state = state_dict


def export_checkpoint(
    url: str,
    folder: str | os.PathLike[str],
    ref: str = "latest",
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> CheckpointId:
    """Write a checkpoint as Transformers' Trainer keeps it, for its ``resume_from_checkpoint``.

    Every byte is proved before it is written, and the folder appears when it is whole. What
    another trainer cannot use (sums of losses, parts that you registered) stays here.

    Crash: a folder beside it, named ``.<name>.partial``; the repository is only read.

    Args:
        url: the repository.
        folder: where to, best ``.../checkpoint-<step>``; must not be there yet.
        ref: which checkpoint, as for ``resilient ckpt``.
        storage_options: how to reach the repository; by default those of the environment.

    Returns:
        The checkpoint that was written.

    Raises:
        ConfigError: the folder is there.
        IncompatibleCheckpoint: no Trainer of ours saved it, or Transformers could not say from
            its step where in the data the run is.
        IntegrityError: it is damaged.
        SignatureRefused: ``RESILIENT_REQUIRE_SIGNATURE`` is set, and the key has not signed it.
    """
    target = Path(folder)
    if target.exists():
        raise ConfigError(f"`{target}` is there already", hint=f"ls -l {quoted(target)}")
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
    stored = {entry.name for entry in manifest.parts}
    lacks = [name for name in _NEEDED if name not in stored]
    if lacks:
        raise IncompatibleCheckpoint(
            f"{manifest.checkpoint} holds no `{lacks[0]}`: Transformers goes on only from what a "
            "Trainer saved",
            hint=f"resilient ckpt export {manifest.checkpoint} {quoted(url)} --format safetensors "
            "--out weights",
        )
    ranks = [rank_part("rng_state", rank) for rank in range(int(manifest.world["size"]))]
    optional = ("scaler", *ranks, *PAPERS)
    spine = open_checkpointer(url, storage_options=storage_options)
    try:
        return read_parts(spine, manifest, (*_NEEDED, *optional))
    finally:
        spine.close()


def read_parts(
    spine: Checkpointer, manifest: Manifest, names: Iterable[str]
) -> dict[str, Mapping[str, Any]]:
    """Return the states of those of the named parts that a checkpoint holds, each byte proved.

    Raises:
        KeyNotFound: the checkpoint was rotated away.
        IntegrityError: it is damaged.
    """
    stored = {entry.name for entry in manifest.parts}
    held = {name: Held() for name in names if name in stored}
    for name, one in held.items():
        spine.load_part(manifest.checkpoint, name, Part(one))
    return {name: one.state for name, one in held.items()}


def _write(target: Path, manifest: Manifest, parts: Mapping[str, Mapping[str, Any]]) -> None:
    """Write everything beside the target, then give it its name."""
    theirs.require_their_place(manifest.data, manifest.config, manifest.checkpoint.step)
    draft = target.with_name(f".{target.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    optimizer = parts["optimizer"]
    write_model_files(draft, parts)
    torch.save(theirs.optimizer_by_position(optimizer), draft / OPTIMIZER)
    groups = optimizer["param_groups"]
    torch.save(theirs.scheduler_by_group(parts["scheduler"], groups), draft / SCHEDULER)
    if "scaler" in parts:
        name = SCALER if _is_of_gpu(parts) else SCALER_OF_CPU
        torch.save(dict(parts["scaler"]), draft / name)
    _write_random_states(draft, parts)
    best = _best_beside(target, parts["trainer_state"])
    state = theirs.trainer_state(parts["trainer_state"], parts["callbacks"], best)
    _write_json(draft / STATE, state)
    draft.rename(target)


def write_model_files(draft: Path, parts: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the weights and what belongs to them; of an adapted model only the adapter.

    Args:
        draft: is there.
        parts: states by name; without an optimizer a tied weight has its first name.

    Raises:
        IncompatibleCheckpoint: something is trained beside an adapter.
    """
    model, adapter = parts["model"], parts.get(ADAPTER)
    optimizer = parts.get("optimizer", {"param_groups": []})
    if adapter is None:
        tensors = theirs.weights(model, optimizer)
        LocalStore(draft).put(WEIGHTS, pack(tensors, {"format": "pt"}))
        write_papers(draft, parts)
        return
    names = adapter["names"]
    trained = {name for group in optimizer["param_groups"] for name in group["params"]}
    beside = sorted(trained - set(names.values()))
    if beside:
        raise IncompatibleCheckpoint(
            f"`{beside[0]}` is trained and is no part of the adapter, so PEFT would not save it",
            hint="name its module in `modules_to_save` of the adapter's configuration",
        )
    tensors = {key: model[name] for key, name in names.items()}
    LocalStore(draft).put(ADAPTER_WEIGHTS, pack(tensors, {"format": "pt"}))
    _write_json(draft / ADAPTER_CONFIG, adapter["config"])
    write_papers(draft, {name: one for name, one in parts.items() if name == PROCESSING})


def _is_of_gpu(parts: Mapping[str, Mapping[str, Any]]) -> bool:
    """Say whether the run had a GPU."""
    states = (state for name, state in parts.items() if name.startswith("rng_state_"))
    return any("cuda" in state for state in states)


def _write_random_states(draft: Path, parts: Mapping[str, Mapping[str, Any]]) -> None:
    states = [state for name, state in sorted(parts.items()) if name.startswith("rng_state_")]
    is_alone = len(states) == 1
    for rank in range(len(states)):
        ours = parts[rank_part("rng_state", rank)]
        name = "rng_state.pth" if is_alone else f"rng_state_{rank}.pth"
        torch.save(theirs.random_state(ours, is_alone=is_alone), draft / name)


def _best_beside(target: Path, state: Mapping[str, Any]) -> str | None:
    """Return the path of the checkpoint with the best model, if it is exported too."""
    best = state.get("best_global_step")
    if best is None:
        return None
    path = target.with_name(f"checkpoint-{best}")
    return str(path) if path == target or path.is_dir() else None


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
