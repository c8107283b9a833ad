"""Whatever the cut, the interruption and the number of ranks: every sample once, in order."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.train.data.ordering import epoch_order
from resilient.train.data.sampler import BatchLayout, DataCursor, ResumableSampler
from resilient.train.step_count import steps_after

SIZES = st.integers(1, 60)
BATCHES = st.integers(1, 9)
RANKS = st.integers(1, 5)


def deal_rounds(cursor, layout):
    """Yield what all ranks train on, round by round, and advance as the loop does."""
    queues = [iter(ResumableSampler(cursor, layout, rank)) for rank in range(layout.ranks)]
    for _ in range(layout.rounds_after(cursor.samples)):
        batches = [next(queue) for queue in queues]
        cursor.advance(layout)
        yield batches
    assert all(next(queue, None) is None for queue in queues)


def flat(rounds):
    return [index for one in rounds for batch in one for index in batch.indices]


@given(SIZES, BATCHES, RANKS, st.integers(0, 2**40), st.integers(0, 5))
def test_an_epoch_is_the_order_completed_from_its_start(size, batch, ranks, seed, epoch):
    cursor, layout = DataCursor(size, seed, epoch), BatchLayout(size, batch, ranks)
    seen = flat(deal_rounds(cursor, layout))
    order = epoch_order(size, seed, epoch).tolist()
    assert seen[:size] == order
    extra = seen[size:]
    assert extra == [order[at % size] for at in range(len(extra))]
    assert len(extra) < layout.round_samples
    assert not (extra and ranks == 1)
    assert cursor.samples == size


@settings(max_examples=300)
@given(SIZES, st.lists(st.tuples(BATCHES, RANKS, st.integers(0, 6)), min_size=1, max_size=5), RANKS)
def test_lives_of_any_shape_add_up_to_one_epoch(size, lives, last_ranks):
    """Each life has its batch, its ranks, and dies after some rounds while loaders prefetch."""
    seen = []
    state = DataCursor(size, 7).state_dict()
    for batch, ranks, rounds in [*lives, (3, last_ranks, 10**6)]:
        cursor = DataCursor(size, 999)
        cursor.load_state_dict(state)
        layout = BatchLayout(size, batch, ranks)
        queues = [iter(ResumableSampler(cursor, layout, rank)) for rank in range(ranks)]
        fetched = [list(queue) for queue in queues]  # a loader may run to the end ahead of us
        for turn in range(min(rounds, layout.rounds_after(cursor.samples))):
            before = cursor.samples
            taken = [index for rank in range(ranks) for index in fetched[rank][turn].indices]
            cursor.advance(layout)
            seen += taken[: cursor.samples - before]
        state = cursor.state_dict()
    assert seen == epoch_order(size, 7, 0).tolist()


@given(SIZES, BATCHES, RANKS, st.integers(0, 60))
def test_dropping_the_last_round_leaves_equal_batches(size, batch, ranks, start):
    cursor = DataCursor(size, 3, samples=min(start, size))
    layout = BatchLayout(size, batch, ranks, drop_last=True)
    rounds = list(deal_rounds(cursor, layout))
    assert all(len(one.indices) == batch for each in rounds for one in each)
    seen = flat(rounds)
    assert len(seen) == len(set(seen)) <= size - min(start, size)


@given(SIZES, BATCHES, RANKS, st.integers(1, 5))
def test_steps_left_count_down_by_one_at_every_step(size, batch, ranks, accumulation):
    cursor, layout = DataCursor(size, 3), BatchLayout(size, batch, ranks)
    left = steps_after(layout, 0, accumulation)
    while rounds := layout.rounds_after(cursor.samples):
        for _ in range(min(rounds, accumulation)):
            cursor.advance(layout)
        left -= 1
        assert steps_after(layout, cursor.samples, accumulation) == left
    assert left == 0


@given(SIZES, BATCHES, RANKS)
def test_a_random_stream_belongs_to_a_place_in_the_epoch(size, batch, ranks):
    """The same micro-batch has the same stream after a resume, and no two share one."""
    layout = BatchLayout(size, batch, ranks)
    whole = [one for each in deal_rounds(DataCursor(size, 1), layout) for one in each]
    later = DataCursor(size, 1, samples=min(layout.round_samples, size))
    rest = [one for each in deal_rounds(later, layout) for one in each]
    assert rest == whole[ranks:]
    assert len({one.key for one in whole}) == len(whole)
