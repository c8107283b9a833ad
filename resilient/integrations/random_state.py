"""Random state of a trainer and of its data loaders.

A loader draws random numbers twice for an epoch. When the loop starts to iterate, the loader draws
the seed of its workers. When the loop fetches the first batch, the sampler draws the order. Other
code may draw numbers between these two moments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilient.errors import IncompatibleCheckpoint
from resilient.state_dict.rng_state import RandomState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch

_HOLDERS = ("", "sampler", "batch_sampler", "batch_sampler.sampler")
_SEEDED = ("SeedableRandomSampler",)
"""Samplers of accelerate that seed their generator from the epoch number."""


def generators_of(loaders: Iterable[Any]) -> list[torch.Generator]:
    """Return the generators that loaders and their samplers own, each once."""
    import torch

    generators: dict[int, torch.Generator] = {}
    for loader in loaders:
        for path in _HOLDERS:
            holder = loader
            for name in filter(None, path.split(".")):
                holder = getattr(holder, name, None)
            generator = getattr(holder, "generator", None)
            if isinstance(generator, torch.Generator) and type(holder).__name__ not in _SEEDED:
                generators.setdefault(id(generator), generator)
    return list(generators.values())


class RandomSnapshot:
    """Random state at one moment: global streams, and generators of loaders.

    Attributes:
        streams: State of the global streams; None before the first ``note``.
        generators: State of each generator; None if the loaders were unknown.
    """

    def __init__(self) -> None:
        self.streams: Mapping[str, Any] | None = None
        self.generators: list[torch.Tensor] | None = None

    def note(self, loaders: Iterable[Any] | None) -> None:
        """Keep the current state."""
        self.streams = RandomState().state_dict()
        self.generators = (
            None
            if loaders is None
            else [generator.get_state() for generator in generators_of(loaders)]
        )

    def restore(self, loaders: Iterable[Any]) -> None:
        """Restore the state, if there is one.

        Raises:
            IncompatibleCheckpoint: The loaders have another number of generators.
        """
        self.restore_streams()
        if self.generators is not None:
            set_generators(loaders, self.generators)

    def restore_streams(self) -> None:
        """Restore the global streams, if there is a state."""
        if self.streams is not None:
            RandomState().load_state_dict(self.streams)

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return {"streams": self.streams, "generators": self.generators}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the state for ``restore``."""
        self.streams, self.generators = state["streams"], state["generators"]


def set_generators(loaders: Iterable[Any], states: list[torch.Tensor]) -> None:
    """Restore the generators of loaders.

    Raises:
        IncompatibleCheckpoint: The loaders have another number of generators.
    """
    generators = generators_of(loaders)
    if len(generators) != len(states):
        raise IncompatibleCheckpoint(
            f"the checkpoint has the state of {len(states)} generators of data loaders, and the "
            f"loaders of this run have {len(generators)}",
            hint="give the loaders the same generators as in the saved run",
        )
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


class DeferredRandomState:
    """Random state that is restored when ``restore`` is called, not when it is loaded.

    Between the load and the training, a trainer draws from the global streams, to shuffle or to
    skip batches.
    """

    def __init__(self) -> None:
        self._state = RandomState()
        self._saved_state: Mapping[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the current state of the streams."""
        return self._state.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep the state for ``restore``."""
        self._saved_state = state_dict

    def restore(self) -> None:
        """Restore the streams, if a state was loaded."""
        if self._saved_state is not None:
            self._state.load_state_dict(self._saved_state)


class StateField:
    """A Stateful that consists of two functions.

    Args:
        get: Function that returns the state as tensors and plain values.
        put: Function that loads the state.
    """

    def __init__(
        self, get: Callable[[], dict[str, Any]], put: Callable[[Mapping[str, Any]], None]
    ) -> None:
        self._get = get
        self._set_value = put

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return self._get()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state."""
        self._set_value(state_dict)
