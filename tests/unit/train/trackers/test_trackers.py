from __future__ import annotations

import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from resilient.errors import ConfigError
from resilient.train.arguments import TrainingArguments
from resilient.train.callbacks.base import TrainerCallback
from resilient.train.state import TrainerState
from resilient.train.trackers import (
    LoggedSteps,
    Reporting,
    Tracker,
    TrackerContext,
)
from resilient.train.trackers import (
    reporting as reporting_module,
)
from resilient.train.trackers.base import StepFilter, points_of, rewritten
from resilient.train.trackers.reporting import TrackerWorker
from tests.unit.train.models import make_trainer


class Lines(Tracker):
    """A tool that keeps what it got; it can take things back, or not."""

    name = "lines"

    def __init__(self, drawn=None, takes_back=True):
        self.drawn = [] if drawn is None else drawn
        self.takes_back = takes_back
        self.openings, self.ends = [], []

    def start(self, opening):
        self.openings.append(opening)
        self.run_id = opening.run_id or f"run-{len(self.openings)}"
        if not self.takes_back:
            held = {}
            for name, step, _ in self.drawn:
                held[name] = max(step, held.get(name, -1))
            return LoggedSteps(held)
        self.drawn[:] = [point for point in self.drawn if point[1] < opening.since]
        return None

    def log(self, metrics, step):
        self.drawn += [(name, step, value) for name, value in metrics.items()]

    def finish(self, *, completed):
        self.ends.append(completed)


class AllSent(TrainerCallback):
    """Holds training until the tool has the step, so that the save after it knows that."""

    def __init__(self, reporting):
        self.reporting = reporting

    def on_evaluate(self, _args, state, _control, /, **_):
        until = time.monotonic() + 30
        while self.reporting.state_dict()["lines"]["step"] < state.global_step:
            assert time.monotonic() < until
            time.sleep(0.001)


class Broken(Lines):
    def log(self, metrics, step):
        raise OSError("the network is down")


class Unreachable(Lines):
    def start(self, opening):
        raise ConnectionError("no such host")


class Hanging(Lines):
    def __init__(self):
        super().__init__()
        self.released = threading.Event()

    def start(self, opening):
        self.released.wait(60)


@pytest.mark.parametrize("takes_back", [True, False])
def test_three_deaths_leave_the_curve_of_the_unbroken_run(lives, timeless, takes_back):
    curves = {}
    for deaths in ([], [6, 14, 22]):
        drawn = []
        made = lambda drawn=drawn: [Reporting(Lines(drawn, takes_back))]  # noqa: E731
        lives(f"deaths-{len(deaths)}", deaths, callbacks=made)
        curves[len(deaths)] = drawn
    assert timeless(curves[0]) == timeless(curves[3])
    points = [point[:2] for point in curves[3]]
    assert len(points) == len(set(points))


def test_every_life_goes_on_with_the_run_that_the_checkpoint_names(lives):
    told = []

    class Numbered(Lines):
        def start(self, opening):
            told.append((opening.run_id, opening.since))
            self.run_id = opening.run_id or f"life-{len(told)}"

    def waited():
        reporting = Reporting(Numbered())
        return [reporting, AllSent(reporting)]

    lives("out", [6, 14], callbacks=waited)
    assert told == [("", 0), ("life-1", 4), ("life-1", 12)]


def test_a_run_that_is_cut_off_is_not_called_completed(lives):
    ends = []

    class Ending(Lines):
        def finish(self, *, completed):
            ends.append(completed)

    lives("out", [6], callbacks=lambda: [Reporting(Ending())])
    assert ends == [False, True]


@pytest.mark.parametrize("kind", [Broken, Unreachable])
def test_a_tracker_that_fails_is_told_once_and_harms_nothing(repository, tmp_path, capsys, kind):
    other = Lines()
    trainer = make_trainer(tmp_path, callbacks=[Reporting(kind(), Named("other", other))])
    assert trainer.train().global_step == 26
    assert capsys.readouterr().err.count("lacks a part of this run") == 1
    assert {step for name, step, _ in other.drawn if name == "train/loss"} == set(range(3, 27, 3))
    saved = repository.checkpoints[max(repository.checkpoints)]["callbacks"]["Reporting"]
    assert saved["lines"]["step"] == 0


class Named(Tracker):
    """Another name for a tracker, as several stand side by side."""

    def __init__(self, name, inner):
        self.name, self.inner = name, inner

    def start(self, opening):
        return self.inner.start(opening)

    def log(self, metrics, step):
        self.inner.log(metrics, step)


def test_a_tracker_that_hangs_is_left_behind(repository, tmp_path, capsys, monkeypatch):
    for limit in ("_BEGIN_SECONDS", "_END_SECONDS", "_CUT_SECONDS"):
        monkeypatch.setattr(reporting_module, limit, 0.05)
    hanging = Hanging()
    trainer = make_trainer(tmp_path, callbacks=[Reporting(hanging)])
    assert trainer.train().global_step == 26
    hanging.released.set()
    assert capsys.readouterr().err.count("lacks a part of this run") == 1


