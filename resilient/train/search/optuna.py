"""Optuna.

Optuna's studies, kept in a file beside the trials.

Optuna's default sampler, with a draw for each parameter that no death can move.
"""

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
    """A study of so many trials in all its lives.

    Args:
        folder: where the file of the study is, unless ``storage`` is given.
        n_trials: how many, finished ones of earlier lives included.
        direction: ``minimize`` or ``maximize``, or a list of them.
        seed: of the default sampler, whose draws follow from it, the trial's number and the
            parameter's name, so that a study that was killed asks for what an unbroken one does.
        options: of ``optuna.create_study``: storage, study_name, sampler, pruner.

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
                "hyperparameter_search needs Optuna, or a `backend` of yours",
                hint="pip install resilient-train[search]",
            ) from error
        self._optuna = optuna
        self._n_trials = n_trials
        several = (
            {"direction": direction}
            if isinstance(direction, str)
            else {"directions": list(direction)}
        )
        named = {"study_name": "search", **options}
        named.setdefault("storage", self._file(folder))
        if named.get("sampler") is None:
            named["sampler"] = TPEByName(seed)
        self.study = optuna.create_study(load_if_exists=True, **several, **named)

    def ask(self) -> Any:
        """Return the trial that nobody was told the end of, or a new one; None: enough."""
        trials = self.study.get_trials(deepcopy=False)
        running = self._optuna.trial.TrialState.RUNNING
        for one in trials:
            if one.state == running:
                return self._optuna.trial.Trial(self.study, one._trial_id)  # noqa: SLF001 - as its class asks
        if len(trials) >= self._n_trials:
            return None
        return self.study.ask()

    def tell(self, trial: Any, values: list[float], *, pruned: bool) -> None:
        """Write down how a trial ended; one without a number has failed."""
        states = self._optuna.trial.TrialState
        if pruned:
            self.study.tell(trial, state=states.PRUNED)
        elif any(math.isnan(one) for one in values):
            self.study.tell(trial, state=states.FAIL)
        else:
            self.study.tell(trial, values)

    def best(self) -> list[BestRun]:
        """Return the best trials.

        Raises:
            ConfigError: none has ended with a number.
        """
        runs = [
            BestRun(
                str(one.number),
                one.values[0] if len(one.values) == 1 else list(one.values),
                dict(one.params),
                self.study,
            )
            for one in self.study.best_trials
        ]
        if not runs:
            raise ConfigError("no trial of the search ended with an objective that is a number")
        return runs

    def _file(self, folder: str) -> Any:
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        path = Path(folder) / _FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        return JournalStorage(JournalFileBackend(str(path)))


class TPEByName(TPESampler):
    """TPE whose draw follows from the seed, the trial's number and the parameter's name.

    A trial that was killed between two suggest calls reads the first parameter back without a
    draw; with one stream for all of them the second would get the first's number.

    Args:
        seed: of the study.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed=seed)
        self._study_seed = seed

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return what TPE draws for the parameters that all ended trials have."""
        return self._for(trial, "").sample_relative(study, trial, search_space)

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Return what TPE draws for this parameter from the trials that have ended."""
        of_its_own = self._for(trial, param_name)
        return of_its_own.sample_independent(study, trial, param_name, param_distribution)

    def _for(self, trial: FrozenTrial, name: str) -> TPESampler:
        words = f"{self._study_seed}:{trial.number}:{name}".encode()
        return TPESampler(seed=int.from_bytes(sha256(words).digest()[:4], "little"))
