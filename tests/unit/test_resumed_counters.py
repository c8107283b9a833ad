"""A counter that was given as 0 and resumed as more is read by the loop, or its save is refused."""

from __future__ import annotations

import pytest

from resilient import Checkpointer
from resilient.clock import SystemClock
from resilient.errors import ConfigError
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


def test_epoch_ignored_after_resume_is_refused(folder):
    with Checkpointer(folder, emit=QUIET, rng=False, epoch=0, name="b", rate=0) as second:
        assert second.resume() == 30
        with pytest.raises(ConfigError, match="`epoch` was resumed as 3"):
            second.save(31)
        assert second["epoch"] == 3
        second.save(32)


def test_epoch_set_after_resume_is_taken(folder):
    with Checkpointer(folder, emit=QUIET, rng=False, epoch=0, name="a", rate=0) as second:
        second.resume()
        second["epoch"] = 4
        second.save(31)


def test_epoch_in_a_part_is_refused_alike(folder):
    with Checkpointer(folder, emit=QUIET, rng=False, epoch=Part(0), name="a", rate=0) as second:
        second.resume()
        with pytest.raises(ConfigError, match="`epoch` was resumed as 3"):
            second.save(31)
