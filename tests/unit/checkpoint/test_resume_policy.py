"""Resume policy: what an attempt begins from, as a table and over a real store."""

from __future__ import annotations

import pytest

from resilient.checkpoint.generations import claim, mark_committed
from resilient.checkpoint.resume_policy import (
    GenerationFacts,
    ResumeFacts,
    decide_resume,
    resolve_resume_option,
)
from resilient.clock import SystemClock
from resilient.distributed.start_identity import StartIdentity
from resilient.errors import NoIntactCheckpoint
from resilient.format.keys import CheckpointId, generation_key
from resilient.testing.memory_store import MemoryStore

PARENT = CheckpointId(1, 5)
OLD = GenerationFacts(1, is_of_this_run=False, has_checkpoint=True, has_mark=True)
DAMAGED = GenerationFacts(2, is_of_this_run=None, has_checkpoint=True)
EMPTY = GenerationFacts(3, is_of_this_run=True)
BEGUN = GenerationFacts(3, is_of_this_run=True, parent=PARENT)
SAVED = GenerationFacts(3, is_of_this_run=True, has_checkpoint=True, has_mark=True)
LOST = GenerationFacts(3, is_of_this_run=True, has_mark=True)


@pytest.mark.parametrize(
    ("wish", "is_first", "generations", "reference"),
    [
        ("auto", True, (OLD, LOST), "auto"),
        ("never", True, (), "never"),
        ("never", True, (OLD,), "never"),
        ("never", False, (OLD,), "never"),
        ("never", False, (OLD, EMPTY), "never"),
        ("never", False, (OLD, SAVED), "auto"),
        ("never", True, (OLD, SAVED), "auto"),
        ("never", False, (OLD, LOST), ""),
        ("never", False, (OLD, BEGUN), "never"),
        ("never", True, (OLD, DAMAGED), "never"),
        ("never", False, (OLD, DAMAGED), ""),
        ("never", False, (OLD, DAMAGED, EMPTY), "never"),
        ("latest~1", True, (OLD,), "latest~1"),
        ("latest~1", False, (OLD, EMPTY), "latest~1"),
        ("latest~1", False, (OLD, BEGUN), "checkpoint-5-g1"),
        ("latest~1", False, (OLD, SAVED), "auto"),
        ("theirs/checkpoint-500", False, (OLD,), "theirs/checkpoint-500"),
        ("theirs/checkpoint-500", False, (EMPTY,), "theirs/checkpoint-500"),
        ("theirs/checkpoint-500", False, (SAVED,), "auto"),
    ],
)
def test_decide_resume_keeps_the_wish_until_this_run_saved(wish, is_first, generations, reference):
    decision = decide_resume(ResumeFacts(wish, is_first, generations))
    assert decision.reference == reference
    assert bool(decision.reason) == (reference != wish)


ONE, OTHER = StartIdentity("one", training=1), StartIdentity("other", training=1)


def begin(store, start, *, saves):
    life = claim(store, None, cause="start", clock=SystemClock(), start=start)
    if saves:
        store.put(CheckpointId(life.number, 1).manifest_key, b"{}")
        mark_committed(store, life.number)
    return life


def test_settle_wish_reads_whose_checkpoints_are_there():
    store = MemoryStore()
    begin(store, None, saves=True)
    begin(store, OTHER, saves=True)
    assert resolve_resume_option(store, "never", [ONE], is_first=False).reference == "never"
    begin(store, ONE, saves=False)
    assert resolve_resume_option(store, "never", [ONE], is_first=False).reference == "never"
    begin(store, ONE, saves=True)
    assert resolve_resume_option(store, "never", [ONE], is_first=False).reference == "auto"
    # The first rank is of a host that came later.
    fresh = StartIdentity("fresh", training=1)
    assert resolve_resume_option(store, "never", [fresh, ONE], is_first=True).reference == "auto"
    assert resolve_resume_option(store, "never", [fresh], is_first=True).reference == "never"


def test_settle_wish_refuses_where_own_checkpoints_are_lost():
    store = MemoryStore()
    begin(store, OTHER, saves=True)
    life = begin(store, ONE, saves=True)
    store.delete(CheckpointId(life.number, 1).manifest_key)
    with pytest.raises(NoIntactCheckpoint, match="generation 2 of this run committed"):
        resolve_resume_option(store, "never", [ONE], is_first=False)


def test_settle_wish_refuses_where_a_damaged_record_may_be_ours():
    store = MemoryStore()
    begin(store, ONE, saves=True)
    store.put(generation_key(1), b"damage")
    with pytest.raises(NoIntactCheckpoint, match="record of generation 1 cannot be read"):
        resolve_resume_option(store, "never", [ONE], is_first=False)
    assert resolve_resume_option(store, "never", [ONE], is_first=True).reference == "never"
