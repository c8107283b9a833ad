"""The checkpointer of a loop of one's own, with real ranks, launchers and kills."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.process.gangs import ROOT, run_gang_to_end
from tests.process.scripts import Script, weights_of

WORKER = Path(__file__).with_name("loop_worker.py")
EXAMPLE = ROOT / "examples" / "plain_loop.py"
STEPS = 240
pytestmark = [pytest.mark.xdist_group("loop")]

ALONE = ()
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
OURS = ("-m", "resilient_cli", "train", "--nproc-per-node", "2")


def test_every_layout_goes_on_to_the_bit(tmp_path):
    ends = run_gang_to_end(2, WORKER, tmp_path)
    for _, said, _ in ends:
        found = [json.loads(line) for line in said.splitlines()]
        assert [wrong for _, _, wrong in found] == [[]] * 5
        strategies = {layout: world for layout, world, _ in found}
        assert strategies["ddp"] == {"size": 2, "strategy": "ddp"}
        assert strategies["fsdp"] == strategies["flat"] == {"size": 2, "strategy": "fsdp"}


def example(folder, launcher=ALONE):
    return Script(EXAMPLE, folder, STEPS, launcher=launcher)


def test_a_killed_process_goes_on_when_it_is_started_again(tmp_path):
    whole = example(tmp_path / "whole").run_to_end()
    assert example(tmp_path / "killed").killed_and_started_again(60) == whole
    assert len(whole) == 1


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What two ranks end with that nobody disturbed."""
    return example(tmp_path_factory.mktemp("whole"), TORCHRUN).run_to_end()


@pytest.mark.long
def test_a_killed_job_of_torchrun_goes_on_when_it_is_started_again(tmp_path, whole):
    assert example(tmp_path, TORCHRUN).killed_and_started_again(60) == whole


@pytest.mark.long
def test_a_killed_rank_is_started_again_by_our_launcher(tmp_path, whole):
    with example(tmp_path, OURS).started() as job:
        job.wait_for_checkpoint(60)
        ranks = job.ranks()
        assert len(ranks) == 2
        ranks[1].kill()
        said = job.finish()
    assert "resumed from checkpoint-" in said
    assert weights_of(said) == whole
