"""What a run of Transformers draws from torch's global stream for its loaders, drawn here too.

Ours leave that stream alone, so that no evaluation changes what is trained after it. Theirs draw
one number for each loader that is begun, and where samples are grouped by length the order of the
epoch behind it. So that order depends on everything that was drawn before, and what it was drawn
from is kept with the position in the data.
"""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from resilient.errors import IncompatibleCheckpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.train.data.sampling import Cursor


@dataclass(frozen=True, slots=True)
class Streams:
    """Where torch's global stream stood when a run of theirs began to group by length.

    Attributes:
        seed: what it was seeded with.
        is_known: whether nothing that we cannot draw again came after that (``model_init``).
    """

    seed: int
    is_known: bool = True


def draw_for_loader(cursor: Cursor) -> None:
    """Draw what a loader's iterator takes from torch's global stream, in a run that did so."""
    if cursor.origin:
        _draw_number(None)


def draw_for_epoch(cursor: Cursor) -> None:
    """Draw what theirs draw when an epoch begins. Collective, where the order is drawn too.

    Theirs would part ranks whose streams have come apart; here all take the order of rank 0.
    """
    draw_for_loader(cursor)
    if not cursor.origin or cursor.streams is None:
        return
    shared = [packed(torch.get_rng_state())]
    if dist.is_initialized():
        dist.broadcast_object_list(shared, src=0)
    cursor.drawn = shared[0]
    torch.randperm(cursor.size)


def drawn_order(cursor: Cursor) -> torch.Tensor:
    """Return the random order of an epoch that was drawn: int64 indices, shape (samples,)."""
    generator = torch.Generator()
    state = torch.frombuffer(bytearray(base64.b64decode(cursor.drawn)), dtype=torch.uint8)
    generator.set_state(state)
    return torch.randperm(cursor.size, generator=generator)


def packed(state: torch.Tensor) -> str:
    """Return a generator's state (uint8) as text."""
    return base64.b64encode(state.numpy().tobytes()).decode()


def seen_of(random: Mapping[str, Any] | None, history: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a checkpoint of theirs shows of the stream, for :func:`find_drawn`.

    Args:
        random: the random state of rank 0, if it was saved.
        history: of logs; an evaluation draws a number.
    """
    evaluated = [
        math.ceil(entry["epoch"]) - 1
        for entry in history
        if any(name.startswith("eval_") for name in entry)
    ]
    return {"stream": packed(random["cpu"]) if random else "", "evaluated": evaluated}


def find_drawn(origin: Mapping[str, Any], streams: Streams, size: int) -> str:
    """Return what the order of the epoch that is under way was drawn from.

    Everything is drawn again from the seed on. That it was all is proven by the state that was
    saved; where more was drawn (dropout on a CPU) the order of the first epoch still came first.

    Args:
        origin: of the cursor, with what :func:`seen_of` returned.
        streams: as the run began.
        size: samples in the training set.

    Raises:
        IncompatibleCheckpoint: nobody can know.
    """
    epoch, evaluated = int(origin["epoch"]), list(origin.get("evaluated", ()))
    generator = torch.Generator().manual_seed(streams.seed)
    drawn = ""
    for number in range(-1, epoch + 1):
        if number >= 0:
            _draw_number(generator)
            drawn = packed(generator.get_state())
            torch.randperm(size, generator=generator)
        for _ in range(evaluated.count(number)):
            _draw_number(generator)
    is_proven = packed(generator.get_state()) == origin.get("stream")
    if is_proven or (epoch == 0 and streams.is_known):
        return drawn
    why = "" if streams.is_known else ", and `model_init` drew from it before"
    raise IncompatibleCheckpoint(
        f"the checkpoint is in the middle of epoch {epoch} of samples that are grouped by length, "
        "and nothing says in which order: Transformers draws it from torch's global stream, of "
        f"which it does not save where it stood then{why}; going on in another order would leave "
        "samples out and repeat others",
        hint="take a checkpoint from the end of an epoch or from the first one, with the seed "
        "that the run had, or begin anew from the weights with `trainer.load_model(...)`",
    )


def _draw_number(generator: torch.Generator | None) -> None:
    torch.empty((), dtype=torch.int64).random_(generator=generator)
