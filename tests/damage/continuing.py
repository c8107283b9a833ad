"""Resume a checkpoint with the library of its layout, and save it again with that library."""

from __future__ import annotations

import shutil
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM

from resilient.diff.verification import verify_folder
from tests.damage.samples import load_script, run_trainer
from tests.damage.sharded import FSDP, SHARDS, ZERO2, ZERO3, ranks
from tests.helpers.foreign_folders import accelerate_run, lightning_run, write_slices

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from resilient.layouts.model import Resumability


def with_accelerate(path: Path, out: Path) -> Path:
    """Call ``load_state``, train one step and call ``save_state``."""
    accelerator, model, optimizer, schedule, data = accelerate_run()
    accelerator.load_state(str(path))
    accelerator.backward(model(next(iter(data))[0]).sum())
    optimizer.step()
    schedule.step()
    accelerator.save_state(str(out))
    return out


def with_lightning(path: Path, out: Path) -> Path:
    """Call ``Trainer.fit(ckpt_path=...)`` for one more epoch and ``save_checkpoint``."""
    model, trainer, data = lightning_run(out, 3)
    trainer.fit(model, data, ckpt_path=str(path))
    assert trainer.global_step == 9
    trainer.save_checkpoint(out / "last.ckpt")
    return out / "last.ckpt"


def with_dcp(path: Path, out: Path) -> Path:
    """Call ``dcp.load`` into a state of the same names and ``dcp.save``."""
    reader = dcp.FileSystemReader(path)
    held = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.zeros(one.size, dtype=one.properties.dtype) if hasattr(one, "size") else None
        for name, one in held.items()
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert any(one.abs().sum() for one in state.values() if torch.is_tensor(one))
    write_slices(state, out)
    for one in path.iterdir():
        # Files that the trainers of this layout write beside the slices.
        if one.suffix in (".pt", ".json"):
            shutil.copy(one, out)
    return out


def with_transformers(steps: int, path: Path, out: Path) -> Path:
    """Call ``Trainer.train(resume_from_checkpoint=...)`` for one step and its save."""
    run_trainer(path, out, steps, save_strategy="steps", save_steps=1)
    return out / f"checkpoint-{steps}"


def with_ranks(kind: str, path: Path, out: Path) -> Path:
    """Call the same in two ranks; FSDP and DeepSpeed load and save the shards."""
    ranks().train(kind, out, str(path), save_steps=1)
    return max(out.glob("checkpoint-*"), key=lambda one: int(one.name.partition("-")[2]))


def with_torch(path: Path, out: Path) -> Path:
    """Load a script's file into its objects and save it with ``torch.save``."""
    torch.save(load_script(path).rest, out / "last.pt")
    return out / "last.pt"


def with_pretrained(path: Path, out: Path) -> Path:
    """Call ``from_pretrained`` and ``save_pretrained``."""
    AutoModelForCausalLM.from_pretrained(path).save_pretrained(out, max_shard_size="60KB")
    return out


TOOLS: Mapping[str, Callable[[Path, Path], Path]] = {
    "Trainer": partial(with_transformers, 9),
    "accelerate": with_accelerate,
    "Lightning": with_lightning,
    "DCP": with_dcp,
    "torchtitan": with_dcp,
    "Megatron": with_dcp,
    "torch": with_torch,
    "save_pretrained": with_pretrained,
    SHARDS: partial(with_transformers, 13),
    FSDP: partial(with_ranks, "fsdp2_sharded"),
    ZERO2: partial(with_ranks, "zero_2"),
    ZERO3: partial(with_ranks, "zero_3"),
}
"""By name of the sample. The other samples have no library here that resumes them."""


def verdict_of(path: Path) -> Resumability:
    """Return the verdict on a checkpoint of another tool; every byte is read."""
    return verify_folder(str(path)).verdict
