"""SIGKILL while a checkpoint is on its way from the near tier to the durable one."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from resilient.checkpoint.catalog import committed
from resilient.checkpoint.verify import verify
from resilient.storage.open import open_store

SCRIPT = Path(__file__).with_name("tiered_trainer.py")


def train(folder, where="end") -> subprocess.CompletedProcess[str]:
    places = [str(folder / "near"), str(folder / "durable")]
    command = [sys.executable, str(SCRIPT), *places, "7", where]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def steps(folder) -> list[int]:
    return [one.step for one in committed(open_store(str(folder)))]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Two tiers of a run that was killed in the middle of promoting step 4, after saving 5."""
    folder = tmp_path_factory.mktemp("killed")
    ended = train(folder, "promoting")
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert list((folder / "durable").glob("checkpoint-4-g1/*.safetensors")), "it had begun"
    assert steps(folder / "durable") == [2, 1]
    assert steps(folder / "near") == [5, 4]
    return folder


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> str:
    ended = train(tmp_path_factory.mktemp("unbroken"))
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()[1]


@pytest.mark.smoke
def test_sigkill_in_the_middle_of_a_promotion_costs_nothing_on_the_same_host(
    killed, unbroken, tmp_path
):
    shutil.copytree(killed, tmp_path / "run")
    ended = train(tmp_path / "run")
    assert ended.stdout.split() == ["5", unbroken], ended.stderr
    durable = open_store(str(tmp_path / "run" / "durable"))
    assert steps(tmp_path / "run" / "durable")[:3] == [7, 6, 5]
    assert not [bad for one in committed(durable) for bad in verify(durable, one, "full")]


def test_on_a_new_host_the_run_goes_on_from_the_last_promoted_checkpoint(
    killed, unbroken, tmp_path
):
    shutil.copytree(killed / "durable", tmp_path / "run" / "durable")
    ended = train(tmp_path / "run")
    assert ended.stdout.split() == ["2", unbroken], ended.stderr
    assert steps(tmp_path / "run" / "durable")[0] == 7
