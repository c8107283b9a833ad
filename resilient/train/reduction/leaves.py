"""Which micro-batches of each step this rank loads, and in which order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.strategies.canonical.tree import plan_for
from resilient.train.arguments.reduction import is_canonical, micro_batches
from resilient.train.data.orders import Sampling
from resilient.train.data.sampling import MicroBatch, ResumableSampler
from resilient.world.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resilient.train.arguments import TrainingArguments
    from resilient.train.data.sampling import Cursor, Deal


class LeafSampler(ResumableSampler):
    """Yields the micro-batches of a run of leaves, step after step, to the end of the epoch.

    A round of the data is a step: it has one micro-batch for each leaf of the tree.

    Args:
        cursor: where to begin.
        deal: how an epoch is cut; its ranks are the leaves.
        leaves: those of this rank.
        sampling: the order of samples.
    """

    def __init__(
        self, cursor: Cursor, deal: Deal, leaves: range, sampling: Sampling | None = None
    ) -> None:
        super().__init__(cursor, deal, leaves.start, sampling)
        self.leaves = leaves

    def __iter__(self) -> Iterator[MicroBatch]:
        cursor, deal = self.cursor, self.deal
        seed, epoch, start = cursor.seed, cursor.epoch, cursor.samples
        for turn, dealt in enumerate(self._rounds()):
            for leaf, indices in zip(self.leaves, dealt, strict=True):
                place = start + turn * deal.round_samples + leaf * deal.batch
                yield MicroBatch(indices, (seed, epoch, place))

    def __len__(self) -> int:
        return super().__len__() * len(self.leaves)

    def _rounds(self) -> Iterator[list[list[int]]]:
        """Yield the indices of each leaf, for each step."""
        cursor, deal = self.cursor, self.deal
        if not self.leaves:
            return
        order, start = self.begin_order(), cursor.samples
        if type(self.sampling).batches is not Sampling.batches:
            # Batches that are no runs of the order: each leaf's are made by themselves.
            each = [self.sampling.batches(order, cursor, deal, leaf) for leaf in self.leaves]
            yield from map(list, zip(*each, strict=True))
            return
        for turn in range(deal.rounds_after(start)):
            place = start + turn * deal.round_samples
            yield [deal.micro_batch(order, place, leaf) for leaf in self.leaves]


def seats_of(args: TrainingArguments, world: World) -> World:
    """Return among how many micro-batches of a round the data is dealt: ranks, or leaves."""
    return World(0, micro_batches(args)) if is_canonical(args) else world


def sampler_for(
    args: TrainingArguments,
    world: World,
    cursor: Cursor,
    deal: Deal,
    sampling: Sampling | None = None,
) -> ResumableSampler:
    """Return what yields this rank's micro-batches."""
    if not is_canonical(args):
        return ResumableSampler(cursor, deal, world.rank, sampling)
    run = plan_for(micro_batches(args), world.size).runs[world.rank]
    return LeafSampler(cursor, deal, range(*run), sampling)
