"""Checkpoints of the Trainer with its weights in shards, with FSDP and with DeepSpeed.

Its own tool makes and resumes each: two ranks where there are ranks.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.damage.samples import (
    ARGUMENTS,
    CONFIG,
    INDEX,
    OPTIMIZER,
    RANDOM,
    SAMPLES,
    SCHEDULE,
    STATE,
    WEIGHTS,
    Loaded,
    Sample,
    load_megatron,
    load_slices,
    load_trainer,
    make_megatron,
    make_titan,
    make_trainer,
)
from tests.services.ports import held_ports

STEP, BESIDE = 6, 4
WORKER = Path(__file__).with_name("rank_worker.py")


class Ranks:
    """A process that makes ranks on demand; to import what they need takes longer than they do."""

    def __init__(self) -> None:
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        environ = {**os.environ, "DS_ACCELERATOR": "cpu"}
        self._parent = subprocess.Popen(
            [sys.executable, str(WORKER)],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
        )
        atexit.register(self.close)

    def close(self) -> None:
        assert self._parent.stdin is not None
        self._parent.stdin.close()
        self._parent.wait(60)

    def train(self, kind: str, out: Path, resume: str | None, **options: Any) -> Loaded:
        """Train in two ranks; return what they began with, and have.

        Raises:
            RuntimeError: a rank failed.
        """
        with tempfile.TemporaryDirectory() as folder, held_ports(1) as (port,):
            answer = f"{folder}/answer.pt"
            asked = {"kind": kind, "out": str(out), "resume": resume, "options": options}
            assert self._parent.stdin is not None
            assert self._parent.stdout is not None
            self._parent.stdin.write(json.dumps({**asked, "answer": answer, "port": port}) + "\n")
            self._parent.stdin.flush()
            line = self._parent.stdout.readline()
            if not line or json.loads(line)["exit"]:
                raise RuntimeError(self._last_words())
            return Loaded(*torch.load(answer, weights_only=False))

    def _last_words(self) -> str:
        self._said.seek(0)
        return self._said.read()[-3000:]


@cache
def ranks() -> Ranks:
    return Ranks()


def make_sharded(kind: str, folder: Path) -> Path:
    """Leave a checkpoint, and an earlier and a later one of the same run beside it."""
    ranks().train(kind, folder, None, save_steps=2)
    return folder / f"checkpoint-{STEP}"


def load_sharded(kind: str, path: Path) -> Loaded:
    return ranks().train(kind, path.parent / "out", str(path), save_strategy="no")


def make_shards(folder: Path) -> Path:
    """Leave a checkpoint whose weights are in three files, and an earlier one beside it."""
    make_trainer(folder)
    path = folder / "checkpoint-12"
    model = AutoModelForCausalLM.from_pretrained(path)
    (path / "model.safetensors").unlink()
    model.save_pretrained(path, max_shard_size="60KB")
    return path


def load_shards(path: Path) -> Loaded:
    return load_trainer(path, 13)


def _of_ranks(name: str, kind: str, **files: str) -> Sample:
    how = "its `train(resume_from_checkpoint=)` in two ranks"
    make, load = partial(make_sharded, kind), partial(load_sharded, kind)
    common = {SCHEDULE: "scheduler.pt", RANDOM: "rng_state_1.pth", STATE: "trainer_state.json"}
    return Sample(name, make, load, how, {**common, **files}, is_general=False)


TAG = f"global_step{STEP}"
SHARDS, FSDP, ZERO2, ZERO3 = (
    "Trainer, shards",
    "Trainer, FSDP",
    "Trainer, ZeRO 2",
    "Trainer, ZeRO 3",
)
SHARDED = [
    Sample(SHARDS, make_shards, load_shards, "its `train(resume_from_checkpoint=)`", {
        WEIGHTS: "model-00001-of-00003.safetensors", INDEX: "model.safetensors.index.json",
        OPTIMIZER: "optimizer.pt", SCHEDULE: "scheduler.pt", RANDOM: "rng_state.pth",
        STATE: "trainer_state.json", CONFIG: "config.json", ARGUMENTS: "training_args.bin"},
        is_general=False),
    _of_ranks(FSDP, "fsdp2_sharded", **{
        WEIGHTS: "pytorch_model_fsdp_0/__1_0.distcp", OPTIMIZER: "optimizer_0/__1_0.distcp",
        INDEX: "optimizer_0/.metadata"}),
    _of_ranks(ZERO2, "zero_2", **{
        WEIGHTS: f"{TAG}/mp_rank_00_model_states.pt", INDEX: "latest",
        OPTIMIZER: f"{TAG}/zero_pp_rank_1_mp_rank_00_optim_states.pt"}),
    _of_ranks(ZERO3, "zero_3", **{
        WEIGHTS: f"{TAG}/zero_pp_rank_1_mp_rank_00_model_states.pt", INDEX: "latest",
        OPTIMIZER: f"{TAG}/zero_pp_rank_1_mp_rank_00_optim_states.pt"}),
]  # fmt: skip
TITAN, MEGATRON = "torchtitan, two files", "Megatron, two files"
SLICED = [
    Sample(TITAN, partial(make_titan, files=2), load_slices, "torch's `dcp_to_torch_save`", {
        SCHEDULE: "__0_0.distcp", OPTIMIZER: "__0_1.distcp"}, is_general=False),
    Sample(MEGATRON, partial(make_megatron, files=2), load_megatron,
           "`torch.load` and `dcp_to_torch_save`", {
        WEIGHTS: "__0_1.distcp", STATE: "common.pt"}, is_general=False),
]  # fmt: skip
ALL = [*SAMPLES, *SHARDED, *SLICED]
