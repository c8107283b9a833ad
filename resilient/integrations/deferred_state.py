"""State that its owner restores later than it is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilient.state_dict.rng_state import RandomState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class DeferredRandomState:
    """Random state that is restored when ``restore`` is called, not when it is loaded.

    Trainers draw from the global streams between loading and training, to shuffle or to skip
    batches.
    """

    def __init__(self) -> None:
        self._state = RandomState()
        self._held: Mapping[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the current state of the streams."""
        return self._state.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep the state for ``restore``."""
        self._held = state_dict

    def restore(self) -> None:
        """Restore the streams, if a state was loaded."""
        if self._held is not None:
            self._state.load_state_dict(self._held)


class StateField:
    """A Stateful of two functions.

    Args:
        get: Function that returns the state as tensors and plain values.
        put: Function that loads the state.
    """

    def __init__(
        self, get: Callable[[], dict[str, Any]], put: Callable[[Mapping[str, Any]], None]
    ) -> None:
        self._get = get
        self._put = put

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return self._get()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state."""
        self._put(state_dict)
