"""Best checkpoint of a run of Transformers, according to its ``trainer_state.json``.

Source: ``transformers.trainer`` 5.23. An evaluation with a better metric sets ``best_global_step``.
A save sets the path ``best_model_checkpoint`` only if ``checkpoint-<best_global_step>`` exists at
this time. If the step of the best evaluation was never saved, the path still names an older
checkpoint.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.layouts.json_files import decimal, whole
from resilient.storage.urls import protocol_of

if TYPE_CHECKING:
    from collections.abc import Mapping

_NAME = re.compile(r"checkpoint-(\d{1,12})")


def best_folder(url: str, state: Mapping[str, Any]) -> str:
    """Return the folder name of the best checkpoint; empty if the state names none.

    Args:
        url: URL of the checkpoint with this state.
        state: Content of its ``trainer_state.json``.
    """
    path, step = state.get("best_model_checkpoint"), whole(state.get("best_global_step"))
    if not isinstance(path, str):
        return ""
    name = folder_name(path)
    # Versions before 4.51 have no `best_global_step`.
    if step is None or _is_of_older_save(url, state, name, step):
        return name
    return f"checkpoint-{step}"


def best_step(url: str, state: Mapping[str, Any]) -> int | None:
    """Return the step of the best checkpoint; None if the state names none.

    Args:
        url: URL of the checkpoint with this state.
        state: Content of its ``trainer_state.json``.
    """
    return step_in(best_folder(url, state))


def step_in(name: str) -> int | None:
    """Return the step in a folder's name; None without one."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def folder_name(path: str) -> str:
    """Return the last part of a path of any operating system."""
    return path.replace("\\", "/").rstrip("/").rpartition("/")[2]


def measured_at(state: Mapping[str, Any], step: int | None) -> list[float | None]:
    """Return the results of the evaluations at a step, from the log.

    Args:
        state: Content of a ``trainer_state.json``.
        step: The step; the result is empty for None.
    """
    history = state.get("log_history")
    return [
        decimal(value)
        for entry in (history if isinstance(history, list) else ())
        if isinstance(entry, dict) and step is not None and whole(entry.get("step")) == step
        for name, value in entry.items()
        if isinstance(name, str) and name.startswith("eval_")
    ]


def _is_of_older_save(url: str, state: Mapping[str, Any], name: str, step: int) -> bool:
    """Return True if the best evaluation was made at a step that was not saved.

    The log must have this evaluation, and the folder of its step must be missing.
    """
    saved_step, own_step = step_in(name), whole(state.get("global_step"))
    if saved_step is None or own_step is None or not saved_step < step < own_step:
        return False
    metric = decimal(state.get("best_metric"))
    is_logged = metric is not None and metric in measured_at(state, step)
    return is_logged and not _is_saved(url, step)


def _is_saved(url: str, step: int) -> bool:
    """Return True if the folder of a step is beside a checkpoint on this machine."""
    if protocol_of(url) != "file":
        return False
    return is_full(Path(url.removeprefix("file://")).absolute().parent / f"checkpoint-{step}")


def is_beside(url: str, checkpoint_name: str, name: str) -> bool:
    """Return True if a run's checkpoint exists at its recorded path or beside another one.

    For a URL on another machine, the result is always True.

    Args:
        url: URL of the other checkpoint.
        checkpoint_name: Recorded path.
        name: Name of the folder of the other checkpoint.
    """
    if protocol_of(url) != "file":
        return True
    own_path = Path(url).absolute()
    return name == own_path.name or any(
        map(is_full, (own_path.parent / name, Path(checkpoint_name)))
    )


def is_full(path: Path) -> bool:
    """Return True for a folder that is not empty."""
    try:
        return path.is_dir() and any(path.iterdir())
    except OSError:
        return False
