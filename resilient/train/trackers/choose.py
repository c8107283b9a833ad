"""Which trackers ``report_to`` names, and what has to be installed for each."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, NamedTuple, cast

from resilient.environment import read_flag
from resilient.errors import ConfigError
from resilient.train.trackers.report import Reporting
from resilient.train.trackers.tracker import load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.train.trackers.tracker import Tracker


class Choice(NamedTuple):
    """Where a tracker is, any one of the packages that it needs, and how to get that."""

    module: str
    kind: str
    packages: tuple[str, ...]
    pip: str


def _ours(module: str, kind: str, packages: str, pip: str = "") -> Choice:
    return Choice(module, kind, tuple(packages.split()), pip or packages)


CHOICES = {
    "clearml": _ours("resilient.train.trackers.clearml", "ClearML", "clearml"),
    "codecarbon": _ours("resilient.train.trackers.codecarbon", "CodeCarbon", "codecarbon"),
    "comet_ml": _ours("resilient.train.trackers.comet", "Comet", "comet_ml"),
    "mlflow": _ours("resilient.train.trackers.mlflow", "MLflow", "mlflow"),
    "neptune": _ours("resilient.train.trackers.neptune", "Neptune", "neptune"),
    "tensorboard": _ours(
        "resilient.train.trackers.tensorboard",
        "TensorBoard",
        "tensorboard tensorboardX",
        pip="tensorboard",
    ),
    "trackio": _ours("resilient.train.trackers.trackio", "Trackio", "trackio"),
    "wandb": _ours("resilient.train.trackers.wandb", "WeightsAndBiases", "wandb"),
}


class ReportTo(Reporting):
    """Reports to the trackers that ``report_to`` names.

    Args:
        names: of :data:`CHOICES`; ``all`` stands for those whose packages are installed.

    Raises:
        ConfigError: the package of one is not installed; says how to install it.
    """

    def __init__(self, names: Sequence[str]) -> None:
        wanted = [name for name in CHOICES if _is_there(name)] if "all" in names else names
        made = (_made(name) for name in dict.fromkeys(wanted) if not _is_disabled(name))
        super().__init__(*made)


def _is_there(name: str) -> bool:
    return any(importlib.util.find_spec(package) for package in CHOICES[name].packages)


def _is_disabled(name: str) -> bool:
    """Say if the environment disables a tracker that the script names."""
    return read_flag(os.environ, f"DISABLE_{name.upper()}_INTEGRATION")


def _made(name: str) -> Tracker:
    if not _is_there(name):
        raise ConfigError(
            f"`report_to` names `{name}`, and its package is not installed",
            hint=f"pip install {CHOICES[name].pip}",
        )
    kind = getattr(load(CHOICES[name].module), CHOICES[name].kind)
    return cast("Tracker", kind())
