"""Fixed-order tree reduction over ranks.

The leaves of a binary tree are the micro-batches of a step, numbered from 0. A node covers ``2**k``
consecutive leaves, and the number of its first leaf is a multiple of ``2**k``. The last node of
each level may cover fewer leaves. Floating-point addition is commutative but not associative. Every
addition therefore joins the sums of the two halves of one node. The total then has the same bits
for any division of the leaves over ranks. Each rank computes consecutive leaves. The rank sends one
partial sum for each node of the shortest list that covers its leaves.

Parameters are cut into blocks of fixed size, and the blocks are concatenated to one flat buffer. A
block is never divided between ranks. Its gradient sum, norm and optimizer step are computed on the
whole block, at any world size. No kernel therefore sees a tensor whose length depends on the number
of ranks. Each rank sums one span of the buffer of all gradients. The rank receives its span of
every partial sum, and adds the partial sums in the order of the tree. If every rank updates the
whole model, each rank sends its summed span to all ranks. If each rank applies the optimizer step
only to its own span, the summed span stays on the rank. If each rank sends only one partial sum,
the traffic equals that of a ring all-reduce. Ranks exchange their spans in several parts (windows),
so that communication buffers stay small.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

T = TypeVar("T")
# Maximum number of divisions of the leaves that a plan examines.
_WAYS_MAX = 20_000


class Node(NamedTuple):
    """A run of leaves, ``start`` to ``stop - 1``, that is summed as one."""

    start: int
    stop: int


def parent(left: Node, right: Node, leaves: int) -> Node | None:
    """Return the node that has these two halves; None if there is no such node.

    Args:
        left: Left half.
        right: Right half.
        leaves: Number of leaves of the tree.
    """
    half = left.stop - left.start
    is_power = half & (half - 1) == 0
    if left.stop != right.start or not is_power or left.start % (2 * half):
        return None
    stop = min(left.start + 2 * half, leaves)
    return Node(left.start, stop) if right.stop == stop else None


class TreeAccumulator(Generic[T]):
    """Accumulator that joins the values of arriving nodes, from left to right.

    Args:
        leaves: Number of leaves of the tree.
        add: Function that returns the sum of two values, left and right; it may change both.
    """

    def __init__(self, leaves: int, add: Callable[[T, T], T]) -> None:
        self._leaves = leaves
        self._add = add
        self._nodes: list[tuple[Node, T]] = []

    def take(self, node: Node, value: T) -> None:
        """Add the value of a node, and join it as far as possible.

        Raises:
            ValueError: The node does not follow the previous node, so leaves would be missing.
        """
        if self._nodes and self._nodes[-1][0].stop != node.start:
            raise ValueError(f"leaf {node.start} does not follow {self._nodes[-1][0].stop - 1}")
        while self._nodes:
            parent_node = parent(self._nodes[-1][0], node, self._leaves)
            if parent_node is None:
                break
            node, value = parent_node, self._add(self._nodes.pop()[1], value)
        self._nodes.append((node, value))

    def nodes(self) -> tuple[Node, ...]:
        """Return the nodes that could not be joined further."""
        return tuple(node for node, _ in self._nodes)

    def values(self) -> list[T]:
        """Return the values of :meth:`nodes`."""
        return [value for _, value in self._nodes]

    def root(self) -> T:
        """Return the value of the whole tree.

        Raises:
            ValueError: Leaves are missing.
        """
        if self.nodes() != (Node(0, self._leaves),):
            raise ValueError(f"{self.nodes()} are not all of {self._leaves} leaves")
        return self._nodes[0][1]


def cover(run: Node, leaves: int) -> tuple[Node, ...]:
    """Return the nodes that a rank with a run of leaves sends, from left to right."""
    accumulator: TreeAccumulator[None] = TreeAccumulator(leaves, lambda _left, _right: None)
    for leaf in range(run.start, run.stop):
        accumulator.take(Node(leaf, leaf + 1), None)
    return accumulator.nodes()


@dataclass(frozen=True, slots=True)
class ReductionPlan:
    """Assignment of leaves to ranks, and the nodes that each rank sends.

    Attributes:
        leaves: Micro-batches of a step.
        runs: Run of each rank; a surplus rank has an empty run.
        nodes: Nodes that cover the run of each rank.
    """

    leaves: int
    runs: tuple[Node, ...]
    nodes: tuple[tuple[Node, ...], ...]


@cache
def plan_for(leaves: int, ranks: int) -> ReductionPlan:
    """Assign leaves to ranks as evenly as possible, with few nodes to send.

    Raises:
        ValueError: There are no leaves or no ranks.
    """
    if leaves < 1 or ranks < 1:
        raise ValueError(f"{leaves} leaves cannot be dealt to {ranks} ranks")
    runs, start = [], 0
    for count in _counts(leaves, ranks):
        runs.append(Node(start, start + count))
        start += count
    return ReductionPlan(leaves, tuple(runs), tuple(cover(run, leaves) for run in runs))


def _counts(leaves: int, ranks: int) -> list[int]:
    """Return the number of leaves of each rank; some ranks have one leaf more than others."""
    base_count, extra_leaves = divmod(leaves, ranks)
    if not extra_leaves or not base_count or ranks * (extra_leaves + 1) > _WAYS_MAX:
        return [base_count + (rank < extra_leaves) for rank in range(ranks)]
    # cheapest[given]: fewest nodes of the ranks so far, if `given` of these ranks have one leaf
    # more. The second value identifies these ranks.
    cheapest: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for rank in range(ranks):
        best_by_extra: dict[int, tuple[int, tuple[int, ...]]] = {}
        for extra_ranks, (cost, counts) in cheapest.items():
            start = rank * base_count + extra_ranks
            for extra in (1, 0):
                fits = extra_ranks + extra <= extra_leaves <= extra_ranks + extra + ranks - rank - 1
                if not fits:
                    continue
                sent_nodes = len(cover(Node(start, start + base_count + extra), leaves))
                way = (cost + sent_nodes, (*counts, base_count + extra))
                best = best_by_extra.get(extra_ranks + extra)
                if best is None or way[0] < best[0]:
                    best_by_extra[extra_ranks + extra] = way
        cheapest = best_by_extra
    return list(cheapest[extra_leaves][1])


WINDOW_BYTES = 32 << 20
# torch 2.13 renamed this function, and the old name emits a warning.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements of a dense tensor, in the order of its memory, without a copy."""
    return tensor.as_strided((tensor.numel(),), (1,))


