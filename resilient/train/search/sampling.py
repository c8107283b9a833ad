"""Optuna's default sampler, with a draw for each parameter that no death can move."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any

from optuna.samplers import TPESampler

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.study import Study
    from optuna.trial import FrozenTrial


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
