"""Answers of a rank that misses a save for which a peer waits."""

from __future__ import annotations

import threading

import pytest

from resilient.distributed.coordination import ControlGroup, agree
from resilient.distributed.missed_saves import MissedSaveDetector, agreements_of, blocked_in
from resilient.errors import SaveFailed
from resilient.testing.memory_store import run_ranks


def waits_at(comms, save, at):
    with pytest.raises(
        SaveFailed, match=r"did not call save\(\); all ranks call save\(\)"
    ) as found:
        agree(comms, agreements_of(save)[at], None, lambda _: None, 20.0)
    assert "remove `if rank == 0`" in found.value.hint
    return found.value.message


@pytest.mark.parametrize("saver", [0, 1])
@pytest.mark.parametrize("at", range(4))
def test_closed_rank_fails_each_agreement_of_a_peer(saver, at):
    def rank_main(world, board):
        comms = ControlGroup(board.another(), world, "life")
        if world.rank == saver:
            return waits_at(comms, 3, at)
        detector = MissedSaveDetector(comms, board.another(), lambda: 2, lambda: 0)
        detector.start()
        detector.decline("it closed its checkpointer")
        return ""

    assert run_ranks(2, rank_main)[saver] == (
        f"rank {1 - saver}: it closed its checkpointer and did not call save(); all ranks call "
        "save()"
    )


@pytest.mark.parametrize("saver", [0, 1])
@pytest.mark.parametrize(("own_steps", "is_missed"), [(7, True), (5, False), (4, False)])
def test_rank_with_more_optimizer_steps_misses_the_save(saver, own_steps, is_missed):
    is_over = threading.Event()

    def rank_main(world, board):
        comms = ControlGroup(board.another(), world, "life")
        is_saver = world.rank == saver
        steps = 5 if is_saver else own_steps
        detector = MissedSaveDetector(comms, board.another(), lambda: 0, lambda: steps)
        detector._look_seconds = 0.02
        detector.start()
        try:
            if not is_saver:
                is_over.wait(20)
                return ""
            with detector.inside(1):
                if is_missed:
                    return waits_at(comms, 1, 3)
                threading.Event().wait(0.3)
                keys = [comms.key(agreements_of(1)[3], who) for who in (1 - saver, "ruling")]
                return [board.peek(key) for key in keys]
        finally:
            is_over.set()
            detector.stop()

    found = run_ranks(2, rank_main)[saver]
    if is_missed:
        assert f"rank {1 - saver}: it made more optimizer steps" in found
    else:
        assert found == [None, None]


def test_thread_outside_torch_is_not_blocked():
    import sys

    assert blocked_in(sys._getframe(), 0) == ""
    assert blocked_in(None, 0) == ""
