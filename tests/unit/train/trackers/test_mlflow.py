from __future__ import annotations

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file

from resilient.errors import ConfigError
from tests.unit.train.models import make_trainer

DEATHS = [6, 14, 22]


@pytest.fixture(autouse=True, scope="module")
def store(tmp_path_factory):
    """Make one database for all tests: its tables take seconds."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = tmp_path_factory.mktemp("mlflow")
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.setenv("_MLFLOW_TELEMETRY_SESSION_ID", "none")
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
        pytest.importorskip("sqlalchemy")
        mlflow = pytest.importorskip("mlflow")
        yield mlflow.MlflowClient()


def runs_of(store, name):
    return store.search_runs([store.get_experiment_by_name(name).experiment_id])


def read(store, run):
    return sorted(
        (name, one.step, one.value)
        for name in run.data.metrics
        for one in store.get_metric_history(run.info.run_id, name)
    )


@pytest.mark.slow
def test_three_deaths_leave_one_run_with_the_unbroken_runs_curve(
    lives, store, monkeypatch, timeless
):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "unbroken")
    lives("unbroken", [], report_to="mlflow")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "broken")
    lives("broken", DEATHS, report_to="mlflow")
    (straight,), (run,) = runs_of(store, "unbroken"), runs_of(store, "broken")
    curve = read(store, run)
    assert timeless(curve) == timeless(read(store, straight))
    assert len(curve) == len({point[:2] for point in curve})
    assert {"loss", "eval_loss", "train_loss"} <= set(run.data.metrics)
    assert run.info.status == "FINISHED"


def test_the_run_has_what_arguments_and_environment_say(repository, tmp_path, store, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "named")
    monkeypatch.setenv("MLFLOW_TAGS", '{"team": "vision"}')
    monkeypatch.setenv("MLFLOW_MAX_LOG_PARAMS", "3")
    make_trainer(tmp_path, report_to="mlflow", run_name="mine", max_steps=4).train()
    (run,) = runs_of(store, "named")
    assert run.info.run_name == "mine"
    assert run.data.tags["team"] == "vision"
    assert len(run.data.params) == 3


def test_a_store_that_lost_the_run_gets_the_whole_history(lives, store, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "before")

    def move():
        if store.get_experiment_by_name("before"):
            (run,) = runs_of(store, "before")
            monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "after")
            store.delete_run(run.info.run_id)
            _purge(store, run.info.run_id)
        return []

    lives("moved", [14], report_to="mlflow", callbacks=move)
    (run,) = runs_of(store, "after")
    assert [step for name, step, _ in read(store, run) if name == "loss"] == [*range(3, 27, 3)]


def _purge(store, run_id):
    store._tracking_client.store._hard_delete_run(run_id)


def test_the_environment_switches_it_off(repository, tmp_path, monkeypatch):
    monkeypatch.setenv("DISABLE_MLFLOW_INTEGRATION", "TRUE")
    trainer = make_trainer(tmp_path, report_to="mlflow", max_steps=4)
    trainer.train()
    assert trainer.callback_handler.callbacks[1].state_dict() == {}


def test_models_of_committed_checkpoints_become_artifacts(tmp_path, store, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "kept")
    monkeypatch.setenv("HF_MLFLOW_LOG_ARTIFACTS", "TRUE")
    store.create_experiment("kept", artifact_location=(tmp_path / "artifacts").as_uri())
    how = {"report_to": "mlflow", "max_steps": 8, "save_overlap": False}
    trainer = make_trainer(tmp_path / "run", **how)
    trainer.train()
    (run,) = runs_of(store, "kept")
    number = run.info.run_id
    assert [one.path for one in store.list_artifacts(number)] == ["checkpoint-4", "checkpoint-8"]
    assert run.data.tags["final_model"] == "checkpoint-8"
    folder = tmp_path / "artifacts" / number / "artifacts" / "checkpoint-8"
    weights = load_file(folder / "model.safetensors")
    assert all(torch.equal(one, weights[name]) for name, one in trainer.model.state_dict().items())
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 8


def test_a_store_that_takes_no_artifact_ends_nothing(tmp_path, store, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "refused")
    monkeypatch.setenv("HF_MLFLOW_LOG_ARTIFACTS", "1")
    (tmp_path / "file").write_text("no folder can be made below")
    store.create_experiment("refused", artifact_location=(tmp_path / "file" / "below").as_uri())
    how = {"report_to": "mlflow", "max_steps": 8, "save_overlap": False}
    assert make_trainer(tmp_path / "run", **how).train().global_step == 8
    assert "mlflow did not accept a model" in capsys.readouterr().err
    (run,) = runs_of(store, "refused")
    assert run.info.status == "FINISHED"
    assert "final_model" not in run.data.tags


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_MLFLOW_LOG_ARTIFACTS", "all"),
        ("MLFLOW_FLATTEN_PARAMS", "2"),
        ("MLFLOW_MAX_LOG_PARAMS", "ten"),
        ("MLFLOW_TAGS", "team=speech"),
        ("MLFLOW_TAGS", "[1]"),
        ("DISABLE_MLFLOW_INTEGRATION", "please"),
    ],
)
def test_mlflow_malformed_variable_is_refused_at_the_start(tmp_path, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=name):
        make_trainer(tmp_path / "run", report_to="mlflow", max_steps=4)