def test_a_tracker_that_falls_behind_drops_the_newest(monkeypatch):
    monkeypatch.setattr(reporting_module, "_INBOX", 2)
    hanging, told = Hanging(), []
    slow = TrackerWorker(hanging, {}, told.append)
    slow.open(TrackerContext(TrainingArguments()), [], 0.0)
    for step in range(4):
        slow.post({"loss": 1.0}, step)
    hanging.released.set()
    assert [type(one).__name__ for one in told if "behind" in one.message()] == ["TrackerFailed"]


def test_what_failed_is_sent_by_the_next_life(repository, tmp_path, timeless):
    drawn = []
    trainer = make_trainer(tmp_path, callbacks=[Reporting(Broken())], max_steps=8)
    trainer.train()
    trainer = make_trainer(tmp_path, callbacks=[Reporting(Lines(drawn))], max_steps=8)
    trainer.train()
    assert [step for name, step, _ in drawn if name == "train/loss"] == [3, 6]


def test_only_rank_zero_reports(tmp_path):
    lines = Lines()
    reporting = Reporting(lines)
    state = TrainerState(is_world_process_zero=False)
    given = {"emit": print, "model": None}
    reporting.on_train_begin(TrainingArguments(), state, None, **given)
    reporting.on_log(TrainingArguments(), state, None, logs={"loss": 1.0}, **given)
    assert lines.openings == []
    # What it was given it gives on: a rank may be rank zero in the next life.
    reporting.load_state_dict({"lines": {"run_id": "7", "step": 4}})
    assert reporting.state_dict() == {"lines": {"run_id": "7", "step": 4}}


def test_names_are_those_of_the_field():
    assert rewritten("loss") == "train/loss"
    assert rewritten("eval_loss") == "eval/loss"
    assert rewritten("eval_other_accuracy") == "eval/other_accuracy"
    assert rewritten("test_runtime") == "test/runtime"


def test_points_are_plain_numbers_and_texts():
    logs = {
        "loss": torch.tensor(0.5),
        "accuracy": np.float32(0.25),
        "count": np.int64(3),
        "ready": True,
        "note": "warm",
        "matrix": [[1, 2]],
        "array": np.zeros(3),
        "tensor": torch.zeros(2),
        "nothing": None,
        "step": 7,
    }
    points = points_of(logs, str)
    expected = {"loss": 0.5, "accuracy": 0.25, "count": 3, "ready": 1, "note": "warm"}
    assert points == expected
    assert all(type(one) in (int, float, str) for one in points.values())


def test_a_curve_takes_a_point_once_and_a_changed_one_again():
    curve = StepFilter(LoggedSteps({"a": 5}, floor=2))
    assert curve.new({"a": 1.0, "b": 1.0}, 2) == {}
    assert curve.new({"a": 1.0, "b": 1.0}, 5) == {"b": 1.0}
    assert set(curve.new({"a": 1.0, "b": float("nan")}, 6)) == {"a", "b"}
    assert curve.new({"b": float("nan")}, 6) == {}
    assert curve.new({"a": 2.0}, 6) == {"a": 2.0}


def test_an_absent_package_is_refused_with_the_command_that_gets_it(tmp_path, monkeypatch):
    gone = reporting_module.CHOICES["wandb"]._replace(packages=("no_such_package_anywhere",))
    monkeypatch.setitem(reporting_module.CHOICES, "wandb", gone)
    with pytest.raises(ConfigError, match="`wandb`") as raised:
        make_trainer(tmp_path, report_to="wandb")
    assert raised.value.hint == "pip install wandb"


def test_all_means_those_that_are_installed(monkeypatch):
    for name, one in reporting_module.CHOICES.items():
        packages = ("json",) if name == "tensorboard" else ("no_such_package_anywhere",)
        monkeypatch.setitem(reporting_module.CHOICES, name, one._replace(packages=packages))
    assert [one.name for one in reporting_module.ReportTo(["all"])._trackers] == ["tensorboard"]


def test_every_tracker_that_is_offered_can_be_made():
    offered = [name for name in reporting_module.CHOICES if reporting_module._is_there(name)]
    assert all(isinstance(reporting_module._make_tracker(name), Tracker) for name in offered)
    assert "tensorboard" in offered


def test_trackers_cost_nothing_when_they_are_off():
    probe = (
        "import sys; from resilient import TrainingArguments; "
        "from resilient.train.build_run import default_callbacks; "
        "default_callbacks(TrainingArguments(), []); "
        "print([n for n in sys.modules if 'trackers' in n or n in ('wandb', 'mlflow')])"
    )
    told = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"
