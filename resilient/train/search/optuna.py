"""Optuna studies in a file beside the trials, and a sampler with repeatable draws."""

from __future__ import annotations

import math
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optuna.samplers import TPESampler

from resilient.errors import ConfigError
from resilient.train.search.study import BestRun

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optuna.distributions import BaseDistribution
    from optuna.study import Study
    from optuna.trial import FrozenTrial

_FILE = "study.log"


class OptunaStudy:
    """Study with a fixed number of trials over all attempts of the search.

    Args:
        folder: Folder of the study's file, unless ``storage`` is given.
        n_trials: Number of trials, including those finished by earlier attempts.
        direction: ``minimize`` or ``maximize``, or a list of them.
        seed: Seed of the default sampler. The draws of this sampler depend only on the seed, the
            trial's number and the parameter's name. A study that was killed therefore suggests the
            same values as an uninterrupted one.
        options: Options of ``optuna.create_study``: storage, study_name, sampler, pruner.

    Raises:
        ConfigError: Optuna is not installed.
    """

    def __init__(
        self,
        folder: str,
        n_trials: int,
        direction: str | Sequence[str],
        seed: int,
        **options: Any,
    ) -> None:
        try:
            import optuna
        except ImportError as error:
            raise ConfigError(
                "hyperparameter_search needs Optuna, or your own `backend`",
                hint="pip install resilient-train[search]",
            ) from error
        self._optuna = optuna
        self._n_trials = n_trials
        direction_option = (
            {"direction": direction}
            if isinstance(direction, str)
            else {"directions": list(direction)}
        )
        study_options = {"study_name": "search", **options}
        study_options.setdefault("storage", self._file(folder))
        if study_options.get("sampler") is None:
            study_options["sampler"] = TPEByName(seed)
        self.study = optuna.create_study(load_if_exists=True, **direction_option, **study_options)

    def ask(self) -> Any:
        """Return a trial whose end is not recorded, else a new trial; None if there are enough."""
        trials = self.study.get_trials(deepcopy=False)
        running_state = self._optuna.trial.TrialState.RUNNING
        for trial in trials:
            if trial.state == running_state:
                return self._optuna.trial.Trial(self.study, trial._trial_id)  # noqa: SLF001 - TPESampler does the same
        if len(trials) >= self._n_trials:
            return None
        return self.study.ask()

    def tell(self, trial: Any, values: list[float], *, pruned: bool) -> None:
        """Record the end of a trial; a trial without a number has failed."""
        states = self._optuna.trial.TrialState
        if pruned:
            self.study.tell(trial, state=states.PRUNED)
        elif any(math.isnan(value) for value in values):
            self.study.tell(trial, state=states.FAIL)
        else:
            self.study.tell(trial, values)

    def best(self) -> list[BestRun]:
        """Return the best trials.

        Raises:
            ConfigError: No trial ended with a number.
        """
        runs = [
            BestRun(
                str(trial.number),
                trial.values[0] if len(trial.values) == 1 else list(trial.values),
                dict(trial.params),
                self.study,
            )
            for trial in self.study.best_trials
        ]
        if not runs:
            raise ConfigError("no trial of the search ended with a finite objective")
        return runs

    def _file(self, folder: str) -> Any:
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        path = Path(folder) / _FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        return JournalStorage(JournalFileBackend(str(path)))


class TPEByName(TPESampler):
    """TPE sampler whose draws depend only on seed, trial number and parameter name.

    A trial that was killed between two suggest calls reads the first parameter back without a
    draw. With one stream for all parameters, the second parameter would then get the number of the
    first.

    Args:
        seed: Seed of the study.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed=seed)
        self._study_seed = seed

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return TPE's draws for the parameters that all ended trials have."""
        return self._for(trial, "").sample_relative(study, trial, search_space)

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Return TPE's draw for this parameter from the ended trials."""
        of_its_own = self._for(trial, param_name)
        return of_its_own.sample_independent(study, trial, param_name, param_distribution)

    def _for(self, trial: FrozenTrial, name: str) -> TPESampler:
        words = f"{self._study_seed}:{trial.number}:{name}".encode()
        return TPESampler(seed=int.from_bytes(sha256(words).digest()[:4], "little"))
