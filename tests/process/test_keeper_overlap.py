"""A trainer killed at any moment of a save: what was promised lands, and nothing else is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from resilient.checkpoint.daemon.client import DaemonProcess
from resilient.checkpoint.daemon.connection import DaemonConnection
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.errors import SaveFailed
from resilient.format.keys import CheckpointId
from resilient.state_dict.optimizer import NamedOptimizer
from resilient.state_dict.snapshot import Part
from tests.helpers.keepers import Keeper, names, open_one
from tests.helpers.manifests import Values

HELD = Path(__file__).parents[1] / "helpers" / "held"
TRAINER = Path(__file__).with_name("dying_trainer.py")


@pytest.fixture
def keeper(tmp_path):
    one = Keeper(tmp_path / "keeper")
    yield one
    one.kill()


@pytest.mark.parametrize(
    ("where", "lands"), [("saved", True), ("updating", True), ("copying", False)]
)
def test_a_trainer_killed(keeper, tmp_path, where, lands):
    run = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, str(TRAINER), str(keeper.path), str(run), where],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    target = Values()
    checkpointer = open_one(keeper, run, scope="next")
    resumed = checkpointer.resume({"model": Part(target)})
    checkpointer.close()
    assert resumed.checkpoint == CheckpointId(1, 2 if lands else 1)
    same = torch.equal(target.state["weight"], torch.load(keeper.path.with_name("weight")))
    assert same is lands


def test_in_steady_state_a_save_asks_the_keeper_nothing(keeper, tmp_path, monkeypatch):
    checkpointer = open_one(keeper, tmp_path / "run")
    checkpointer.resume({})
    parts = {"model": Part(Values(weight=torch.ones(50_000)))}
    checkpointer.save(1, parts, CheckpointInfo())
    checkpointer.wait()
    asked, ask = [], DaemonConnection.request

    def note(self, verb, **message):
        asked.append(verb)
        return ask(self, verb, **message)

    monkeypatch.setattr(DaemonConnection, "request", note)
    checkpointer.save(2, parts, CheckpointInfo())
    assert [verb for verb in asked if verb != "wait"] == []
    checkpointer.close()
    assert checkpointer.committed()[0] == CheckpointId(1, 2)
    assert "DaemonBypassed" not in names(checkpointer.seen)


def test_memory_is_taken_early_and_the_first_save_asks_for_nothing_big(keeper, tmp_path):
    checkpointer = open_one(keeper, tmp_path / "run")
    checkpointer.resume({})
    parts = {"model": Part(Values(weight=torch.ones(50_000)))}
    checkpointer.warm(parts)
    checkpointer._overlap.settle()
    taken = [path.stat().st_size for path in keeper.shared.glob("*/0*")]
    assert len(taken) == 1
    assert taken[0] > 200_000
    checkpointer.save(1, parts, CheckpointInfo())
    big = [path for path in keeper.shared.glob("*/0*") if path.stat().st_size > 200_000]
    assert len(big) == 1
    checkpointer.close()
    assert checkpointer.committed() == [CheckpointId(1, 1)]


def test_what_is_spoiled_is_not_committed_by_the_keeper(keeper, tmp_path):
    checkpointer = open_one(keeper, tmp_path / "run")
    checkpointer.resume({})
    weight = torch.nn.Parameter(torch.ones(50_000))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    parts = {"model": Part(Values(weight=weight)), "optimizer": Part(optimizer)}
    go_on = threading.Event()
    checkpointer._overlap._thread.submit(go_on.wait, 20)
    checkpointer.save(1, parts, CheckpointInfo(), overlap=True)
    with torch.no_grad():
        weight.add_(1)
    go_on.set()
    with pytest.raises(SaveFailed, match="changed during the copy"):
        checkpointer.wait()
    checkpointer.save(2, parts, CheckpointInfo(), overlap=True)
    checkpointer.close()
    assert checkpointer.committed() == [CheckpointId(1, 2)]
    assert "DaemonBypassed" not in names(checkpointer.seen)


def test_memory_of_a_keeper_that_may_only_be_asleep_is_left_alone(keeper, tmp_path, monkeypatch):
    monkeypatch.setattr("resilient.checkpoint.daemon.connection.SILENCE_SECONDS", 0.5)
    # One that was handed a save before it slept would be killed, and is asleep no more.
    monkeypatch.setattr(DaemonProcess, "end", lambda _: False)
    checkpointer = open_one(keeper, tmp_path / "run")
    checkpointer.resume({})
    parts = {"model": Part(Values(weight=torch.ones(50_000)))}
    checkpointer.save(1, parts, CheckpointInfo())
    checkpointer.wait()
    (held,) = (path for path in keeper.shared.glob("*/0*") if path.stat().st_size > 200_000)
    keeper.process.send_signal(signal.SIGSTOP)
    parts["model"].stateful.state["weight"].add_(1)
    checkpointer.save(2, parts, CheckpointInfo())
    checkpointer.wait()
    before = held.read_bytes()
    parts["model"].stateful.state["weight"].add_(1)
    checkpointer.save(3, parts, CheckpointInfo())
    checkpointer.close()
    assert held.read_bytes() == before
    assert checkpointer.committed()[0] == CheckpointId(1, 3)
    assert names(checkpointer.seen).count("DaemonBypassed") == 2


@pytest.mark.parametrize("overlap", [True, False])
def test_a_checkpoint_is_of_one_moment_though_all_changes_while_it_is_persisted(
    tmp_path, monkeypatch, overlap
):
    gate = tmp_path / "gate"
    gate.mkdir()
    monkeypatch.setenv("HELD_FOLDER", str(gate))
    monkeypatch.setenv("HELD_PREFIX", "checkpoint-1-g1")
    monkeypatch.setenv("PYTHONPATH", f"{HELD}:{os.environ.get('PYTHONPATH', '')}")
    keeper = Keeper(tmp_path / "keeper")
    checkpointer = open_one(keeper, tmp_path / "run")
    training = Training(seed=0)
    checkpointer.resume(training.parts)
    training.step()
    expected = training.state()
    checkpointer.save(1, training.parts, CheckpointInfo(), overlap=overlap)
    # Buffers change in the forward pass, all else in the steps; the store takes nothing yet.
    for _ in range(3):
        training.forward_backward()
        checkpointer.before_update()
        training.update()
    while not list(gate.glob("held-*")):
        time.sleep(0.01)
    training.step()
    (gate / "go").touch()
    checkpointer.close()
    target = Training(seed=1)
    again = open_one(keeper, tmp_path / "run", scope="next")
    again.resume(target.parts)
    again.close()
    assert keeper.close() == 0
    found = target.state()
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert any(not torch.equal(training.state()[name], expected[name]) for name in expected)


class Training:
    """A model with buffers that its forward pass changes, and its optimizer."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        named = NamedOptimizer(self.model, self.optimizer)
        self.parts = {"model": Part(self.model), "optimizer": Part(named)}

    def forward_backward(self):
        self.model(torch.randn(8, 300)).square().sum().backward()

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self):
        self.forward_backward()
        self.update()

    def state(self):
        moments = {
            f"{number}/{kind}": one.clone()
            for number, kinds in self.optimizer.state_dict()["state"].items()
            for kind, one in kinds.items()
        }
        return {name: one.clone() for name, one in self.model.state_dict().items()} | moments
