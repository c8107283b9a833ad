"""Copies beside training that wait until it does not need the interpreter."""

from __future__ import annotations

import threading

from resilient.checkpoint_engine import BackgroundStaging
from resilient.state_dict.host_copy import DeferredCopies


class Work:
    """One piece of work, and who did it."""

    def __init__(self):
        self.done_by = []

    def make(self, *, modestly=False):
        self.done_by.append("thread" if modestly else "training")

    def changed(self):
        return []


def test_copies_wait_for_a_lull():
    overlap, work, lull, handed = BackgroundStaging(), Work(), threading.Event(), threading.Event()
    overlap.copy(DeferredCopies([work]), lambda _: handed.set(), lull)
    assert not handed.wait(0.05)
    assert not work.done_by
    lull.set()
    assert handed.wait(20)
    assert work.done_by == ["thread"]
    overlap.close()


def test_what_did_not_begin_is_copied_by_whoever_needs_it():
    overlap, work, lull, handed = BackgroundStaging(), Work(), threading.Event(), threading.Event()
    overlap.copy(DeferredCopies([work]), lambda _: handed.set(), lull)
    threading.Timer(0.05, lull.set).start()
    overlap.wait()
    assert handed.is_set()
    assert work.done_by == ["training"]
    overlap.close()
