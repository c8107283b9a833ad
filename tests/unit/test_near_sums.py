"""Numbers of the ranks of one host, added up through memory that they share."""

from __future__ import annotations

import threading
import time
from random import Random

import pytest

from resilient.distributed.host_sum import PAGE_BYTES, HostLocalSum
from resilient.errors import DeadlineExceeded

SIZE = 3


@pytest.fixture
def pages():
    return [memoryview(bytearray(PAGE_BYTES)) for _ in range(SIZE)]


def ranks_of(pages, within_seconds=20.0):
    return [HostLocalSum(pages, rank, within_seconds) for rank in range(SIZE)]


def test_every_rank_has_the_same_sum_of_each_turn(pages):
    numbers = [[Random(rank * 100 + turn).random() for turn in range(50)] for rank in range(SIZE)]
    found = [[] for _ in range(SIZE)]

    def take_turns(sums, rank):
        for number in numbers[rank]:
            if Random(number).random() < 0.2:
                time.sleep(0.001)
            found[rank].append(sums.total(sums.give(number)))

    ranks = ranks_of(pages)
    threads = [
        threading.Thread(target=take_turns, args=(one, rank)) for rank, one in enumerate(ranks)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert found[0] == found[1] == found[2] == [sum(turn) for turn in zip(*numbers, strict=True)]


@pytest.mark.parametrize("odd", [0.0, -0.0, float("inf"), 5e-324])
def test_numbers_are_what_was_given(pages, odd):
    ranks = ranks_of(pages)
    turns = [one.give(odd) for one in ranks]
    assert ranks[1].total(turns[1]) == 3 * odd
    assert str(ranks[1].total(turns[1])) == str(odd + odd + odd)


def test_to_give_is_not_to_wait_and_to_have_the_sum_is_to_know_that_all_gave(pages):
    first, second, third = ranks_of(pages)
    turn = first.give(1.0)
    second.give(2.0)
    was_there = threading.Event()

    def come_late():
        was_there.set()
        third.give(4.0)

    threading.Timer(0.2, come_late).start()
    assert not was_there.is_set()
    assert first.total(turn) == 7.0
    assert was_there.is_set()


def test_a_rank_that_does_not_come_is_named(pages):
    first, second, _ = ranks_of(pages, within_seconds=0.05)
    turn = first.give(1.0)
    second.give(1.0)
    with pytest.raises(DeadlineExceeded, match="rank 2 did not report its loss within"):
        first.total(turn)


@pytest.mark.parametrize("at", range(20))
def test_a_record_that_is_only_half_there_is_not_believed(pages, at):
    first, *others = ranks_of(pages, within_seconds=0.01)
    for turn in range(1, 6):
        for one in (first, *others):
            one.give(0.1 * turn)
    whole = bytes(pages[2])
    # Turn 6 lies two records behind turn 4, where turn 2 was.
    for one in (first, *others):
        turn = one.give(7.25)
    start = turn % 4 * (PAGE_BYTES // 4)
    pages[2][start : start + 20] = (
        bytes(pages[2][start : start + at]) + whole[start + at :][: 20 - at]
    )
    with pytest.raises(DeadlineExceeded):
        first.total(turn)


def test_what_was_there_turns_before_is_not_taken(pages):
    first, second, third = ranks_of(pages, within_seconds=0.01)
    for _ in range(4):
        for one in (first, second, third):
            one.give(1.0)
    turn = first.give(2.0)
    second.give(2.0)
    with pytest.raises(DeadlineExceeded):
        first.total(turn)
