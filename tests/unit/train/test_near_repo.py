"""`near_repo` reaches the store: a run that died goes on from it, or from `repo` without it."""

from __future__ import annotations

import shutil

import pytest

from resilient.checkpoint.catalog import committed
from resilient.storage.open import open_store
from tests.unit.train.fakes import equal
from tests.unit.train.models import DieAfter, Dies, make_trainer


@pytest.mark.parametrize("is_near_lost", [False, True])
def test_a_run_that_died_ends_with_the_same_bits_with_and_without_its_near_tier(
    is_near_lost, tmp_path
):
    unbroken = make_trainer(tmp_path / "unbroken")
    unbroken.train()
    folder = tmp_path / "broken"
    tiers = {"near_repo": str(tmp_path / "near"), "durable_every": 100, "near_total_limit": 3}
    with pytest.raises(Dies):
        make_trainer(folder, callbacks=[DieAfter(14)], **tiers).train()
    near, durable = open_store(tiers["near_repo"]), open_store(str(folder))
    assert len(committed(near)) == 3
    if is_near_lost:
        shutil.rmtree(tiers["near_repo"])
    broken = make_trainer(folder, **tiers)
    broken.train()
    assert equal(unbroken.model.state_dict(), broken.model.state_dict())
    assert committed(durable)[0].step == broken.state.global_step
    assert len(committed(near)) == 3
    told = (folder / "events" / "rank-0.jsonl").read_text()
    assert '"event": "CheckpointPromoted"' in told
