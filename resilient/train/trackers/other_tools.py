"""Trackers for ClearML, CodeCarbon, Comet, Neptune, TensorBoard and Trackio.

ClearML, Comet and Neptune have an offline mode, which writes local files. The environment variables
``CLEARML_OFFLINE_MODE``, ``COMET_START_ONLINE=0`` and ``NEPTUNE_MODE=offline`` select this mode.
CodeCarbon writes one row of ``emissions.csv`` per start of the run. TensorBoard reads event files
in a folder.
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.train.trackers.base import (
    SINGLE_VALUES,
    LocalStateTracker,
    LoggedSteps,
    Tracker,
    as_json,
    load,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.train.trackers.base import TrackerContext


class ClearML(LocalStateTracker):
    """Tracker for ClearML: one task per run, continued by its id.

    ``CLEARML_PROJECT`` and ``CLEARML_TASK`` (else ``run_name``, else ``Trainer``) name the task. A
    task that the script opened is used and left open. Offline, all attempts of a run write to one
    session, which ``Task.import_offline_session`` uploads as one task. The steps of such a session
    come from its file, because ClearML writes points with a delay.
    """

    name = "clearml"

    def __init__(self) -> None:
        super().__init__()
        self._task: Any = None
        self._is_own_run = True
        self._before: dict[str, int] | None = None

    def open(self, opening: TrackerContext) -> None:
        """Create or continue the task."""
        task = load("clearml").Task
        current_task = task.current_task()
        self._is_own_run = current_task is None
        if task.is_offline() and opening.run_id:
            self._before = _written(opening.run_id)
        self._task = current_task or task.init(
            project_name=os.environ.get("CLEARML_PROJECT", "HuggingFace Transformers"),
            task_name=os.environ.get("CLEARML_TASK") or opening.args.run_name or "Trainer",
            # 0 keeps the step numbers as given. Otherwise ClearML would continue after its last
            # step.
            reuse_last_task_id=opening.run_id or False,
            continue_last_task=0 if opening.run_id else False,
            auto_connect_frameworks={"tensorboard": False, "pytorch": False},
        )
        self.run_id = self._task.id
        parameters = {f"Transformers/{name}": value for name, value in opening.config().items()}
        self._task.set_parameters_as_dict(parameters)

    def known(self) -> Mapping[str, int] | None:
        """Return the steps of the offline session, else the steps that were handed over."""
        return super().known() if self._before is None else self._before

    def draw(self, metrics: Mapping[str, float | str], step: int) -> None:
        """Report scalars by title (before the ``/``) and series, and report once-per-run values."""
        logger = self._task.get_logger()
        for name, value in metrics.items():
            title, _, series = name.partition("/")
            if isinstance(value, str):
                logger.report_text(f"{step} {name}: {value}", print_console=False)
            elif series in SINGLE_VALUES:
                logger.report_single_value(series, value)
            else:
                logger.report_scalar(title, series, value=value, iteration=step)

    def finish(self, *, completed: bool) -> None:
        """Send the remaining points; an interrupted task is marked as stopped."""
        if not self._is_own_run:
            return
        self._task.flush(wait_for_uploads=True)
        if not completed and not load("clearml").Task.is_offline():
            self._task.mark_stopped()
        self._task.close()


def _written(run_id: str) -> dict[str, int]:
    """Return the last step of each metric that earlier attempts wrote to an offline session."""
    config = load("clearml.config")
    return session_steps(Path(config.get_offline_dir(run_id)) / "metrics.jsonl")


def session_steps(file: Path) -> dict[str, int]:
    """Return the last step of each metric in a session's file.

    An incomplete last line is cut off. An attempt that is killed during a write leaves such a line.
    The next attempt would otherwise append to this line.
    """
    if not file.exists():
        return {}
    content = file.read_bytes()
    complete_text = content[: content.rfind(b"\n") + 1]
    if len(complete_text) < len(content):
        with file.open("r+b") as log_file:
            log_file.truncate(len(complete_text))
    last_step_by_name: dict[str, int] = {}
    for line in complete_text.splitlines():
        for request in json.loads(line):
            name, step = f"{request['metric']}/{request['variant']}", int(request.get("iter", -1))
            last_step_by_name[name] = max(step, last_step_by_name.get(name, -1))
    return last_step_by_name


class CodeCarbon(Tracker):
    """Tracker that measures rank 0's machine and writes to ``output_dir/emissions.csv``.

    The rows of one run share an ``experiment_id``. Each row has the energy of one attempt,
    including repeated steps, so the sum of the rows is correct. ``CODECARBON_COUNTRY_ISO_CODE``
    sets the country; otherwise CodeCarbon asks a service.
    """

    name = "codecarbon"

    def __init__(self) -> None:
        self._tracker: Any = None

    def start(self, opening: TrackerContext) -> LoggedSteps | None:
        """Start the measurement."""
        codecarbon, args = load("codecarbon"), opening.args
        self.run_id = opening.run_id or str(uuid.uuid4())
        os.makedirs(args.output_dir, exist_ok=True)  # noqa: PTH103 - it may be any path
        country = os.environ.get("CODECARBON_COUNTRY_ISO_CODE")
        options = {
            "project_name": args.run_name or "codecarbon",
            "experiment_id": self.run_id,
            "output_dir": args.output_dir,
            "allow_multiple_runs": True,
        }
        if country:
            self._tracker = codecarbon.OfflineEmissionsTracker(country_iso_code=country, **options)
        else:
            self._tracker = codecarbon.EmissionsTracker(**options)
        self._tracker.start()
        return None

    def log(self, metrics: Mapping[str, float | str], step: int) -> None:
        """Draw nothing: CodeCarbon measures by itself."""

    def finish(self, *, completed: bool) -> None:  # noqa: ARG002 - the energy is spent either way
        """Write the row."""
        self._tracker.stop()


class Comet(LocalStateTracker):
    """Tracker for Comet: one experiment per run, with a key that the tracker chooses.

    ``COMET_PROJECT_NAME``, ``COMET_MODE`` and ``COMET_EXPERIMENT_KEY`` apply.
    """

    name = "comet_ml"

    def __init__(self) -> None:
        super().__init__()
        self._experiment: Any = None

    def open(self, opening: TrackerContext) -> None:
        """Start or continue the experiment with the key."""
        comet = load("comet_ml")
        experiment_key = (
            opening.run_id or os.environ.get("COMET_EXPERIMENT_KEY") or uuid.uuid4().hex
        )
        self._experiment = comet.start(
            experiment_key=experiment_key,
            mode=os.environ.get("COMET_MODE") or None,
            experiment_config=comet.ExperimentConfig(name=opening.args.run_name),
        )
        self.run_id = self._experiment.get_key()
        self._experiment.log_parameters(opening.config(), nested_support=True)

    def draw(self, metrics: Mapping[str, float | str], step: int) -> None:
        """Log numbers as metrics and texts as texts."""
        numbers = {name: metric for name, metric in metrics.items() if not isinstance(metric, str)}
        self._experiment.log_metrics(numbers, step=step)
        for name in metrics.keys() - numbers.keys():
            self._experiment.log_text(f"{name}: {metrics[name]}", step=step)

    def finish(self, *, completed: bool) -> None:  # noqa: ARG002 - a resumed run always appends
        """Send the remaining points, or write the archive."""
        self._experiment.end()


_NAMESPACE = "finetuning"


class Neptune(LocalStateTracker):
    """Tracker for Neptune: one run, identified by a custom id that the tracker chooses.

    Points go below ``finetuning`` in ``NEPTUNE_PROJECT``. Neptune's offline files do not contain
    the custom id. Synchronisation of offline data therefore creates a separate run for each
    attempt.
    """

    name = "neptune"

    def __init__(self) -> None:
        super().__init__()
        self._run: Any = None

    def open(self, opening: TrackerContext) -> None:
        """Open the run with the id; Neptune creates a missing run."""
        self.run_id = opening.run_id or uuid.uuid4().hex
        neptune = load("neptune")
        self._run = neptune.init_run(custom_run_id=self.run_id, name=opening.args.run_name)
        config = load("neptune.utils").stringify_unsupported(opening.config())
        self._run[f"{_NAMESPACE}/trainer_parameters"] = config
        if opening.trial_name:
            self._run[f"{_NAMESPACE}/trial"] = opening.trial_name

    def draw(self, metrics: Mapping[str, float | str], step: int) -> None:
        """Append each point to its series; the epoch is a single value, as in Transformers."""
        for name, value in metrics.items():
            field = self._run[f"{_NAMESPACE}/{name}"]
            if name == "train/epoch":
                field.assign(value)
            else:
                field.append(value, step=step)

    def finish(self, *, completed: bool) -> None:  # noqa: ARG002 - Neptune knows no other end
        """Send the remaining points."""
        self._run.stop()


class Trackio(LocalStateTracker):
    """Tracker for Trackio: one run, identified by its name.

    The name is ``run_name`` with random characters that make it unique. Points go to ``project``,
    in ``TRACKIO_DIR`` or in the Space ``trackio_space_id``.
    """

    name = "trackio"

    def __init__(self) -> None:
        super().__init__()
        self._run: Any = None

    def open(self, opening: TrackerContext) -> None:
        """Open the run with this name; Trackio creates a missing run."""
        args = opening.args
        self.run_id = opening.run_id or f"{args.run_name or 'run'}-{uuid.uuid4().hex[:8]}"
        self._run = load("trackio").init(
            project=args.project,
            name=self.run_id,
            resume="allow",
            space_id=args.trackio_space_id,
            bucket_id=args.trackio_bucket_id,
            private=args.hub_private_repo,
            config=opening.config(),
            embed=False,
        )

    def draw(self, metrics: Mapping[str, float | str], step: int) -> None:
        """Log one row."""
        self._run.log(dict(metrics), step=step)

    def finish(self, *, completed: bool) -> None:  # noqa: ARG002 - Trackio can continue any run
        """Send the remaining points."""
        self._run.finish()


class TensorBoard(Tracker):
    """Tracker that writes TensorBoard event files.

    The folder is ``logging_dir``, ``TENSORBOARD_LOGGING_DIR`` or ``output_dir/runs/<date>_<host>``.
    The run's id is the name of the folder below ``output_dir/runs``. TensorBoard ignores repeated
    points when it reads the files (``purge_step``).
    """

    name = "tensorboard"

    def __init__(self) -> None:
        self._writer: Any = None

    def start(self, opening: TrackerContext) -> LoggedSteps | None:
        """Write to the folder from step ``since`` on.

        TensorBoard then hides points that were written earlier for these steps.
        """
        is_resumed = bool(opening.run_id)
        self.run_id = opening.run_id or _new_name(Path(opening.args.output_dir) / "runs")
        folder = _board_folder(opening, self.run_id)
        is_gone = is_resumed and not _has_events(folder)
        self._writer = _writer_class()(folder, purge_step=opening.since)
        if is_gone or not is_resumed:
            self._writer.add_text("args", as_json(opening.args.to_dict()))
            config = getattr(opening.model, "config", None)
            if config is not None:
                self._writer.add_text("model_config", as_json(opening.config()))
        self._writer.flush()
        # On another machine the folder may be empty. Then the whole history is sent.
        return LoggedSteps() if is_gone else None

    def log(self, metrics: Mapping[str, float | str], step: int) -> None:
        """Append scalars and texts, and flush the file."""
        for name, value in metrics.items():
            add = self._writer.add_text if isinstance(value, str) else self._writer.add_scalar
            add(name, value, step)
        self._writer.flush()

    def finish(self, *, completed: bool) -> None:  # noqa: ARG002 - the file is the same
        """Close the file."""
        self._writer.close()


def _board_folder(opening: TrackerContext, name: str) -> str:
    logging_dir = opening.args.logging_dir or os.environ.get("TENSORBOARD_LOGGING_DIR")
    if logging_dir:
        return str(Path(logging_dir).expanduser()) if "://" not in logging_dir else logging_dir
    folder = Path(opening.args.output_dir) / "runs" / name
    return str(folder / opening.trial_name if opening.trial_name else folder)


def _new_name(runs: Path) -> str:
    """Return the default name of a run that starts now, with a number if the name is taken."""
    name = f"{datetime.now(tz=UTC).astimezone():%b%d_%H-%M-%S}_{socket.gethostname()}"
    names = chain([name], (f"{name}_{number}" for number in count(2)))
    return next(candidate for candidate in names if not (runs / candidate).exists())


def _has_events(folder: str) -> bool:
    """Return whether the folder has events to continue from; a bucket is assumed to have some."""
    return "://" in folder or any(Path(folder).glob("*tfevents*"))


def _writer_class() -> Any:
    try:
        return load("torch.utils.tensorboard").SummaryWriter
    except ImportError:
        return load("tensorboardX").SummaryWriter
