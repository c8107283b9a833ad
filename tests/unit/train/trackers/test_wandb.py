from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("wandb")
import wandb
from models import make_trainer

from resilient.train.trackers.wandb_file import history_rows

DEATHS = [6, 14, 22]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """Start W&B's own process once, without a network; it takes its settings when it starts."""
    folder = tmp_path_factory.mktemp("wandb")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "WANDB_MODE": "offline",
            "WANDB_DIR": str(folder),
            "WANDB_SILENT": "true",
            "WANDB_CONSOLE": "off",
            "WANDB_PROJECT": "tested",
            "WANDB_SERVICE": "",
        }.items():
            patch.setenv(name, value)
        patch.delenv("WANDB_SERVICE")
        wandb.setup()
        yield folder
        wandb.teardown()


@pytest.fixture
def written(service):
    """Return a function that gives the files that were written since it was asked last."""
    seen = set()

    def news():
        files = sorted(set(service.glob("wandb/offline-run-*/run-*.wandb")) - seen)
        seen.update(files)
        points = [
            (name, row["_step"], value)
            for file in files
            for row in history_rows(file)
            for name, value in row.items()
            if not name.startswith("_")
        ]
        return SimpleNamespace(files=files, points=sorted(points))

    news()
    return news


def test_three_deaths_leave_one_run_in_which_no_point_comes_twice(lives, written, timeless):
    lives("unbroken", [], report_to="wandb")
    straight = written()
    lives("broken", DEATHS, report_to="wandb")
    broken = written()
    assert len(broken.files) == 4
    assert len({one.stem for one in broken.files}) == 1
    # The axis stands in each row, also in the one of a step that two lives filled.
    points = [point[:2] for point in broken.points if point[0] != "train/global_step"]
    assert len(points) == len(set(points))
    assert set(timeless(broken.points)) == set(timeless(straight.points))


def test_the_run_has_the_names_of_arguments_and_environment(repository, tmp_path, written):
    make_trainer(tmp_path, report_to="wandb", run_name="mine", max_steps=4).train()
    (file,) = written().files
    content = file.read_bytes()
    assert b"tested" in content
    assert b"mine" in content
    assert b"per_device_train_batch_size" in content
    saved = repository.checkpoints[max(repository.checkpoints)]["callbacks"]["ReportTo"]
    assert file.stem == f"run-{saved['wandb']['run_id']}"


def test_a_run_that_the_script_opened_is_used_and_left_open(repository, tmp_path, written):
    with wandb.init(project="own", id="scripts01") as run:
        make_trainer(tmp_path, report_to="wandb", max_steps=4).train()
        assert wandb.run is run
        assert run.summary["train_loss"] > 0
    assert [one.stem for one in written().files] == ["run-scripts01"]


def test_what_a_kill_left_half_written_is_passed_over(repository, tmp_path, written):
    make_trainer(tmp_path, report_to="wandb", logging_steps=1).train()
    (file,) = written().files
    whole = list(history_rows(file))
    torn = tmp_path / "torn.wandb"
    torn.write_bytes(file.read_bytes()[:-600])
    rows = list(history_rows(torn))
    assert 0 < len(rows) < len(whole)
    assert rows == whole[: len(rows)]
