"""When ranks begin to add the loss of a step that memory is to hold."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from resilient.train.run import TrainingRun


@pytest.mark.parametrize("is_held", [True, False])
def test_it_is_behind_the_copy_of_the_step_before(is_held):
    """Else a rank that has the sum does not know that the others hold that step whole."""
    done = []
    run = SimpleNamespace(
        saver=SimpleNamespace(
            before_update=lambda: done.append("copied"),
            caches_next_step=lambda: is_held,
            near_sums="begun",
        ),
        meters=SimpleNamespace(begin_mean=done.append),
    )
    TrainingRun.wait_for_copy(run, lambda *_: nullcontext())
    assert done == ["copied", "begun"][: 1 + is_held]
