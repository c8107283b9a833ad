"""What ranks have in common that save in every layout they know and load what all have saved."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn

from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.clock import SystemClock
from resilient.distributed.launch_env import read_launch
from resilient.distributed.torch_kv_store import connect, join_process_group
from resilient.engine_factory import open_engine
from resilient.events import Emitter

# What every optimizer is saved with; the other learns at another rate until it is loaded.
RATE, OTHER_RATE, STEPS = 0.5, 1e-3, 17.0


class Odd(nn.Module):
    """Whatever is hard to cut: uneven, thin, tied, empty, without dimensions; and one large."""

    def __init__(self, seed) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.uneven = nn.Linear(3, 7)
        self.thin = nn.Linear(5, 2)
        self.large = nn.Linear(301, 300)
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(3, 2, dtype=torch.bool))
        self.register_buffer("narrow", torch.zeros(4, 3, dtype=torch.bfloat16))
        self.register_buffer("nothing", torch.zeros(0, 3))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for one in [*self.parameters(), *self.buffers()]:
                one.copy_(torch.randn(one.shape, generator=generator) * 3)


def rate_of(seed):
    return OTHER_RATE if seed == 2 else RATE


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def averages_of(value):
    """Return what follows from a parameter element by element, exactly, in any layout."""
    return {"exp_avg": value * 0.5, "exp_avg_sq": value * value}


def moments_of(value):
    return {"step": torch.tensor(STEPS), **averages_of(value)}


def wrong_moments(state, value, is_right):
    """Return the names of those moments of a parameter that ``is_right(found, right)`` denies."""
    wrong = [] if float(state["step"]) == STEPS else ["step"]
    return wrong + [
        name for name, right in averages_of(value).items() if not is_right(state[name], right)
    ]


def wrong_groups(optimizer):
    return [] if [one["lr"] for one in optimizer["param_groups"]] == [RATE] else ["groups"]


class Rank:
    """This process among the ranks of its world, and the repositories in a folder."""

    def __init__(self, folder) -> None:
        torch.set_num_threads(1)
        launch = read_launch(os.environ)
        self.world = launch.world
        self._folder = folder
        self._board = connect(self.world, launch.host, launch.port, hosted=False)
        join_process_group(self._board, self.world, "gloo", "0", 120)

    def _opened(self, repository, scope):
        url, emit = str(self._folder / repository), Emitter(SystemClock())
        return open_engine(url, self.world, self._board, emit, scope=scope)

    def save(self, layout, job):
        """Save a job as ``<layout>-<ranks>``."""
        job.give_moments()
        checkpointer = self._opened(f"{layout}-{self.world.size}", f"save {layout}")
        checkpointer.resume({})
        checkpointer.save(5, job.parts, CheckpointInfo(strategy=layout))
        checkpointer.close()

    def load(self, saver, layout, job):
        """Load into a job what was saved as ``saver``; return what is not as it was."""
        checkpointer = self._opened(saver, f"{saver} to {layout}")
        resumed = checkpointer.resume(job.parts)
        checkpointer.close()
        return job.check(Odd(seed=1)) if resumed else ["nothing was loaded"]

    def leave(self):
        dist.barrier()
        dist.destroy_process_group()
