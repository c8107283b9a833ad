"""How a training ends: what it raises, and what still listens meanwhile."""

from __future__ import annotations

import signal
import threading

import pytest

from resilient.train.callbacks.base import TrainerCallback
from tests.unit.train.fakes import MemoryCheckpointer
from tests.unit.train.models import DieAfter, Dies, make_trainer


class Trips(TrainerCallback):
    """A mistake in a callback, one step after a save was begun."""

    def on_step_end(self, args, state, control, /, **_):
        if state.global_step == 9:
            raise ValueError("a mistake of mine")


def test_a_failed_save_does_not_cover_up_what_ended_training(tmp_path, repository):
    repository.failing_saves = [8]
    with pytest.raises(ValueError, match="a mistake of mine") as raised:
        make_trainer(tmp_path, callbacks=[Trips()]).train()
    assert raised.value.__notes__ == [
        "the save in flight failed too: checkpoint-8-g1 was not saved"
    ]
    assert repository.closed == 1


def test_the_last_wait_has_the_deadline_of_a_request_to_stop(tmp_path, repository, monkeypatch):
    heard = []

    def wait(_self, **_how):
        watched = "stop-watch" in {one.name for one in threading.enumerate()}
        heard.append((signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL, watched))

    monkeypatch.setattr(MemoryCheckpointer, "wait", wait)
    monkeypatch.setattr(MemoryCheckpointer, "close", lambda _self: None)
    with pytest.raises(Dies):
        make_trainer(tmp_path, callbacks=[DieAfter(5)]).train()
    # One wait before the save of step 4, one before the end.
    assert heard == [(True, True)] * 2
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
