"""``parallelism="auto"``: look at the model and the machines, choose, and say why."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from resilient.environment import read_integer
from resilient.events import Event
from resilient.strategies.choosing import MachineFacts, ModelFacts, choose
from resilient.strategies.recomputing import layers_of
from resilient.train.arguments.checks import check
from resilient.train.arguments.distribution import AUTO, layer_classes
from resilient.train.parallel import hidden_size_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from resilient.train.arguments import TrainingArguments
    from resilient.train.session import Session

# Bytes that an optimizer keeps of a parameter, by what its name begins with or holds.
_KEPT = (
    ("4bit", 1.0),
    ("8bit", 2.0),
    ("adafactor", 0.1),
    ("galore", 2.0),
    ("apollo", 2.0),
    ("lion", 4.0),
    ("adagrad", 4.0),
    ("rmsprop", 4.0),
    ("muon", 4.0),
    ("schedule_free_sgd", 4.0),
    ("sgd", 4.0),
)
_TWO_MOMENTS = 8.0


@dataclass(frozen=True, slots=True)
class ParallelismChosen(Event):
    """How ranks share the model was left to us, and follows from its size and their memory."""

    arguments: Mapping[str, object]
    reasons: tuple[str, ...]

    def line(self) -> str:
        """Say what was chosen and why, one reason to a line."""
        shown = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return f"parallelism auto: {shown}" + "".join(f"\n  {one}" for one in self.reasons)


def decide_parallelism(args: TrainingArguments, session: Session, model: nn.Module) -> None:
    """Put what is chosen in place of ``parallelism="auto"``. Collective.

    Raises:
        ConfigError: the model fits on no ranks as many as these.
    """
    if args.parallelism != AUTO:
        return
    choice = choose(model_facts(args, model), machine_facts(args, session))
    for name, value in choice.arguments.items():
        setattr(args, name, value)
    check(args)
    if session.world.is_coordinator:
        session.emit(ParallelismChosen(choice.arguments, choice.reasons))


def model_facts(args: TrainingArguments, model: nn.Module) -> ModelFacts:
    """Return what of the model and of how it is trained decides."""
    parameters = list(model.parameters())
    trained = [one for one in parameters if one.requires_grad]
    numbers = sum(one.numel() for one in parameters)
    kept = next((size for word, size in _KEPT if word in args.optim), _TWO_MOMENTS)
    state = sum(one.nbytes for one in parameters)
    state += sum(one.nbytes + int(kept * one.numel()) for one in trained)
    layers = layers_of(model, layer_classes(args))
    return ModelFacts(
        numbers,
        state / max(1, numbers),
        max((one.element_size() for one in parameters), default=4),
        max((sum(p.numel() for p in one.parameters()) for one in layers), default=numbers),
        len(layers),
        _between_bytes(args, model),
        bool(getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)),
    )


def _between_bytes(args: TrainingArguments, model: nn.Module) -> int:
    """Return what a layer hands on in a micro-batch of the longest samples; 0: not known."""
    config = getattr(model, "config", None)
    longest = int(getattr(config, "max_position_embeddings", 0) or 0)
    number_bytes = 2 if args.bf16 or args.fp16 else 4
    return hidden_size_of(model) * longest * args.per_device_train_batch_size * number_bytes


def machine_facts(args: TrainingArguments, session: Session) -> MachineFacts:
    """Return what of the ranks decides; the least memory of any of them counts. Collective."""
    ranks = session.world.size
    beside = min(ranks, read_integer(os.environ, "LOCAL_WORLD_SIZE", 0, least=0) or ranks)
    if ranks % beside:
        beside = ranks  # hosts differ, and no layout would fit them all
    size = torch.tensor(_memory_bytes(session.device, beside), device=session.device)
    if ranks > 1:
        dist.all_reduce(size, dist.ReduceOp.MIN)
    return MachineFacts(ranks, beside, int(size), args.gradient_accumulation_steps)


def _memory_bytes(device: torch.device, beside: int) -> int:
    """Return the memory of a rank: its accelerator's, or its share of the host's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    # All that there is, not what is free now: another life must choose the same.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // beside
