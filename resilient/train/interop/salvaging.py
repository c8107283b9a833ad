"""What is whole of a checkpoint of ours, in a folder that a Trainer, theirs or ours, goes on from.

For a checkpoint that ``resilient ckpt repair`` cannot make whole. Its manifest must be there: it
is what everything is proved against.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from resilient.errors import ConfigError, IncompatibleCheckpoint, IntegrityError, KeyNotFound
from resilient.format.names import rank_part
from resilient.opening import open_checkpointer
from resilient.showing import quoted
from resilient.state.load import assemble
from resilient.storage.open import open_store
from resilient.train.interop import theirs
from resilient.train.interop.exporting import read_parts, write_model_files
from resilient.train.interop.files import OPTIMIZER, SCHEDULER
from resilient.train.interop.rebuilding import (
    CONSEQUENCES,
    Rebuilt,
    require_new,
    write_rebuilt,
)
from resilient.train.state import TrainerState
from resilient.vault.reading.mend import mend_file
from resilient.vault.registry.catalog import read_manifest
from resilient.vault.registry.references import resolve
from resilient.vault.registry.signing import check_contents, check_signature, read_signing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.format.manifest import Manifest
    from resilient.storage.store import Store

# Part -> what is lost with it.
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
) -> Rebuilt:
    """Write what proves whole of a checkpoint, with a state that says the rest is lost.

    Crash: a folder beside ``out``, named ``.<name>.partial``; the repository is only read.

    Args:
        url: the repository.
        out: where to, best ``.../checkpoint-<step>``; must not be there yet.
        ref: which checkpoint, as for ``resilient ckpt``.
        storage_options: how to reach the repository; by default those of the environment.

    Raises:
        ConfigError: ``out`` is there, or all of the checkpoint is whole.
        IntegrityError: its manifest or its weights are damaged.
        SignatureRefused: ``RESILIENT_REQUIRE_SIGNATURE`` is set, and the key has not signed it.
        IncompatibleCheckpoint: it holds no model.
    """
    target = Path(out)
    require_new(target)
    store = open_store(url, storage_options=storage_options or {})
    manifest = read_manifest(store, resolve(store, ref))
    signed = check_signature(store, manifest, read_signing(os.environ))
    parts, hurt = _read(url, manifest, storage_options)
    if "model" not in parts:
        parts["model"] = _weights(store, manifest, signed)
    if not hurt:
        raise ConfigError(
            f"{manifest.checkpoint} is whole: there is nothing to rebuild",
            hint=f"resilient ckpt export {manifest.checkpoint} {quoted(url)} "
            f"--out {quoted(target)}",
        )
    if "optimizer" not in parts:
        parts.pop("scheduler", None)  # its groups are the optimizer's
        hurt.add("scheduler")
    state, ranks = _state(manifest, parts)
    lost = {_LOSSES[one] for one in hurt if one in _LOSSES}
    if ranks < int(manifest.world["size"]):
        lost.add("random state")
    if "trainer_state" in hurt:
        lost.add("best model")
    source = f"{manifest.checkpoint} of {url}"
    known = dict.fromkeys(("weights", "step", "place in the data"), source)
    # The state says it as their Trainer counts, also where the manifest says nothing.
    if "global_batch" not in manifest.data and "trainer_state" not in parts:
        known.pop("place in the data")
        lost.add("place in the data")
    consequences = {name: CONSEQUENCES[name] for name in sorted(lost)}
    made = Rebuilt(str(target), state.global_step, known, consequences)
    return write_rebuilt(target, made, state, lambda draft: _fill(draft, parts, ranks))


def _read(
    url: str, manifest: Manifest, storage_options: Mapping[str, Any] | None
) -> tuple[dict[str, Mapping[str, Any]], set[str]]:
    """Return the parts that prove whole, and the names of the others."""
    spine = open_checkpointer(url, storage_options=storage_options)
    whole: dict[str, Mapping[str, Any]] = {}
    hurt = set()
    try:
        for entry in manifest.parts:
            try:
                whole |= read_parts(spine, manifest, [entry.name])
            except (IntegrityError, KeyNotFound):
                hurt.add(entry.name)
    finally:
        spine.close()
    return whole, hurt


def _weights(
    store: Store, manifest: Manifest, signed: Mapping[str, str] | None
) -> dict[str, torch.Tensor]:
    """Return the tensors of a model whose document is lost, each byte of them proved.

    A weight that is tied has one name: that it has others stood in the document.

    Raises:
        IncompatibleCheckpoint: there are none.
        IntegrityError: one of them is damaged, or is not what was signed.
    """
    wanted = [one for one in manifest.tensors if one.part == "model"]
    if not wanted:
        raise IncompatibleCheckpoint(f"{manifest.checkpoint} holds no model to build a state for")
    names = {region.file for one in wanted for region in one.regions}
    files = {name: mend_file([store], manifest, manifest.file(name)) for name in sorted(names)}
    if signed is not None:
        check_contents(manifest, signed, files)
    return {one.name.removeprefix("model/"): assemble(one, files) for one in wanted}


def _state(manifest: Manifest, parts: Mapping[str, Mapping[str, Any]]) -> tuple[TrainerState, int]:
    """Return the state as far as it is known, and how many ranks' random state is whole."""
    names = [rank_part("rng_state", rank) for rank in range(int(manifest.world["size"]))]
    ranks = len(names) if all(name in parts for name in names) else 0
    state = TrainerState()
    if "trainer_state" in parts:
        state.load_state_dict(parts["trainer_state"])
        return state, ranks
    state.global_step = manifest.checkpoint.step
    data = manifest.data
    if "global_batch" in data:
        each = data["global_batch"] // int(manifest.config.get("gradient_accumulation_steps", 1))
        batches = math.ceil(data["dataset_size"] / each)
        state.epoch = data["epoch"] + math.ceil(data["samples"] / each) / batches
        # Transformers' folder tells the number of ranks by their random states.
        state.train_batch_size = each // max(1, ranks)
    return state, ranks


def _fill(draft: Path, parts: Mapping[str, Mapping[str, Any]], ranks: int) -> None:
    write_model_files(draft, parts)
    if "optimizer" in parts:
        optimizer = parts["optimizer"]
        torch.save(theirs.optimizer_by_position(optimizer), draft / OPTIMIZER)
        if "scheduler" in parts:
            groups = optimizer["param_groups"]
            torch.save(theirs.scheduler_by_group(parts["scheduler"], groups), draft / SCHEDULER)
    for rank in range(ranks):
        ours = parts[rank_part("rng_state", rank)]
        name = "rng_state.pth" if ranks == 1 else f"rng_state_{rank}.pth"
        torch.save(theirs.random_state(ours, is_alone=ranks == 1), draft / name)
