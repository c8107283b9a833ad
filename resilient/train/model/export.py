"""Weights for use elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from resilient.state.stage import pack
from resilient.storage.local import LocalStore
from resilient.strategies.detour import detour_of, stateful_of
from resilient.strategies.pipeline.known import pipeline_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import nn


def gather_state(model: nn.Module, *, keep: bool) -> dict[str, Any]:
    """Return the state of ``model`` with every sharded tensor whole, on the CPU.

    One tensor at a time, and only where it is kept. Collective if the model is sharded.
    """
    state: dict[str, Any] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    pipelined = pipeline_of(model)
    for name, one in stateful_of(model).state_dict().items():
        if pipelined is not None and torch.is_tensor(one):
            whole = pipelined.gathered(name, one)
        else:
            whole = _whole(one, parameters.get(name))
        if keep:
            state[name] = whole
    return state


def _whole(value: Any, parameter: nn.Parameter | None) -> Any:
    if hasattr(parameter, "ds_id"):
        # Only DeepSpeed knows how to gather what it has partitioned.
        from resilient.strategies.deepspeed import gathered

        return gathered(parameter)
    return value.full_tensor().cpu() if hasattr(value, "full_tensor") else value


def is_sharded(model: nn.Module) -> bool:
    """Say whether a parameter is spread over ranks, or is on others."""
    if detour_of(model) is not None or pipeline_of(model) is not None:
        return True
    return any(hasattr(one, "full_tensor") or hasattr(one, "ds_id") for one in model.parameters())


def write_model(model: nn.Module, state: Mapping[str, Any], folder: Path) -> None:
    """Write ``model`` into ``folder``, by its own ``save_pretrained`` if it has one.

    Anything else becomes ``model.safetensors``, which appears whole or not at all.

    Args:
        model: says how.
        state: what to write; see :func:`gather_state`.
        folder: where to.

    Raises:
        UnsavableState: a tensor has a dtype that the format does not know.
        StoreError: the folder cannot be written; an older file is untouched.
    """
    if hasattr(model, "save_pretrained"):
        folder.mkdir(parents=True, exist_ok=True)
        # A model that is whole knows best what belongs to it.
        given = {"state_dict": state} if is_sharded(model) else {}
        cast("Any", model).save_pretrained(folder, **given)
        return
    tensors = {name: one for name, one in state.items() if torch.is_tensor(one)}
    LocalStore(folder).put("model.safetensors", pack(tensors, {"format": "pt"}))
