"""Runs that stock Transformers sharded (FSDP, DeepSpeed), gone on with here: the next losses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.process.deepspeed_forks import run_forks
from tests.process.transformers_sharded_kinds import KINDS, SAVED, STEPS

WORKER = Path(__file__).with_name("transformers_sharded_worker.py")
LEFT = {
    "fsdp1_sharded": {"pytorch_model_fsdp_0", "optimizer_0"},
    "fsdp2_sharded": {"pytorch_model_fsdp_0", "optimizer_0"},
    "fsdp2_full": {"pytorch_model_fsdp.bin", "optimizer.bin"},
    **{f"zero_{stage}": {"latest", f"global_step{SAVED}"} for stage in (1, 2, 3)},
}
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("transformers_sharded"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    run_forks(WORKER, folder, 2 * len(KINDS))
    return folder


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_sharded_run_goes_on_with_the_losses_that_it_would_have_had(runs, kind):
    assert LEFT[kind] <= {one.name for one in (runs / kind / f"checkpoint-{SAVED}").iterdir()}
    for rank in range(2):
        theirs, ours = (
            json.loads((runs / f"{kind}-{whose}-{rank}.json").read_text())
            for whose in ("theirs", "ours")
        )
        assert (len(theirs), len(ours)) == (STEPS, STEPS - SAVED)
        expected = theirs[SAVED:]
        assert [samples for samples, _ in ours] == [samples for samples, _ in expected]
        # What was taken over is the same to the bit, and so is at least the next loss.
        same = KINDS[kind][3]
        assert ours[:same] == expected[:same]
        losses = [[float.fromhex(loss) for _, loss in one] for one in (ours, expected)]
        assert losses[0] == pytest.approx(losses[1], rel=2e-6)


@pytest.mark.parametrize("kind", list(KINDS))
def test_what_it_ends_with_is_what_they_end_with(runs, kind):
    found, expected = (
        load_file(runs / place / "model.safetensors")
        for place in (f"{kind}-exported", f"zero_1/checkpoint-{STEPS}")
    )
    # What is tied may be there under both names.
    assert found.keys() ^ expected.keys() <= {"lm_head.weight"}
    for name in found.keys() & expected.keys():
        assert torch.allclose(found[name], expected[name], atol=2e-5), name
