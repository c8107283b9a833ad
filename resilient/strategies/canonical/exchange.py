"""Sums of gradients over ranks, in the order of the tree.

Each rank sums one span of the line of all gradients. It is sent that span of every partial sum
there is, joins them as the tree says, and either tells everyone the result (replicas) or keeps
it (a rank that steps only its span). With one partial per rank this sends as much as the ring of
a native all-reduce does. Spans go in windows, so that buffers stay small.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from resilient.strategies.canonical.tree import Joining

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from resilient.strategies.canonical.layout import Line, Window
    from resilient.strategies.canonical.tree import Plan

WINDOW_BYTES = 32 << 20
# Since torch 2.13 under a new name, and the old one warns.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements of a dense tensor, in the order of its memory, without a copy."""
    return tensor.as_strided((tensor.numel(),), (1,))


def add_in_place(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Add ``right`` to ``left``."""
    return left.add_(right)


@dataclass(slots=True)
class Exchange:
    """Sums over ranks for the tensors of one line.

    Attributes:
        line: how they lie.
        plan: which nodes of the tree each rank sends.
        rank: which of them this is.
        like: has the dtype and device of the tensors.
        window_bytes: how much goes at once.
    """

    line: Line
    plan: Plan
    rank: int
    like: torch.Tensor
    window_bytes: int = WINDOW_BYTES
    windows: list[Window] = field(init=False)
    _room: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.windows = self.line.windows(self.window_bytes // self.like.element_size())

    @property
    def ranks(self) -> int:
        """How many sum together."""
        return len(self.plan.runs)

    def sum_up(self, partials: Sequence[Sequence[torch.Tensor]], window: Window) -> torch.Tensor:
        """Return the mean over all leaves of this rank's span of a window. Collective.

        Args:
            partials: for each node that this rank sends, its flat tensors in the line's order.
            window: one of ``windows``.

        Returns:
            Memory that the next call overwrites.
        """
        lengths = [stop - start for start, stop in window.spans]
        own, counts = lengths[self.rank], [len(nodes) for nodes in self.plan.nodes]
        sent = self._buffer("sent", sum(lengths) * len(partials))
        parts = [
            part
            for span in window.spans
            for tensors in partials
            for part in self._cut(tensors, span)
        ]
        if parts:
            torch.cat(parts, out=sent)
        heard = self._buffer("heard", own * sum(counts))
        dist.all_to_all_single(
            heard,
            sent,
            [own * count for count in counts],
            [length * len(partials) for length in lengths],
        )
        joining: Joining[torch.Tensor] = Joining(self.plan.leaves, add_in_place)
        nodes = [node for nodes in self.plan.nodes for node in nodes]
        for nth, node in enumerate(nodes):
            joining.take(node, heard[nth * own : (nth + 1) * own])
        return joining.root().mul_(1 / self.plan.leaves)

    def tell(self, mine: torch.Tensor, tensors: Sequence[torch.Tensor], window: Window) -> None:
        """Give every rank what each has of a window. Collective.

        Args:
            mine: this rank's span.
            tensors: flat, in the line's order; what others have is copied into them, and what
                this rank has as well.
            window: which one.
        """
        longest = window.longest
        told = self._buffer("told", longest)
        told[: mine.numel()].copy_(mine)
        everything = self._buffer("everything", longest * self.ranks)
        _all_gather(everything, told)
        into: list[torch.Tensor] = []
        source: list[torch.Tensor] = []
        for rank, span in enumerate(window.spans):
            parts = self._cut(tensors, span)
            first = everything[rank * longest : rank * longest + span[1] - span[0]]
            into += parts
            source += torch.split(first, [part.numel() for part in parts])
        torch._foreach_copy_(into, source)

    def mine(self, tensors: Sequence[torch.Tensor], window: Window) -> torch.Tensor:
        """Return this rank's span of a window of some flat tensors."""
        span = window.spans[self.rank]
        room = self._buffer("mine", span[1] - span[0])
        parts = self._cut(tensors, span)
        return torch.cat(parts, out=room) if parts else room

    def _cut(self, tensors: Sequence[torch.Tensor], span: tuple[int, int]) -> list[torch.Tensor]:
        return [tensors[one.tensor][one.start : one.stop] for one in self.line.segments(*span)]

    def _buffer(self, name: str, elements: int) -> torch.Tensor:
        """Return memory that is kept between steps: fresh pages cost more than what is sent."""
        room = self._room.get(name)
        if room is None or room.numel() < elements:
            room = self._room[name] = torch.empty(
                elements, dtype=self.like.dtype, device=self.like.device
            )
        return room[:elements]


def add_gradients(
    left: list[torch.Tensor | None], right: list[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Return the sums of two lists of gradients, in the memory of either.

    One that is missing counts as zeros, as it would if it came from another rank: so zero is
    added to what is there, which makes +0.0 of -0.0.
    """
    both = [(one, other) for one, other in zip(left, right, strict=True) if _has(one, other)]
    if both:
        sums, more = zip(*both, strict=True)
        torch._foreach_add_(list(sums), list(more))
    return [
        one if other is None else other if one is None else one
        for one, other in zip(_zero_added(left, right), _zero_added(right, left), strict=True)
    ]


def _has(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None


def _zero_added(
    these: Iterable[torch.Tensor | None], those: Iterable[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Return ``these``, with zero added where there is nothing of ``those``."""
    return [
        one.add_(0.0) if one is not None and other is None else one
        for one, other in zip(these, those, strict=True)
    ]
