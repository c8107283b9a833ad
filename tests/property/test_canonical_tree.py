"""The order in which micro-batches are added is one, whatever the number of ranks."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.strategies.canonical.tree_reduce import (
    BLOCK,
    Node,
    TreeAccumulator,
    cover,
    line_of,
    parent,
    plan_for,
)

LEAVES = st.integers(1, 70)
RANKS = st.integers(1, 20)


def association(leaves, runs):
    """Return how leaves are put in brackets when each run is joined first."""

    def pair(left, right):
        return (left, right)

    whole = TreeAccumulator(leaves, pair)
    for run in runs:
        part = TreeAccumulator(leaves, pair)
        for leaf in range(*run):
            part.take(Node(leaf, leaf + 1), leaf)
        for node, value in zip(part.nodes(), part.values(), strict=True):
            whole.take(node, value)
    return whole.root()


@given(LEAVES, RANKS)
def test_any_number_of_ranks_puts_the_same_brackets(leaves, ranks):
    plan = plan_for(leaves, ranks)
    assert association(leaves, plan.runs) == association(leaves, [Node(0, leaves)])


@given(LEAVES, st.data())
def test_any_cut_into_runs_puts_the_same_brackets(leaves, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, leaves), max_size=6)))
    ends = [0, *cuts, leaves]
    runs = [Node(low, high) for low, high in itertools.pairwise(ends)]
    assert association(leaves, runs) == association(leaves, [Node(0, leaves)])


@given(LEAVES, RANKS)
def test_every_leaf_has_one_rank_and_none_has_two_more_than_another(leaves, ranks):
    runs = plan_for(leaves, ranks).runs
    assert [leaf for run in runs for leaf in range(*run)] == list(range(leaves))
    counts = [run.stop - run.start for run in runs]
    assert max(counts) - min(counts) <= 1


@given(LEAVES, RANKS)
def test_a_rank_sends_few_nodes_that_cover_its_run(leaves, ranks):
    plan = plan_for(leaves, ranks)
    for run, nodes in zip(plan.runs, plan.nodes, strict=True):
        assert [leaf for node in nodes for leaf in range(*node)] == list(range(*run))
        assert len(nodes) <= max(1, 2 * (run.stop - run.start).bit_length())
        for left, right in itertools.pairwise(nodes):
            assert parent(left, right, leaves) is None


@given(st.integers(0, 5), st.integers(0, 5))
def test_ranks_that_divide_a_tree_send_one_node_each(ranks, more):
    plan = plan_for(2 ** (ranks + more), 2**ranks)
    assert {len(nodes) for nodes in plan.nodes} == {1}


@given(LEAVES, RANKS, st.integers(0, 2**32))
def test_sums_are_equal_to_the_bit(leaves, ranks, seed):
    values = torch.randn(leaves, 5, generator=torch.Generator().manual_seed(seed)) * 1e3
    sums = []
    for plan in (plan_for(leaves, 1), plan_for(leaves, ranks)):
        whole = TreeAccumulator(leaves, torch.add)
        for run in plan.runs:
            part = TreeAccumulator(leaves, torch.add)
            for leaf in range(*run):
                part.take(Node(leaf, leaf + 1), values[leaf])
            for node, value in zip(part.nodes(), part.values(), strict=True):
                whole.take(node, value)
        sums.append(whole.root())
    assert torch.equal(*sums)


def test_a_missing_leaf_is_an_error():
    joining = TreeAccumulator(4, lambda one, other: one + other)
    joining.take(Node(0, 1), 1)
    with pytest.raises(ValueError, match="leaf 2 does not follow 0"):
        joining.take(Node(2, 3), 1)
    with pytest.raises(ValueError, match="not all of 4"):
        joining.root()


def test_a_run_that_is_not_aligned_is_covered_by_several_nodes():
    assert cover(Node(3, 8), 8) == (Node(3, 4), Node(4, 8))
    assert cover(Node(1, 7), 8) == (Node(1, 2), Node(2, 4), Node(4, 6), Node(6, 7))


SIZES = st.lists(st.integers(1, 5 * BLOCK), min_size=1, max_size=8)


@given(SIZES, RANKS)
def test_ranks_have_all_elements_and_cut_them_between_blocks_only(sizes, ranks):
    line = line_of(sizes, ranks)
    for tensor, size in enumerate(sizes):
        runs = [line.run(tensor, rank) for rank in range(ranks)]
        held = [run for run in runs if run.stop > run.start]
        assert held[0].start == 0
        assert held[-1].stop == size
        assert all(one.stop == other.start for one, other in itertools.pairwise(held))
        assert all(run.start % BLOCK == 0 for run in held)


@settings(deadline=None)
@given(SIZES, RANKS, st.integers(BLOCK // 2, 6 * BLOCK))
def test_windows_are_all_spans_once(sizes, ranks, elements):
    line = line_of(sizes, ranks)
    windows = line.windows(elements)
    for rank in range(ranks):
        spans = [span for window in windows if (span := window.spans[rank])[1] > span[0]]
        ends = [line.span(rank)[0], *(stop for _, stop in spans)]
        assert ends == [*(start for start, _ in spans), line.span(rank)[1]]
    for window in windows:
        for start, stop in window.spans:
            found = line.segments(start, stop)
            assert sum(one.stop - one.start for one in found) == stop - start
            assert all(0 <= one.start < one.stop <= sizes[one.tensor] for one in found)
