"""Tools that are too big for CI: each test runs where the tool is installed, without a network."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import signal
import sqlite3
import subprocess
import sys
import zipfile

import pytest

from resilient.train.arguments import TrainingArguments
from resilient.train.trackers import Reporting, TrackerContext, reporting
from resilient.train.trackers.base import LocalStateTracker
from resilient.train.trackers.other_tools import session_steps

DEATHS = [6, 10]
SETTINGS = {
    "clearml": {
        "CLEARML_OFFLINE_MODE": "1",
        "CLEARML_CACHE_DIR": "{}/clearml",
        "CLEARML_PROC_MASTER_ID": "",
        "TRAINS_PROC_MASTER_ID": "",
    },
    "comet_ml": {"COMET_START_ONLINE": "0", "COMET_OFFLINE_DIRECTORY": "{}/comet"},
    "neptune": {"NEPTUNE_MODE": "offline", "NEPTUNE_PROJECT": "our/project"},
    "trackio": {"TRACKIO_DIR": "{}/trackio"},
}


def needs(tool):
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed: pip install {tool}")


def read_clearml(folder):
    """Return (name, step) of all reports, and the tasks they are of."""
    seen, tasks = [], set()
    for file in folder.glob("clearml/offline/*/metrics.jsonl"):
        for line in file.read_text().splitlines():
            for one in json.loads(line):
                tasks.add(one["task"])
                seen.append((f"{one['metric']}/{one['variant']}", one["iter"]))
    return [point for point in seen if point[1] >= 0], tasks


def read_comet(folder):
    seen, keys = [], set()
    for file in folder.glob("comet/*.zip"):
        keys.add(file.name[:32])
        with zipfile.ZipFile(file) as archive:
            for line in archive.read("messages.json").decode().splitlines():
                message = json.loads(line)
                if message["type"] == "metric_msg":
                    metric = message["payload"]["metric"]
                    seen.append((metric["metricName"], metric["step"]))
    return [point for point in seen if not point[0].startswith("sys.")], keys


def read_neptune(folder):
    seen = []
    decoder = json.JSONDecoder()
    for file in folder.glob(".neptune/offline/*/data-*.log"):
        text = file.read_text()
        while text.strip():
            one, end = decoder.raw_decode(text.lstrip())
            text = text.lstrip()[end:]
            operation = one["obj"]
            name = "/".join(operation["path"])
            if operation["type"] == "LogFloats" and name.startswith("finetuning/"):
                seen += [
                    (name.removeprefix("finetuning/"), int(value["step"]))
                    for value in operation["values"]
                ]
    # Without a network Neptune writes a folder for each life and no word of the id.
    return seen, set((folder / "out" / "trackers").glob("neptune-*.json"))


def read_trackio(folder):
    seen, runs = [], set()
    for file in (folder / "trackio").glob("*.db"):
        with sqlite3.connect(file) as database:
            rows = database.execute("SELECT run_name, step, metrics FROM metrics").fetchall()
        for run, step, metrics in rows:
            runs.add(run)
            seen += [(name, step) for name in json.loads(metrics)]
    return seen, runs


READERS = {
    "comet_ml": read_comet,
    "neptune": read_neptune,
    "trackio": read_trackio,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tool", list(READERS))
def test_two_deaths_leave_one_run_in_which_no_point_comes_twice(lives, tmp_path, monkeypatch, tool):
    needs(tool)
    for name, value in SETTINGS[tool].items():
        monkeypatch.setenv(name, value.format(tmp_path))
    # Real lives are processes, whose tools end with them.
    monkeypatch.setattr(reporting, "_CUT_SECONDS", 60.0)
    lives("out", DEATHS, report_to=tool, run_name="mine", num_train_epochs=1)
    points, runs = READERS[tool](tmp_path)
    assert len(runs) == 1
    assert len(points) == len(set(points))
    assert {step for name, step in points if name == "train/loss"} == {3, 6, 9, 12}
    assert {step for name, step in points if name == "eval/loss"} == {4, 8, 12, 13}


@pytest.mark.filterwarnings("ignore")
def test_clearml_gets_one_task_without_a_network(lives, tmp_path, monkeypatch):
    needs("clearml")
    for name, value in SETTINGS["clearml"].items():
        monkeypatch.setenv(name, value.format(tmp_path))
    # Without a network its client may take minutes to let go of a task.
    monkeypatch.setattr(reporting, "_END_SECONDS", 200.0)
    lives("out", [], report_to="clearml", run_name="mine", num_train_epochs=1)
    points, tasks = read_clearml(tmp_path)
    assert len(tasks) == 1
    assert len(points) == len(set(points))
    assert {step for name, step in points if name == "train/loss"} == {3, 6, 9, 12}
    assert {step for name, step in points if name == "eval/loss"} == {4, 8, 12, 13}


LIFE = """
import os, signal, sys, time
from pathlib import Path
from tests.unit.train.models import TrainerCallback, make_trainer
from resilient.storage.local import LocalStore
from resilient.checkpoint.catalog import committed