def add_in_place(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Add ``right`` to ``left``."""
    return left.add_(right)


@dataclass(slots=True)
class TreeReduce:
    """Sums over ranks for the tensors of one flat buffer.

    Attributes:
        line: Flat buffer: the layout of the tensors.
        plan: Nodes of the tree that each rank sends.
        rank: This rank.
        like: Tensor with the dtype and device of the tensors.
        window_bytes: Bytes that are exchanged at once.
    """

    line: FlatBuffer
    plan: ReductionPlan
    rank: int
    like: torch.Tensor
    window_bytes: int = WINDOW_BYTES
    windows: list[ExchangeWindow] = field(init=False)
    _buffers: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.windows = self.line.windows(self.window_bytes // self.like.element_size())

    @property
    def ranks(self) -> int:
        """Number of ranks that sum together."""
        return len(self.plan.runs)

    def sum_up(
        self, partials: Sequence[Sequence[torch.Tensor]], window: ExchangeWindow
    ) -> torch.Tensor:
        """Return the mean over all leaves of this rank's span of a window. Collective.

        Args:
            partials: Flat tensors in the buffer's order, for each node that this rank sends.
            window: One of ``windows``.

        Returns:
            Memory that the next call overwrites.
        """
        lengths = [stop - start for start, stop in window.spans]
        own_length, counts = lengths[self.rank], [len(nodes) for nodes in self.plan.nodes]
        send_buffer = self._buffer("sent", sum(lengths) * len(partials))
        parts = [
            part
            for span in window.spans
            for tensors in partials
            for part in self._cut(tensors, span)
        ]
        if parts:
            torch.cat(parts, out=send_buffer)
        receive_buffer = self._buffer("heard", own_length * sum(counts))
        dist.all_to_all_single(
            receive_buffer,
            send_buffer,
            [own_length * count for count in counts],
            [length * len(partials) for length in lengths],
        )
        accumulator: TreeAccumulator[torch.Tensor] = TreeAccumulator(self.plan.leaves, add_in_place)
        nodes = [node for nodes in self.plan.nodes for node in nodes]
        for nth, node in enumerate(nodes):
            accumulator.take(node, receive_buffer[nth * own_length : (nth + 1) * own_length])
        return accumulator.root().mul_(1 / self.plan.leaves)

    def tell(
        self, own_partial: torch.Tensor, tensors: Sequence[torch.Tensor], window: ExchangeWindow
    ) -> None:
        """Send each rank's span of a window to all ranks. Collective.

        Args:
            own_partial: This rank's span.
            tensors: Flat tensors in the buffer's order, which receive all spans.
            window: The window.
        """
        longest = window.longest
        message = self._buffer("told", longest)
        message[: own_partial.numel()].copy_(own_partial)
        all_results = self._buffer("everything", longest * self.ranks)
        _all_gather(all_results, message)
        target_parts: list[torch.Tensor] = []
        source: list[torch.Tensor] = []
        for rank, span in enumerate(window.spans):
            parts = self._cut(tensors, span)
            rank_results = all_results[rank * longest : rank * longest + span[1] - span[0]]
            target_parts += parts
            source += torch.split(rank_results, [part.numel() for part in parts])
        torch._foreach_copy_(target_parts, source)

    def mine(self, tensors: Sequence[torch.Tensor], window: ExchangeWindow) -> torch.Tensor:
        """Return this rank's span of a window of some flat tensors."""
        span = window.spans[self.rank]
        room = self._buffer("mine", span[1] - span[0])
        parts = self._cut(tensors, span)
        return torch.cat(parts, out=room) if parts else room

    def _cut(self, tensors: Sequence[torch.Tensor], span: tuple[int, int]) -> list[torch.Tensor]:
        return [
            tensors[segment.tensor][segment.start : segment.stop]
            for segment in self.line.segments(*span)
        ]

    def _buffer(self, name: str, elements: int) -> torch.Tensor:
        """Return memory that is kept between steps, because fresh pages are slow."""
        room = self._buffers.get(name)
        if room is None or room.numel() < elements:
            room = self._buffers[name] = torch.empty(
                elements, dtype=self.like.dtype, device=self.like.device
            )
        return room[:elements]


def add_gradients(
    left: list[torch.Tensor | None], right: list[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Return the sums of two lists of gradients, in the memory of either.

    A missing gradient counts as zeros, as if it came from another rank. The addition of zero
    converts -0.0 in the other gradient to +0.0.
    """
    pairs = [
        (left_tensor, right_tensor)
        for left_tensor, right_tensor in zip(left, right, strict=True)
        if _has(left_tensor, right_tensor)
    ]
    if pairs:
        sums, addends = zip(*pairs, strict=True)
        torch._foreach_add_(list(sums), list(addends))
    return [
        left_tensor
        if right_tensor is None
        else right_tensor
        if left_tensor is None
        else left_tensor
        for left_tensor, right_tensor in zip(
            _zero_added(left, right), _zero_added(right, left), strict=True
        )
    ]


def _has(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    return left is not None and right is not None


def _zero_added(
    left_tensors: Iterable[torch.Tensor | None], right_tensors: Iterable[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Return ``left_tensors``, with zero added where ``right_tensors`` has no gradient."""
    return [
        left_tensor.add_(0.0) if left_tensor is not None and right_tensor is None else left_tensor
        for left_tensor, right_tensor in zip(left_tensors, right_tensors, strict=True)
    ]


BLOCK = 16_384
"""Elements of a block, few enough for torch to process the block in one thread."""


class TensorSlice(NamedTuple):
    """Consecutive elements of one tensor.

    Attributes:
        tensor: Number of the tensor.
        start: First element.
        stop: Element after the last.
    """

    tensor: int
    start: int
    stop: int


class ExchangeWindow(NamedTuple):
    """Elements exchanged at once: one run of the flat buffer per rank, summed by that rank.

    Attributes:
        spans: (start, stop) in the flat buffer, by rank.
    """

    spans: tuple[tuple[int, int], ...]

    @property
    def longest(self) -> int:
        """Number of elements of the longest span."""
        return max(stop - start for start, stop in self.spans)


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """Tensors of one dtype, concatenated and cut over ranks at block boundaries.

    Attributes:
        sizes: Number of elements of each tensor.
        offsets: Start of each tensor, and the end of the last one.
        cuts: Start of each rank's span, and the end of the last one.
    """

    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    cuts: tuple[int, ...]

    def span(self, rank: int) -> tuple[int, int]:
        """Return (start, stop) of the elements that a rank sums."""
        return self.cuts[rank], self.cuts[rank + 1]

    def segments(self, start: int, stop: int) -> list[TensorSlice]:
        """Return the tensor slices between two positions in the flat buffer."""
        segments, place = [], start
        tensor = bisect_right(self.offsets, start) - 1
        while place < stop:
            begin, end = self.offsets[tensor], min(self.offsets[tensor + 1], stop)
            if end > place:
                segments.append(TensorSlice(tensor, place - begin, end - begin))
                place = end
            tensor += 1
        return segments

    def run(self, tensor: int, rank: int) -> TensorSlice:
        """Return the elements of a tensor that a rank sums; the slice may be empty."""
        begin, size = self.offsets[tensor], self.sizes[tensor]
        start, stop = (min(max(cut - begin, 0), size) for cut in self.span(rank))
        return TensorSlice(tensor, start, max(start, stop))

    def windows(self, elements: int) -> list[ExchangeWindow]:
        """Return all spans in windows of at most ``elements`` elements over all ranks."""
        ranks = len(self.cuts) - 1
        window_elements = max(1, elements // ranks)
        span_max = max(self.cuts[rank + 1] - self.cuts[rank] for rank in range(ranks))
        return [
            ExchangeWindow(
                tuple(
                    (min(low + offset, high), min(low + offset + window_elements, high))
                    for low, high in map(self.span, range(ranks))
                )
            )
            for offset in range(0, span_max, window_elements)
        ]


def line_of(sizes: Sequence[int], ranks: int) -> FlatBuffer:
    """Concatenate tensors and cut them over ranks, as evenly as blocks allow."""
    offsets = (0, *accumulate(sizes))
    borders = [
        begin + start
        for begin, size in zip(offsets, sizes, strict=False)
        for start in range(0, size, BLOCK)
    ] + [offsets[-1]]
    cuts = [0]
    for rank in range(1, ranks):
        target = offsets[-1] * rank / ranks
        upper_index = min(bisect_right(borders, target), len(borders) - 1)
        nearest = min(
            borders[max(upper_index - 1, 0)], borders[upper_index], key=lambda at: abs(at - target)
        )
        cuts.append(max(cuts[-1], nearest))
    return FlatBuffer(tuple(sizes), offsets, (*cuts, offsets[-1]))
