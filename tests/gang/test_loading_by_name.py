"""Ranks that load one thing by a reference take the same checkpoint, or none does."""

from __future__ import annotations

import pytest

from resilient.checkpoint import resume_selection
from resilient.checkpoint.context import CheckpointContext, CheckpointOptions
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.checkpoint_engine import CheckpointEngine
from resilient.clock import SystemClock
from resilient.distributed.coordination import ControlGroup
from resilient.errors import NothingToResume
from resilient.events import Emitter
from resilient.state_dict.snapshot import Part
from resilient.testing.memory_store import MemoryStore, run_ranks
from tests.helpers.manifests import Values


def by_reference(world, board, store, ref):
    """Save three steps, load a part by a reference, and return its step."""
    comms = ControlGroup(board.another(), world, "life")
    desk = CheckpointContext(
        store, comms, CheckpointOptions(), SystemClock(), Emitter(SystemClock(), ())
    )
    one = CheckpointEngine(desk)
    try:
        value = Values(step=0)
        one.resume({"model": Part(value)})
        for step, loss in ((1, 0.5), (2, 0.1), (3, 0.9)):
            value.state["step"] = step
            one.save(step, {"model": Part(value)}, CheckpointInfo(metrics={"loss": loss}))
        one.load_part(ref, "model", Part(value))
        return value.state["step"]
    finally:
        one.close()


def test_all_take_what_the_first_of_them_finds(monkeypatch):
    asked = []
    resolve = resume_selection.resolve
    monkeypatch.setattr(resume_selection, "resolve", lambda *it: asked.append(it) or resolve(*it))
    store = MemoryStore()
    assert run_ranks(2, lambda *it: by_reference(*it, store, "best:loss")) == [2, 2]
    assert len(asked) == 1


def test_what_names_nothing_is_raised_on_all():
    store, raised = MemoryStore(), []

    def rank_main(world, board):
        with pytest.raises(NothingToResume, match="step:9"):
            by_reference(world, board, store, "step:9")
        raised.append(world.rank)

    run_ranks(2, rank_main)
    assert sorted(raised) == [0, 1]
