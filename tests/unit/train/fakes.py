"""A Checkpointer in memory: a store that outlives the trainers of a test."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch

from resilient.checkpoint.resume_selection import ResumeResult
from resilient.errors import IntegrityError, KeyNotFound, SaveFailed
from resilient.format.keys import CheckpointId, parse_checkpoint


def frozen(value):
    """Copy nested state; tensors are cloned."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: frozen(one) for name, one in value.items()}
    if isinstance(value, list):
        return [frozen(one) for one in value]
    return copy.deepcopy(value)


def equal(one, other) -> bool:
    """Compare nested state bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    if hasattr(one, "tolist"):
        return one.tolist() == other.tolist()
    return one == other


@dataclass
class MemoryRepository:
    """What a repository would hold."""

    checkpoints: dict = field(default_factory=dict)
    abouts: dict = field(default_factory=dict)
    lives: int = 0
    failing_saves: list = field(default_factory=list)
    kept: list = field(default_factory=list)
    damaged: set = field(default_factory=set)
    closed: int = 0

    def open(self, url, world, board, **_options):
        return MemoryCheckpointer(self, world)


class MemoryCheckpointer:
    in_flight = None

    def __init__(self, repository, world):
        self.repository = repository
        self.world = world
        self.generation, self.run_id = 0, "run"
        self.failed = None

    def settle(self, wish, *, is_first=True):
        return "auto" if self.repository.checkpoints and not is_first else wish

    def resume(self, parts, *, ref="auto", cause="start", examine=None, guard=None, policy=None):
        self.repository.lives += 1
        self.generation = self.repository.lives
        found = self.committed()
        if ref == "never" or not found:
            return None
        checkpoint = found[0] if ref == "auto" else parse_checkpoint(ref)
        saved = self.repository.checkpoints[checkpoint]
        if examine:
            examine(self.repository.abouts[checkpoint].config)
        for name, part in parts.items():
            if name in saved:
                part.stateful.load_state_dict(frozen(saved[name]))
        if guard and guard.accept:
            guard.accept()
        return ResumeResult(
            checkpoint,
            checkpoint.step,
            self.repository.abouts[checkpoint].config,
            self.world.size,
            tuple(name for name in parts if name not in saved),
        )

    def warm(self, parts):
        pass

    def before_update(self):
        pass

    def save(self, step, parts, about, *, keep=(), overlap=False):
        self.wait()
        checkpoint = CheckpointId(self.generation, step)
        assert checkpoint not in self.repository.checkpoints
        if step in self.repository.failing_saves:
            self.failed = checkpoint
            return checkpoint
        self.repository.checkpoints[checkpoint] = {
            name: frozen(dict(part.stateful.state_dict())) for name, part in parts.items()
        }
        self.repository.abouts[checkpoint] = about
        self.repository.kept.append(tuple(keep))
        return checkpoint

    def wait(self, *, in_every_tier=False):
        if self.failed is not None:
            failed, self.failed = self.failed, None
            raise SaveFailed(f"{failed} was not saved")

    def load_part(self, checkpoint, name, part):
        if checkpoint not in self.repository.checkpoints:
            raise KeyNotFound(f"no object `{checkpoint.manifest_key}`")
        if checkpoint in self.repository.damaged:
            raise IntegrityError(f"`{checkpoint.key('model')}`: content is not what was committed")
        part.stateful.load_state_dict(frozen(self.repository.checkpoints[checkpoint][name]))

    def committed(self):
        return sorted(self.repository.checkpoints, reverse=True)

    def close(self):
        self.repository.closed += 1
        self.wait()
