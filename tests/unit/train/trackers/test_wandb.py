from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from resilient import Trainer, TrainingArguments
from resilient.errors import ConfigError
from resilient.train.trackers.wandb import _parsed, history_rows
from tests.unit.train.models import Net, Noisy, make_trainer

DEATHS = [6, 14, 22]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """Start W&B's own process once, without a network; it takes its settings when it starts."""
    wandb = pytest.importorskip("wandb")
    folder = tmp_path_factory.mktemp("wandb")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "WANDB_MODE": "offline",
            "WANDB_DIR": str(folder),
            "WANDB_SILENT": "true",
            "WANDB_CONSOLE": "off",
            "WANDB_PROJECT": "tested",
            "WANDB_DATA_DIR": str(folder / "data"),
            "WANDB_CACHE_DIR": str(folder / "cache"),
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
    import wandb

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


def artifacts_in(files):
    """Return (name, aliases, metadata, file -> where its bytes wait) of each artifact, in order."""
    return [
        (
            one.artifact.name,
            set(one.artifact.aliases),
            json.loads(one.artifact.metadata),
            {entry.path: Path(entry.local_path) for entry in one.artifact.manifest.contents},
        )
        for file in files
        for one in _parsed(file)
        if one.WhichOneof("record_type") == "artifact"
    ]


@pytest.mark.parametrize(("said", "steps"), [("checkpoint", [4, 8]), ("end", [8])])
def test_models_of_committed_checkpoints_become_versions_of_one_artifact(
    tmp_path, written, monkeypatch, said, steps
):
    monkeypatch.setenv("WANDB_LOG_MODEL", said)
    how = {"report_to": "wandb", "run_name": "a run", "max_steps": 8, "save_overlap": False}
    trainer = make_trainer(tmp_path / "run", **how)
    trainer.train()
    found = artifacts_in(written().files)
    assert [meta["checkpoint"] for _, _, meta, _ in found] == [f"checkpoint-{x}-g1" for x in steps]
    assert {name for name, *_ in found} == {"model-a-run"}
    _, aliases, meta, files = found[-1]
    assert {"final_model", "checkpoint_global_step_8"} <= aliases
    assert meta["final_model"] is True
    weights = load_file(files["model.safetensors"])
    assert all(torch.equal(one, weights[name]) for name, one in trainer.model.state_dict().items())


@pytest.mark.parametrize("said", ["false", " No", ""])
def test_no_model_is_uploaded_unless_it_was_asked_for(tmp_path, written, monkeypatch, said):
    monkeypatch.setenv("WANDB_LOG_MODEL", said)
    make_trainer(tmp_path / "run", report_to="wandb", max_steps=4).train()
    assert artifacts_in(written().files) == []


@pytest.mark.parametrize("name", ["WANDB_LOG_MODEL", "WANDB_WATCH"])
def test_wandb_unknown_word_is_refused_at_the_start(tmp_path, monkeypatch, name):
    monkeypatch.setenv(name, "always")
    with pytest.raises(ConfigError, match=f"{name}='always' is not accepted"):
        make_trainer(tmp_path / "run", report_to="wandb", max_steps=4)


def test_the_values_of_a_trial_are_in_the_config(tmp_path, written):
    args = TrainingArguments(str(tmp_path), report_to="wandb", max_steps=2, disable_tqdm=True)
    trainer = Trainer(
        args=args,
        train_dataset=Noisy(50),
        model_init=lambda trial: Net((trial or {}).get("depth", 0)),
    )
    trainer.train(trial={"learning_rate": 0.0625, "depth": 7})
    (file,) = written().files
    config = {
        item.key or ".".join(item.nested_key): json.loads(item.value_json)
        for one in _parsed(file)
        if one.WhichOneof("record_type") in ("run", "config")
        for item in (one.run.config if one.HasField("run") else one.config).update
    }
    assert config["depth"] == 7
    assert config["learning_rate"] == 0.0625
