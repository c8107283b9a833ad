"""One output of a model over a whole evaluation: held per batch, gathered, put in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from resilient.errors import ConfigError
from resilient.train.evaluation.gather import (
    concatenate,
    gather_objects,
    gather_rows,
    is_column,
    nested,
    pad_and_concatenate,
    to_numpy,
    zipped,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.train.arguments import TrainingArguments
    from resilient.train.evaluation.evaluate import Share


@dataclass(frozen=True, slots=True)
class Joining:
    """How outputs leave the device and become one.

    Attributes:
        every: batches after which they are gathered and leave the device; None: at the end.
        concat: join batches; else there is a list of them.
        objects: gather by pickling, so that they may hold more than tensors.
    """

    every: int | None = None
    concat: bool = True
    objects: bool = False

    @classmethod
    def of(cls, args: TrainingArguments) -> Joining:
        """Return what ``args`` say."""
        return cls(
            args.eval_accumulation_steps, args.eval_do_concat_batches, args.eval_use_gather_object
        )

    @property
    def by_pickle(self) -> bool:
        """Whether batches stay apart until the end."""
        return self.objects or not self.concat


class Column:
    """What the batches of one rank have in one place: predictions, labels or inputs.

    Args:
        share: which batches are this rank's.
        joining: how they become one.
    """

    def __init__(self, share: Share, joining: Joining) -> None:
        self._share = share
        self._joining = joining
        self._held: list[Any] = []
        self._empty: Any = None
        self._spilled: list[Any] = []

    def add(self, value: Any) -> None:
        """Hold the value of one more batch; its first dimension is samples."""
        self._held.append(nested(torch.Tensor.detach, value))

    def spill(self) -> None:
        """Take what is held off the device, as tensors together with the other ranks. Collective.

        Every rank must spill as often as the others, whatever it holds, and all of its columns.
        """
        held, self._held = self._held, []
        if self._joining.by_pickle:
            self._spilled += [] if self._share.is_stand_in else [nested(to_numpy, x) for x in held]
            return
        if held:
            self._empty = zipped(held[:1], _nothing_of)
        if (together := zipped(held or [self._empty], self._gathered)) is not None:
            self._spilled.append(together)

    def result(self) -> Any:
        """Return what was spilled: arrays in the dataset's order, or a list of its batches.

        Collective.
        """
        return self._batches() if self._joining.by_pickle else zipped(self._spilled, self._ordered)

    def _batches(self) -> Any:
        """Gather the batches of all ranks as objects and put them in order."""
        by_rank = gather_objects(self._spilled, self._share.world.size)
        turns = range(self._share.batches)
        ordered = [by_rank[turn % len(by_rank)][turn // len(by_rank)] for turn in turns]
        if any(one is None for one in ordered):
            return None
        return zipped(ordered, concatenate) if self._joining.concat else ordered

    def _gathered(self, leaves: Sequence[Any]) -> Any:
        """Join the leaves of this rank's batches, and those with the other ranks'."""
        ranks, is_here = self._share.world.size, not self._share.is_stand_in
        if isinstance(leaves[0], torch.Tensor):
            rows = pad_and_concatenate(leaves)
            return gather_rows(rows if is_here else rows[:0], ranks).cpu()
        if ranks > 1 or not is_column(leaves[0]):
            raise ConfigError(
                f"the model returned a `{type(leaves[0]).__name__}`, which {ranks} ranks cannot "
                "gather as tensors: set `eval_use_gather_object`, or name that output in "
                "`ignore_keys`"
            )
        return concatenate(leaves)

    def _ordered(self, chunks: Sequence[Any]) -> Any:
        """Join what was spilled at different times and put it into the dataset's order."""
        if not isinstance(chunks[0], torch.Tensor):
            return concatenate(chunks)  # of one rank, so it is in order
        rows, order = pad_and_concatenate(chunks), self._order()
        if len(order) != len(rows):
            raise ConfigError(
                f"the model returned {len(rows)} rows for {len(order)} samples: outputs need the "
                "samples as their first dimension"
            )
        return to_numpy(torch.empty_like(rows).index_copy_(0, torch.tensor(order), rows))

    def _order(self) -> list[int]:
        """Return the places of rows in the dataset as they come: by spill, by rank, in turn."""
        shares = [self._share.of(rank) for rank in range(self._share.world.size)]
        every = self._joining.every or max(len(shares[0]), 1)
        return [
            place
            for first in range(0, max(len(shares[0]), 1), every)
            for batches in shares
            for batch in batches[first : first + every]
            for place in batch
        ]


def _nothing_of(leaves: Sequence[Any]) -> Any:
    is_tensor = isinstance(leaves[0], torch.Tensor)
    return (pad_and_concatenate(leaves) if is_tensor else leaves[0])[:0]
