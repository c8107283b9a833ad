"""The check that boxes cover each element of a tensor once agrees with a count."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.format import regions as library
from resilient.format.regions import Region, covers, whole

EXTENTS = st.lists(st.integers(0, 6), max_size=5).map(tuple)


def counted(shape, boxes) -> bool:
    """The definition: walk through every box and count."""
    held = np.zeros(shape, dtype=int)
    for box in boxes:
        if any(map(lambda at, n, of: at + n > of, box.offsets, box.lengths, shape)):
            return False
        held[tuple(slice(at, at + n) for at, n in zip(box.offsets, box.lengths, strict=True))] += 1
    return bool((held == 1).all())


def cut(draw, box: Region, left: int) -> list[Region]:
    """Cut a box again and again, at any place of any axis; empty pieces among them."""
    if not left or not box.lengths or not draw(st.integers(0, 5)):
        return [box]
    axis = draw(st.integers(0, len(box.lengths) - 1))
    length = draw(st.integers(0, box.lengths[axis]))
    lengths, offsets = list(box.lengths), list(box.offsets)
    lengths[axis] = length
    near = Region(box.offsets, tuple(lengths))
    lengths[axis], offsets[axis] = box.lengths[axis] - length, box.offsets[axis] + length
    far = Region(tuple(offsets), tuple(lengths))
    return [*cut(draw, near, left - 1), *cut(draw, far, left - 1)]


@st.composite
def cuttings(draw):
    """A tensor's shape and boxes that hold it, or do not though they have as many elements."""
    shape = draw(EXTENTS)
    boxes = draw(st.permutations(cut(draw, whole(shape), 4)))
    for _ in range(draw(st.integers(0, 2))):
        at, axis = draw(st.integers(0, len(boxes) - 1)), draw(st.integers(0, 5))
        if axis < len(shape):
            offsets = list(boxes[at].offsets)
            offsets[axis] = draw(st.integers(0, shape[axis]))
            boxes[at] = Region(tuple(offsets), boxes[at].lengths)
    return shape, boxes


@settings(deadline=None, max_examples=150)
@given(cuttings())
def test_boxes_cover_a_tensor_exactly_if_counting_says_so(cutting):
    shape, boxes = cutting
    assert covers(shape, boxes) == counted(shape, boxes)


@settings(deadline=None, max_examples=150)
@given(cuttings())
def test_corners_say_of_any_boxes_what_pairs_and_their_sum_say(cutting):
    shape, boxes = cutting
    if not all(box.inside(shape) for box in boxes):
        return
    boxes = [box for box in boxes if box.size]
    pairs = sum(box.size for box in boxes) == whole(shape).size and not library._any_overlap(boxes)
    corners = library._corners_cancel(shape, boxes, range(len(shape)))
    assert corners == (pairs if whole(shape).size else not boxes)


def test_a_double_that_fills_up_for_a_hole_is_seen_among_many():
    rows = [Region((row, 0), (1, 3)) for row in range(64)]
    assert covers((64, 3), rows)
    assert not covers((64, 3), [*rows[:-1], rows[7]])
    tiles = [Region((row, column), (1, 3)) for row in range(16) for column in range(0, 12, 3)]
    assert covers((16, 12), tiles)
    assert not covers((16, 12), [*tiles[:-1], tiles[9]])


def test_boxes_of_many_ranks_are_not_compared_with_each_other(monkeypatch):
    monkeypatch.setattr(library, "_any_overlap", None)
    ranks = 4096
    assert covers((ranks, 2), [Region((rank, 0), (1, 2)) for rank in range(ranks)])
    assert covers((2, ranks), [Region((0, rank), (2, 1)) for rank in range(ranks)])


def test_boxes_cut_on_many_axes_do_not_cost_two_to_the_number_of_them(monkeypatch):
    monkeypatch.setattr(library, "_corners_cancel", None)
    boxes = [Region(place, (1,) * 5) for place in product(range(3), repeat=5)]
    assert covers((3,) * 5, boxes)
    assert not covers((3,) * 5, [*boxes[:-1], boxes[-2]])
