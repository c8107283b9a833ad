"""The states of callbacks as ``trainer_state.json`` shows them to people and to other trainers."""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from resilient.train.callbacks.exporting import exports_state

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.train.callbacks.callback import CallbackHandler


def shown_states(handler: CallbackHandler) -> dict[str, Any]:
    """Return how each stateful callback was made and what it holds, by name; plain values only.

    They are shown and not read back: what is restored is a part of the checkpoint, tensors and all.
    """
    shown = {name: _shown(one) for name, one in handler.stateful().items()}
    return {**shown, "TrainerControl": {"args": handler.control.state_dict(), "attributes": {}}}


def _shown(callback: Any) -> dict[str, Any]:
    if exports_state(callback):
        return {name: _plain(one) for name, one in callback.state().items()}
    made = {
        name: getattr(callback, name)
        for name in _names_of(cast("Any", type(callback)))
        if hasattr(callback, name)
    }
    return {"args": _plain(made), "attributes": _plain(callback.state_dict())}


@cache
def _names_of(kind: Any) -> tuple[str, ...]:
    """Return what a callback of this class is made with."""
    return tuple(inspect.signature(kind.__init__).parameters)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    kinds = bool | int | float | str | None
    return {name: one for name, one in values.items() if isinstance(one, kinds)}
