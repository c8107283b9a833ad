"""One rank of a world that saves in every layout it knows, and then loads what all worlds saved.

python reshard_worker.py FOLDER

It says ``saved`` when its own repositories are there, waits for the file ``go-<ranks>``, and then
prints one line of JSON per pair (what saved, what loaded, what differs).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from resilient.state_dict.optimizer import NamedOptimizer
from resilient.state_dict.snapshot import Part
from resilient.strategies.ddp import DdpStrategy
from resilient.strategies.fsdp import FsdpStrategy
from resilient.strategies.fsdp1 import Fsdp1Strategy
from resilient.strategies.fsdp_options import FsdpOptions
from resilient.strategies.module_wrapper import find_redirect
from resilient.train.arguments import TrainingArguments
from resilient.train.model.precision import Precision
from tests.process.resharding import (
    RATE,
    Odd,
    Rank,
    bits,
    moments_of,
    rate_of,
    wrong_groups,
    wrong_moments,
)

CPU = torch.device("cpu")
LAYOUTS = {1: ["single", "fsdp"], 2: ["ddp", "fsdp", "flat"], 3: ["ddp", "fsdp", "flat"]}
LAYOUTS[4] = ["ddp", "fsdp", "hybrid", "columns", "grid", "flat_hybrid"]
SAVERS = [f"{layout}-{size}" for size, layouts in LAYOUTS.items() for layout in layouts]


def columns(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    _distribute(model, mesh, lambda one: Shard(one.dim() - 1))


def _distribute(model, mesh, placement):
    made = {}
    for module in model.modules():
        for name, one in list(module.named_parameters(recurse=False)):
            if one not in made:
                made[one] = nn.Parameter(distribute_tensor(one.detach(), mesh, [placement(one)]))
            setattr(module, name, made[one])


def hybrid(model):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    fully_shard(model.uneven, mesh=mesh)
    fully_shard(model, mesh=mesh)


def grid(model):
    """FSDP over tensor parallel: both cut the rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    _distribute(model, mesh["tensor"], lambda _: Shard(0))
    fully_shard(model, mesh=mesh["data"])


class Flat:
    """A job over FSDP1, which hides its parameters: in vectors of its own with three ranks."""

    def __init__(self, seed, *, hybrid) -> None:
        flattens = dist.get_world_size() == 3
        options = FsdpOptions(
            version=1,
            layer_classes=("Linear",),
            use_orig_params=not flattens,
            shard_size=2 if hybrid else 0,
        )
        strategy = Fsdp1Strategy(CPU, options)
        inside = strategy.prepare(Odd(seed))
        self.model = find_redirect(inside).wrapper
        groups = [{"params": list(inside.parameters())}]
        if not flattens:
            groups = [{"params": [one]} for one in inside.parameters()]
        self.optimizer = torch.optim.AdamW(groups, lr=rate_of(seed))
        self.parts = strategy.bind(
            inside, self.optimizer, Precision(TrainingArguments(), CPU)
        ).parts

    def give_moments(self):
        named = get_model_state_dict(self.model)
        state = get_optimizer_state_dict(self.model, self.optimizer)
        for name, one in state["state"].items():
            one.update(moments_of(named[name]))
        set_optimizer_state_dict(self.model, self.optimizer, state)

    def check(self, plain):
        found = get_model_state_dict(self.model)
        expected = plain.state_dict()
        assert all(isinstance(found[name], DTensor) for name, _ in plain.named_parameters())
        state = get_optimizer_state_dict(self.model, self.optimizer)["state"]
        wrong = [
            n for n, one in found.items() if not torch.equal(bits(full(one)), bits(expected[n]))
        ]
        for name in state:
            wrong += [
                f"{name} {what}" for what in wrong_state(state[name], expected[name], found[name])
            ]
        if state.keys() != dict(plain.named_parameters()).keys():
            wrong.append(f"state of {sorted(state)}")
        if {group["lr"] for group in self.optimizer.param_groups} != {RATE}:
            wrong.append("groups")
        return wrong


class Plain:
    """A job whose parameters are the model's own, DTensors or not."""

    def __init__(self, layout, seed) -> None:
        self.model, self.optimizer = build(layout, seed)
        self.parts = {
            "model": Part(self.model),
            "optimizer": Part(NamedOptimizer(self.model, self.optimizer)),
        }

    def give_moments(self):
        give_moments(self.model, self.optimizer)

    def check(self, plain):
        return check(self.model, self.optimizer, plain)


def job_of(layout, seed):
    if layout in ("flat", "flat_hybrid"):
        return Flat(seed, hybrid=layout == "flat_hybrid")
    return Plain(layout, seed)


def build(layout, seed):
    model = Odd(seed)
    if layout == "ddp":
        DdpStrategy(CPU).prepare(model)
    elif layout == "fsdp":
        FsdpStrategy(CPU, FsdpOptions(layer_classes=("Linear",))).prepare(model)
    elif layout != "single":
        {"hybrid": hybrid, "columns": columns, "grid": grid}[layout](model)
    sharded = {name for name, one in model.named_parameters() if isinstance(one, DTensor)}
    expected = {name for name, _ in model.named_parameters()} if layout not in PLAIN else set()
    assert sharded == expected, f"{layout} is not what it says: {sharded}"
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate_of(seed))
    return model, optimizer


PLAIN = ("single", "ddp")


def give_moments(model, optimizer):
    for one in model.parameters():
        optimizer.state[one] = moments_of(one.detach())


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def wrong_state(state, value, parameter):
    kind = type(parameter.detach())

    def is_right(found, right):
        return type(found) is kind and torch.equal(bits(full(found)), bits(right))

    return wrong_moments(state, value, is_right)


def check(model, optimizer, plain):
    """Return what is not as in the plain model, and prove that training can go on."""
    wrong = []
    expected = dict(plain.state_dict())
    for name, one in model.state_dict().items():
        if not torch.equal(bits(full(one)), bits(expected[name])):
            wrong.append(name)
    if model.head.weight is not model.embed.weight:
        wrong.append("untied")
    for name, one in model.named_parameters():
        wrong += [
            f"{name} {what}" for what in wrong_state(optimizer.state[one], expected[name], one)
        ]
        one.grad = torch.ones_like(one)
    wrong += wrong_groups({"param_groups": optimizer.param_groups})
    optimizer.step()
    return wrong


def main(folder):
    rank = Rank(folder)
    size = rank.world.size
    for layout in LAYOUTS[size]:
        rank.save(layout, job_of(layout, seed=1))
    say("saved")
    while not (folder / f"go-{size}").exists():
        time.sleep(0.05)
    for layout in LAYOUTS[size]:
        for number, saver in enumerate(SAVERS):
            job = job_of(layout, seed=2)
            if number % 2:
                job.give_moments()
            wrong = rank.load(saver, layout, job)
            say(json.dumps([saver, f"{layout}-{size}", wrong]))
    say("loaded")
    rank.leave()


def say(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
