"""Random state as an object of a checkpoint: Python, NumPy, torch, and CUDA if it is in use."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping


class RandomState:
    """The global random generators of this process as one Stateful.

    The state of CUDA is read only if CUDA is initialized, so a CPU run never initializes CUDA.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return ``python``, ``numpy``, ``cpu``, and ``cuda`` by device if CUDA is initialized."""
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),  # noqa: NPY002 - users draw from it
            "cpu": torch.get_rng_state(),
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the saved state of every generator."""
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])  # noqa: NPY002 - users draw from it
        torch.set_rng_state(state["cpu"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["cuda"])
