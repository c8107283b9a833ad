"""Worlds that save through DeepSpeed in every stage, and then load what all of them saved.

python zero_reshard_worker.py FOLDER PORT...

Starts the ranks of worlds of 1, 2, ... ranks, which meet at the ports. Each rank writes a line of
JSON per pair (what saved, what loaded, what differs) to ``found-<ranks>-<rank>`` in the folder.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from resilient.state_dict.deepspeed import ZeroModel, ZeroOptimizer, parameter_locations, refresh
from resilient.state_dict.sharding import FlatShard
from resilient.state_dict.snapshot import Part
from tests.process.deepspeed_forks import exit_codes, fork_world, preload
from tests.process.reshard_worker import job_of
from tests.process.resharding import (
    OTHER_RATE,
    RATE,
    Odd,
    Rank,
    bits,
    moments_of,
    rate_of,
    wrong_groups,
    wrong_moments,
)

STAGES = ["zero0", "zero1", "zero2", "zero3"]
LAYOUTS = {
    1: ["single", *STAGES],
    2: ["ddp", "flat", *STAGES, "zero1off", "zero3off"],
    3: ["fsdp", *STAGES, "zero0bf16", "zero2bf16"],
    4: [*STAGES, "zero1bf16", "zero3bf16"],
}
SAVERS = [f"{layout}-{size}" for size, layouts in LAYOUTS.items() for layout in layouts]


class Trained(Odd):
    """Whatever is hard to cut, and a loss over all of it."""

    def forward(self, scale):
        dtype = self.large.weight.dtype
        ids = torch.arange(11)
        parts = [self.head(self.embed(ids))]
        for layer in (self.uneven, self.thin, self.large):
            rows = torch.linspace(-1, 1, 2 * layer.in_features, dtype=dtype)
            parts.append(layer(rows.view(2, -1)))
        return scale * sum(one.float().square().mean() for one in parts)


class Zero:
    """A job over a DeepSpeed engine."""

    def __init__(self, layout, seed) -> None:
        import deepspeed

        # An operator for inference that DeepSpeed would compile here.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self.low = torch.bfloat16 if layout.endswith("bf16") else torch.float32
        stage = {"stage": int(layout[4])}
        if layout.endswith("off"):
            stage["offload_optimizer"] = {"device": "cpu"}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": stage | {"sub_group_size": 80_000},
            "bf16": {"enabled": self.low == torch.bfloat16},
            "gradient_clipping": 0.0,
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
        }
        model = Trained(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate_of(seed))
        self.engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        self.parts = {
            "model": Part(ZeroModel(self.engine)),
            "optimizer": Part(ZeroOptimizer(self.engine)),
        }
        self.require_partitions(stage["stage"])

    def require_partitions(self, stage):
        held = sum(home.count for home in parameter_locations(self.engine))
        total = sum(one.numel() for one in Odd(1).parameters())
        size = dist.get_world_size()
        assert held <= total / size + 50 if stage else held == total, (held, total)

    def spoil(self, seed):
        """Put other weights everywhere: what the last load left must not help this one."""
        self.give_weights(Odd(seed))
        for group in self.engine.basic_optimizer.param_groups:
            group["lr"] = OTHER_RATE
        self.engine.basic_optimizer.state.clear()

    def give_weights(self, plain):
        named = dict(plain.named_parameters())
        with torch.no_grad():
            for home in parameter_locations(self.engine):
                part, whole = home.part_of(home.flat), named[home.name].reshape(-1)
                if home.is_whole:
                    part.copy_(whole.view(part.shape))
                else:
                    part.memory.copy_(whole[home.start : home.start + home.count])
            for name, one in plain.named_buffers():
                self.engine.module.get_buffer(name).copy_(one)
        refresh(self.engine)

    def give_moments(self):
        state = self.engine.basic_optimizer.state
        for home in parameter_locations(self.engine):
            state[home.flat] = moments_of(home.flat.detach())

    def check(self, plain):
        """Return what is not as in the plain model."""
        expected = plain.state_dict()
        state = self.parts["model"].stateful.state_dict()
        wrong = [name for name in expected if not as_expected(state[name], expected[name])]
        optimizer = self.parts["optimizer"].stateful.state_dict()
        for name, one in optimizer["state"].items():
            wrong += [f"{name} {key}" for key in wrong_moments(one, expected[name], as_expected)]
        if optimizer["state"].keys() != dict(plain.named_parameters()).keys():
            wrong.append(f"state of {sorted(optimizer['state'])}")
        return wrong + wrong_groups(optimizer) + self.wrong_low(expected)

    def wrong_low(self, expected):
        """Return the weights that the model computes with that were not rounded from the right."""
        import deepspeed

        named = dict(self.engine.module.named_parameters())
        gathered = [one for one in named.values() if hasattr(one, "ds_id")]
        with deepspeed.zero.GatheredParameters(gathered, enabled=bool(gathered)):
            return [
                f"{name} as it is computed with"
                for name, one in named.items()
                if not torch.equal(bits(one), bits(expected[name].to(self.low)))
            ]

    def differs_after_a_step(self, plain):
        """Return what a step makes of the loaded state that it does not make of the plain one."""
        optimizer = torch.optim.AdamW(plain.parameters(), lr=RATE)
        for one in plain.parameters():
            optimizer.state[one] = moments_of(one.detach())
        plain(1.0).backward()
        optimizer.step()
        self.engine.backward(self.engine(1.0))
        self.engine.step()
        expected, state = plain.state_dict(), self.parts["model"].stateful.state_dict()
        return [
            f"{name} after a step"
            for name, one in state.items()
            if not torch.allclose(*halves(one, expected[name]), rtol=1e-4, atol=1e-5)
        ]


def halves(found, whole):
    """Return what this rank holds of a tensor, and the same of the whole one."""
    if not isinstance(found, FlatShard):
        return found.float(), whole.float()
    stop = found.start + found.memory.numel()
    return found.memory, whole.reshape(-1)[found.start : stop]


def as_expected(found, whole):
    if tuple(found.shape) != tuple(whole.shape):
        return False
    if isinstance(found, FlatShard):
        found, whole = halves(found, whole)
    return torch.equal(bits(found), bits(whole))


def main(folder, ports):
    preload()
    warnings.simplefilter("ignore")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    started = []
    for size, port in zip(LAYOUTS, ports, strict=True):
        ranks = fork_world(size, port, partial(be_a_rank, folder))
        if ranks is None:
            return
        started += ranks
    assert exit_codes(started) == {0}


def be_a_rank(folder):
    rank = Rank(folder)
    world = rank.world
    for layout in LAYOUTS[world.size]:
        rank.save(layout, saved_job_of(layout))
    (folder / f"saved-{world.size}-{world.rank}").touch()
    while len(list(folder.glob("saved-*"))) < sum(LAYOUTS):
        time.sleep(0.05)
    with (folder / f"found-{world.size}-{world.rank}").open("w") as file:
        for layout in LAYOUTS[world.size]:
            for found in load_all(layout, rank):
                file.write(json.dumps(found) + "\n")
    rank.leave()


def saved_job_of(layout):
    if not layout.startswith("zero"):
        return job_of(layout, seed=1)
    job = Zero(layout, seed=1)
    # With more digits than half precision has.
    job.give_weights(Odd(seed=1))
    return job


STAGES_SAVED = [one for one in SAVERS if one.partition("-")[0] in STAGES]


def savers_for(layout, ranks):
    """Return what a layout loads: every stage what every stage saved, and enough of the rest."""
    if layout in STAGES:
        return SAVERS if ranks in (2, 3) else STAGES_SAVED
    if layout.startswith("zero"):
        return ["single-1", "ddp-2", "zero1-2", "zero3-3", "zero2bf16-3", "zero3bf16-4"]
    return [one for one in SAVERS if one.startswith("zero")]


def load_all(layout, rank):
    """Yield what differs after each load."""
    is_zero = layout.startswith("zero")
    job = Zero(layout, seed=2) if is_zero else None
    savers = savers_for(layout, rank.world.size)
    for number, saver in enumerate(savers):
        if is_zero:
            job.spoil(seed=2)
        else:
            job = job_of(layout, seed=2)
        if number % 2:
            job.give_moments()
        wrong = rank.load(saver, layout, job)
        if layout in STAGES and saver == savers[-1]:
            wrong += job.differs_after_a_step(Trained(seed=1))
        yield saver, f"{layout}-{rank.world.size}", wrong


if __name__ == "__main__":
    main(Path(sys.argv[1]), list(map(int, sys.argv[2:])))
