"""Which held step lands, by what all ranks hold and what the store has."""

from __future__ import annotations

import pytest

from resilient.checkpoint.daemon.session import choose_step
from resilient.format.keys import CheckpointId
from resilient.storage.open import open_store


@pytest.fixture
def store():
    held = open_store("memory://held-steps")
    # A listing sees that it is committed; nobody reads it.
    held.put(CheckpointId(2, 10).manifest_key, b"{}")
    return held


def holds(*steps, after="checkpoint-10-g2", generation=2):
    return {CheckpointId(generation, step).folder: after for step in steps}


@pytest.mark.parametrize(
    ("held", "folder"),
    [
        ([holds(11, 12), holds(12, 13)], "checkpoint-12-g2"),
        ([holds(12, 13), holds(12, 13)], "checkpoint-13-g2"),
        # Numbers and not names.
        ([holds(99, 100)], "checkpoint-100-g2"),
        ([holds(11), holds(12)], ""),
        ([holds(11, 12), {}], ""),
        ([holds(9, 10)], ""),
        ([holds(11, after="")], "checkpoint-11-g2"),
        # The save that its ledger goes on from has failed.
        ([holds(12, after="checkpoint-11-g2")], ""),
        ([holds(11) | holds(13, after="checkpoint-12-g2")], "checkpoint-11-g2"),
        # A newer life has committed.
        ([holds(99, after="", generation=1)], ""),
    ],
)
def test_the_newest_that_all_hold_and_that_goes_on_from_what_is_there(store, held, folder):
    assert choose_step(store, held) == {"folder": folder}