class Killed(TrainerCallback):
    def on_step_begin(self, args, state, control, /, **_):
        if state.global_step == {at}:
            while max((one.step for one in committed(LocalStore(Path("out")))), default=0) < 4:
                time.sleep(0.01)
            handed = Path("out/trackers")
            while not any("6" in one.read_text() for one in handed.glob("*.json")):
                time.sleep(0.01)
            os.killpg(os.getpgid(0), signal.SIGKILL)

if __name__ == "__main__":
    make_trainer("out", callbacks=[Killed()], report_to="clearml", run_name="mine",
        num_train_epochs=1, save_overlap=False).train()
"""


def test_clearml_lacks_no_point_of_a_life_that_was_killed(tmp_path):
    needs("clearml")
    settings = {name: value.format(tmp_path) for name, value in SETTINGS["clearml"].items()}
    ends = []
    for at in (7, 0):
        script = tmp_path / f"life{at}.py"
        script.write_text(LIFE.format(at=at or -1))
        life = subprocess.run(
            [sys.executable, "-W", "ignore", str(script)],
            cwd=tmp_path,
            env={**os.environ, **settings},
            timeout=230,
            capture_output=True,
            check=False,
            # What ClearML runs beside the script is killed with it, else it sends what it got.
            start_new_session=True,
        )
        ends.append(life.returncode)
    assert ends == [-signal.SIGKILL, 0]
    points, tasks = read_clearml(tmp_path)
    assert len(tasks) == 1
    assert len(points) == len(set(points))
    assert {step for name, step in points if name == "train/loss"} == {3, 6, 9, 12}


def test_what_a_session_of_clearml_has_is_read_from_its_file(tmp_path):
    file = tmp_path / "metrics.jsonl"
    assert session_steps(file) == {}

    def line(*steps):
        points = [{"metric": "train", "variant": "loss", "iter": step} for step in steps]
        return json.dumps(points) + "\n"

    file.write_text(line(3, 6) + line(9)[:-4])
    assert session_steps(file) == {"train/loss": 6}
    with file.open("a") as more:
        more.write(line(9))
    assert [len(json.loads(one)) for one in file.read_text().splitlines()] == [2, 1]
    assert session_steps(file) == {"train/loss": 9}


@pytest.mark.filterwarnings("ignore")
def test_the_emissions_of_all_lives_have_one_name(lives, tmp_path, monkeypatch):
    needs("codecarbon")
    monkeypatch.setenv("CODECARBON_COUNTRY_ISO_CODE", "FRA")
    lives("out", DEATHS, report_to="codecarbon", num_train_epochs=1)
    rows = list(csv.DictReader((tmp_path / "out" / "emissions.csv").open()))
    assert len(rows) == 1 + len(DEATHS)
    assert len({row["experiment_id"] for row in rows}) == 1
    assert all(float(row["energy_consumed"]) > 0 for row in rows)


class Silent(LocalStateTracker):
    """A tool that cannot be asked what it has."""

    name = "silent"

    def __init__(self, drawn):
        super().__init__()
        self.drawn = drawn

    def open(self, opening):
        self.run_id = opening.run_id or "one"

    def draw(self, metrics, step):
        self.drawn += [(name, step) for name in metrics]


def test_a_tool_that_cannot_be_asked_is_remembered_for(lives):
    drawn = []
    lives("out", [6, 14, 22], callbacks=lambda: [Reporting(Silent(drawn))])
    assert len(drawn) == len(set(drawn))
    assert {step for name, step in drawn if name == "train/loss"} == set(range(3, 27, 3))


def test_another_run_is_not_remembered_for(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path))
    first = Silent([])
    assert first.start(TrackerContext(args)) is None
    first.log({"train/loss": 1.0}, 3)
    again = Silent([]).start(TrackerContext(args, run_id="one"))
    assert again.has("train/loss", 3)
    assert not again.has("train/loss", 4)
    assert Silent([]).start(TrackerContext(args, run_id="two")) is None
    assert Silent([]).start(TrackerContext(args)) is None
