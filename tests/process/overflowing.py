"""Gradients that overflow in the shard of one rank, in one step; and what each rank made of it."""

from __future__ import annotations

import json
import os
from hashlib import sha256

from torch.distributed.tensor import DTensor

from resilient import TrainerCallback

STEP = 3


class Overflow(TrainerCallback):
    """Puts an infinity into a shard of rank 1 and writes ``scaled-<rank>``: a line for each step.

    A line has the scale, the rate, how often the optimizer stepped, and the bytes that are held:
    in shards, and by every rank alike.
    """

    def __init__(self, trainer, folder) -> None:
        self._trainer = trainer
        self._rank = int(os.environ["RANK"])
        self._lines = []
        self._folder = folder

    def on_train_begin(self, args, state, control, /, **_):
        updates = self._trainer.precision
        clip = updates.clip

        def with_infinity(optimizer, parameters, max_norm):
            if state.global_step == STEP - 1 and self._rank == 1:
                grads = [one.grad for one in parameters if one.grad is not None]
                most_cut = max((one for one in grads if local(one).numel()), key=cuts)
                local(most_cut).view(-1)[0] = float("inf")
            return clip(optimizer, parameters, max_norm)

        updates.clip = with_infinity

    def on_step_end(self, args, state, control, /, **context):
        optimizer, held = context["optimizer"], context["model"].parameters()
        shards, whole = sha256(), sha256()
        for one in held:
            (shards if cuts(one) else whole).update(local(one.detach()).numpy().tobytes())
        line = {
            "scale": self._trainer.precision.scaler.get_scale(),
            "rate": context["lr_scheduler"].get_last_lr(),
            "steps": sorted({float(one["step"]) for one in optimizer.state.values() if one}),
            "shards": shards.hexdigest(),
            "whole": whole.hexdigest(),
        }
        self._lines.append(line)

    def on_train_end(self, args, state, control, /, **_):
        (self._folder / f"scaled-{self._rank}").write_text(json.dumps(self._lines))


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def cuts(tensor):
    """Return over how many dimensions of the mesh a tensor is cut; what is no DTensor over one."""
    if not isinstance(tensor, DTensor):
        return 1
    return sum(not one.is_replicate() for one in tensor.placements)
