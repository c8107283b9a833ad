"""A loop that ignores a resumed counter gets a warning, and its save is made."""

from __future__ import annotations

import pytest

from resilient import Checkpointer
from resilient.checkpoint.events import CountersUnread
from resilient.clock import SystemClock
from resilient.events import Emitter
from resilient.state_dict.snapshot import Part

QUIET = Emitter(SystemClock(), ())


@pytest.fixture
def folder(tmp_path):
    with Checkpointer(tmp_path, emit=QUIET, rng=False, epoch=0, name="a", rate=0) as first:
        first.resume()
        first["epoch"] = 3
        first.save(30)
    return tmp_path


def unread(folder, use, **given):
    """Return the counters that the first save after a resume reports, and the next ones."""
    told = []
    emit = Emitter(SystemClock(), (lambda _, event: told.append(event),))
    with Checkpointer(folder, emit=emit, rng=False, name="b", rate=0, **given) as second:
        assert second.resume() == 30
        use(second)
        second.save(31)
        second.save(32)
    return [one.counters for one in told if isinstance(one, CountersUnread)]


def test_epoch_ignored_after_resume_is_reported_once(folder):
    assert unread(folder, lambda _: None, epoch=0) == [(("epoch", 3),)]


def test_epoch_of_a_part_ignored_is_reported(folder):
    assert unread(folder, lambda _: None, epoch=Part(0)) == [(("epoch", 3),)]


def test_epoch_read_after_resume_is_not_reported(folder):
    assert unread(folder, lambda it: it["epoch"], epoch=0) == []


def test_epoch_set_after_resume_is_not_reported(folder):
    assert unread(folder, lambda it: it.__setitem__("epoch", 4), epoch=0) == []
