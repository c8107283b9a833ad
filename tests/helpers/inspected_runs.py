"""A run of ours whose checkpoints are worth looking at, and names that nobody should have."""

from __future__ import annotations

import math

import torch
from torch import nn

from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.clock import SystemClock
from resilient.engine_factory import open_engine
from resilient.events import Emitter
from resilient.state_dict.statefuls import collect_parts
from tests.helpers.cli_repositories import flip_bit, truncate_file
from tests.helpers.told import killed_run

EVIL = "<img src=x onerror=\"document.title='taken'\">&amp;\x1b[31m\u202e"
LAYERS = 12


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = nn.Linear(width, 3 * width)


class Net(nn.Module):
    """Twelve layers, a table that is never trained, and a head of half the precision."""

    def __init__(self, width=16):
        super().__init__()
        self.wte = nn.Embedding(4096, width).requires_grad_(requires_grad=False)
        self.h = nn.ModuleList(Block(width) for _ in range(LAYERS))
        self.head = nn.Linear(width, 64, bias=False).bfloat16()


def write_inspected_run(folder):
    """Write two lives, of three checkpoints and of two; a NaN comes in the last."""
    (folder / "events").mkdir(parents=True)
    text = "\n".join(killed_run()) + "\n"
    (folder / "events" / "agent.jsonl").write_text(text, encoding="utf-8")
    torch.manual_seed(3)
    net = Net()
    parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=3e-4)
    for steps in ((10, 20, 30), (40, 50)):
        objects = collect_parts({"model": net, "optimizer": optimizer}, 1, rng=True)
        checkpointer = open_engine(str(folder), emit=Emitter(SystemClock()))
        checkpointer.resume(objects.parts)
        for step in steps:
            _train(net, optimizer, step)
            config = {"seed": 5, "optim": {"lr": 3e-4 / step}, EVIL: f"{EVIL} {step}"}
            objects = collect_parts({"model": net, "optimizer": optimizer}, 1, rng=True)
            about = CheckpointInfo(
                config=config, data={"samples": step * 8}, metrics={"loss": 4 / step}
            )
            checkpointer.save(step, objects.parts, about)
            checkpointer.wait()
        checkpointer.close()
    return folder


def spoil(folder):
    """Damage one checkpoint so that its size says it, and another so that its bytes alone do."""
    truncate_file(folder / "checkpoint-20-g1" / "model.r00000.safetensors", 300)
    flip_bit(folder / "checkpoint-30-g1" / "optimizer.r00000.safetensors")


def _train(net, optimizer, step):
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.randn_like(parameter) / step
    optimizer.step()
    if step == 50:
        with torch.no_grad():
            net.h[7].attn.weight[3, :2] = math.nan
