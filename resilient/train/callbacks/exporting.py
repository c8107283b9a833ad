"""The states of callbacks: by torch's two methods, or by ``state`` as Transformers exports it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def has_state(callback: Any) -> bool:
    """Say whether a callback has a state that is saved and given back."""
    by_torch = hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict")
    return by_torch or exports_state(callback)


def exports_state(callback: Any) -> bool:
    """Say whether it has a state of Transformers' kind (``ExportableState``) and no other."""
    if hasattr(callback, "state_dict"):
        return False
    return all(callable(getattr(type(callback), name, None)) for name in ("state", "from_state"))


def state_of(callback: Any) -> dict[str, Any]:
    """Return what is saved of a callback; of an exported state its ``attributes``.

    What it was made with (``args``) is the script's, which may have changed it.
    """
    state = callback.state()["attributes"] if exports_state(callback) else callback.state_dict()
    return dict(state)


def give_back(callback: Any, state: Mapping[str, Any]) -> None:
    """Restore a callback's state."""
    if not exports_state(callback):
        callback.load_state_dict(state)
        return
    for name, value in state.items():
        setattr(callback, name, value)
