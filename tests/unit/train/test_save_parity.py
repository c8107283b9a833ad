"""`save_parity` reaches the store, and a run that lost a file goes on with the same bits."""

from __future__ import annotations

import pytest

from resilient.errors import ConfigError
from resilient.train.arguments import TrainingArguments
from tests.unit.train.fakes import equal
from tests.unit.train.models import DieAfter, Dies, make_trainer


def test_a_run_whose_newest_checkpoint_lost_a_file_ends_with_the_same_bits(tmp_path):
    unbroken = make_trainer(tmp_path / "unbroken", save_parity=1)
    unbroken.train()
    folder = tmp_path / "broken"
    with pytest.raises(Dies):
        make_trainer(folder, save_parity=1, callbacks=[DieAfter(14)]).train()
    newest = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    (newest / "model.r00000.safetensors").unlink()
    broken = make_trainer(folder, save_parity=1)
    broken.train()
    assert equal(unbroken.model.state_dict(), broken.model.state_dict())
    told = (folder / "events" / "rank-0.jsonl").read_text()
    assert '"event": "CheckpointReconstructed"' in told
    assert '"event": "CheckpointSkipped"' not in told
    assert f'"parent": "{newest.name}"' in told


@pytest.mark.parametrize("value", [-1, 17, 1.5, True])
def test_a_number_of_parities_that_cannot_be_is_refused_at_once(value):
    with pytest.raises(ConfigError):
        TrainingArguments(save_parity=value)
