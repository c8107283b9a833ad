"""MLflow tracker."""

from __future__ import annotations

import json
import os
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from resilient.environment import read_flag, read_integer
from resilient.errors import ConfigError
from resilient.train.trackers.base import LoggedSteps, Tracker, load

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.train.hf_interop.saved_models import SavedModel
    from resilient.train.trackers.base import TrackerContext

_BATCH = 100


class MLflow(Tracker):
    """Tracker for MLflow: one run per training, continued by its id.

    Points go to ``MLFLOW_TRACKING_URI`` under unchanged names (``eval_loss``). Points that MLflow's
    store has are not logged again. ``MLFLOW_EXPERIMENT_NAME``, ``MLFLOW_RUN_ID``, ``MLFLOW_TAGS``,
    ``MLFLOW_FLATTEN_PARAMS`` and ``MLFLOW_MAX_LOG_PARAMS`` apply. With ``HF_MLFLOW_LOG_ARTIFACTS``
    the model of each committed checkpoint becomes the artifact ``checkpoint-<step>``.

    The run is active in the tracker's thread only. To log other values, use ``MlflowClient`` with
    the run's id.

    Raises:
        ConfigError: One of these variables has an invalid value.
    """

    name = "mlflow"

    def __init__(self) -> None:
        self._client: Any = None
        self._logged_params: set[str] = set()
        # Read the variables here, because an error in the tracker's thread would not end training.
        self._tags = _read_tags()
        self._is_flat = read_flag(os.environ, "MLFLOW_FLATTEN_PARAMS")
        self._params_max = read_integer(os.environ, "MLFLOW_MAX_LOG_PARAMS", -1, least=-1)
        self._logs_models = read_flag(os.environ, "HF_MLFLOW_LOG_ARTIFACTS")

    def start(self, opening: TrackerContext) -> LoggedSteps | None:
        """Create or reopen the run, and return the steps that MLflow's store has."""
        self._client = load("mlflow").MlflowClient()
        run_id = opening.run_id or os.environ.get("MLFLOW_RUN_ID", "")
        run = self._find(run_id) if run_id else None
        if run is not None:
            self._client.update_run(run_id, status="RUNNING")
        else:
            run = self._create(opening)
        self.run_id = run.info.run_id
        self._log_params(opening, run.data.params)
        return (
            LoggedSteps({name: self._last_step(name) for name in run.data.metrics})
            if run_id
            else None
        )

    def log(self, metrics: Mapping[str, float | str], step: int) -> None:
        """Log numbers; MLflow cannot store texts by step."""
        entities = load("mlflow.entities")
        now_ms = int(datetime.now(tz=UTC).timestamp() * 1000)
        metric_entities = [
            entities.Metric(name, value, now_ms, step)
            for name, value in metrics.items()
            if not isinstance(value, str)
        ]
        self._client.log_batch(self.run_id, metrics=metric_entities)

    def finish(self, *, completed: bool) -> None:
        """Record how the run ended; the next attempt reopens an interrupted run."""
        self._client.set_terminated(self.run_id, "FINISHED" if completed else "KILLED")

    def wants_models(self) -> Literal["never", "end", "checkpoint"]:
        """Return ``checkpoint`` if ``HF_MLFLOW_LOG_ARTIFACTS`` is true, else ``never``."""
        return "checkpoint" if self._logs_models else "never"

    def log_model(self, model: SavedModel) -> None:
        """Log a model's files, and tag the final model of the training."""
        path = f"checkpoint-{model.checkpoint.step}"
        if model.checkpoint.folder not in self._logged_params:
            self._client.log_artifacts(self.run_id, str(model.folder), path)
            self._logged_params.add(model.checkpoint.folder)
        if model.is_final:
            self._client.set_tag(self.run_id, "final_model", path)

    def spell(self, name: str) -> str:
        """Return the name with the characters replaced that MLflow rejects."""
        return re.sub(r"[^0-9A-Za-z_\-. :/]", "_", name)

    def _find(self, run_id: str) -> Any:
        """Return a run, or None if this store does not have it."""
        exceptions = load("mlflow.exceptions")
        try:
            return self._client.get_run(run_id)
        except exceptions.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
        return None

    def _create(self, opening: TrackerContext) -> Any:
        name = opening.trial_name or opening.args.run_name
        return self._client.create_run(self._experiment(), run_name=name, tags=self._tags)

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME")
        if not name:
            return os.environ.get("MLFLOW_EXPERIMENT_ID", "0")
        experiment = self._client.get_experiment_by_name(name)
        return str(experiment.experiment_id if experiment else self._client.create_experiment(name))

    def _log_params(self, opening: TrackerContext, there: Mapping[str, str]) -> None:
        """Log missing parameters only: MLflow rejects changes of a run's parameters."""
        entities, checks = load("mlflow.entities"), load("mlflow.utils.validation")
        params = self._params(opening.config())
        new_parameters = [
            entities.Param(name, text)
            for name, text in params.items()
            if name not in there and len(text) <= checks.MAX_PARAM_VAL_LENGTH
        ]
        for at in range(0, len(new_parameters), _BATCH):
            self._client.log_batch(self.run_id, params=new_parameters[at : at + _BATCH])

    def _last_step(self, name: str) -> int:
        return max(int(point.step) for point in self._client.get_metric_history(self.run_id, name))

    def _params(self, config: Mapping[str, Any]) -> dict[str, str]:
        """Return the parameters as texts, at most ``MLFLOW_MAX_LOG_PARAMS``."""
        if self._is_flat:
            config = dict(_flat(config))
        parameters = list(config.items())
        if self._params_max >= 0:
            parameters = parameters[: self._params_max]
        return {name: str(value) for name, value in parameters}


def _read_tags() -> dict[str, Any]:
    """Return the tags in ``MLFLOW_TAGS``, a JSON object.

    Raises:
        ConfigError: The variable is not a JSON object.
    """
    hint = """export MLFLOW_TAGS='{"team": "speech"}'"""
    try:
        tags = json.loads(os.environ.get("MLFLOW_TAGS", "").strip() or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigError("environment variable MLFLOW_TAGS is not JSON", hint=hint) from error
    if not isinstance(tags, dict):
        raise ConfigError("environment variable MLFLOW_TAGS is not a JSON object", hint=hint)
    return tags


def _flat(config: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, value in config.items():
        if isinstance(value, dict) and value:
            pairs += _flat(value, f"{above}{name}.")
        else:
            pairs.append((f"{above}{name}", value))
    return pairs
