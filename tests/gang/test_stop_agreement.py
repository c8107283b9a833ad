"""Ranks as threads, each with its own watcher; a step is a meeting of all of them."""

from __future__ import annotations

import random
import threading
import time

import pytest

from resilient.clock import SystemClock
from resilient.distributed.stop_request import StopRequest
from resilient.testing.memory_store import run_ranks
from resilient.train.preemption import StopCoordinator, StopDeadline

LIMIT = 2000


def train(world, board, meeting, seed, asks):
    """Train until told to stop; return the last step of this rank and what it heard."""
    draw = random.Random(seed * 100 + world.rank)
    gate = StopCoordinator(world, board, StopDeadline(30.0), SystemClock())
    gate.start(0)
    ask_at = draw.randrange(1, 8) if world.rank in asks else LIMIT
    try:
        for step in range(1, LIMIT):
            if not gate.enter(step):
                return step - 1, gate.request
            if step == ask_at:
                gate.request_stop(f"rank {world.rank}")
            time.sleep(draw.random() * 0.02)
            meeting.wait(20)
            if draw.random() < 0.3:  # evaluation, saving: ranks drift apart after a step
                time.sleep(draw.random() * 0.08)
    finally:
        gate.close()
    raise AssertionError("nobody stopped")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("size", "asks"), [(1, {0}), (2, {1}), (3, {0, 2}), (5, {3})])
def test_all_ranks_stop_after_the_same_step(size, asks, seed):
    meeting = threading.Barrier(size)
    ends = run_ranks(size, lambda world, board: train(world, board, meeting, seed, asks))
    assert len({step for step, _ in ends}) == 1
    assert all(isinstance(request, StopRequest) for _, request in ends)


def test_a_rank_that_is_frozen_is_let_into_the_step_another_is_in():
    """Rank 1 is inside step 6 and waits there for rank 0, which has only done step 5."""
    inside = threading.Event()
    meeting = threading.Barrier(2)

    def rank_main(world, board):
        gate = StopCoordinator(world, board, StopDeadline(30.0), SystemClock())
        gate.start(5)
        try:
            if world.rank == 0:
                assert inside.wait(10)
                gate.request_stop("notice")
                assert gate.enter(6), "the agreement must include the step that rank 1 is in"
            else:
                assert gate.enter(6)
                inside.set()
            meeting.wait(10)
            return gate.enter(7)
        finally:
            gate.close()

    assert run_ranks(2, rank_main) == [False, False]


@pytest.mark.parametrize(("finished", "status"), [(1, 128 + 15), (0, 75)])
def test_a_rank_that_never_answers_costs_the_grace_and_no_more(finished, status):
    """Where no step was finished since the last checkpoint, nothing is lost by leaving."""
    left = threading.Event()
    statuses = []

    def leave(why, status):
        statuses.append(status)
        left.set()

    def rank_main(world, board):
        if world.rank == 1:
            return None  # dead: it never shows what it entered
        gate = StopCoordinator(world, board, StopDeadline(0.3), SystemClock(), leave=leave)
        gate.start(0, lambda: finished)
        gate.request_stop("notice")
        try:
            return left.wait(10)
        finally:
            gate.close()

    assert run_ranks(2, rank_main) == [True, None]
    assert statuses[0] == status


def test_entering_is_cheap_when_nobody_asks():
    gate = StopCoordinator(
        run_ranks(1, lambda world, _: world)[0], None, StopDeadline(30.0), SystemClock()
    )
    gate.start(0)
    began = time.perf_counter()
    for step in range(10_000):
        gate.enter(step)
    took_seconds = time.perf_counter() - began
    gate.close()
    assert took_seconds < 0.5
