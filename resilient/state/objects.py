"""Objects in an optimizer's state, taken apart into values that need no pickle.

Low-rank optimizers keep a projector per parameter, and low-bit ones a tensor that is made of
others. Only the classes named here are taken apart and made again; any other stays what it is
and is refused when it is saved.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from resilient.errors import IncompatibleCheckpoint

_OBJECT, _TENSOR = "taken_apart_object", "taken_apart_tensor"

OBJECTS = {
    "apollo_torch.random_projector.GradientProjector",
    "apollo_torch.svd_projector.GaLoreProjector",
    "galore_torch.galore_projector.GaLoreProjector",
}
"""Classes whose attributes are all that they are."""

TENSORS = {
    "torchao.optim.subclass_4bit.OptimState4bit",
    "torchao.optim.subclass_8bit.OptimState8bit",
    "torchao.optim.subclass_fp8.OptimStateFp8",
}
"""Tensors made of tensors, by the protocol ``__tensor_flatten__``, ``__tensor_unflatten__``."""


def take_apart(value: Any) -> Any:
    """Return ``value``, or what it is made of if it is an object of a known class.

    Tensors inside are the live ones; nothing is copied.

    Crash: nothing was changed.
    """
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if name in OBJECTS:
        return {_OBJECT: name, "fields": dict(vars(value))}
    if name in TENSORS:
        inner, context = value.__tensor_flatten__()
        return {
            _TENSOR: name,
            "inner": {one: getattr(value, one) for one in inner},
            "context": [_plain(one) for one in context],
            "shape": list(value.shape),
        }
    return value


def put_together(value: Any) -> Any:
    """Return what :func:`take_apart` took apart, made again; anything else as it is.

    Crash: only this process's memory changed.

    Raises:
        IncompatibleCheckpoint: its class is none of those known, or its package is not installed.
    """
    if not isinstance(value, dict):
        return value
    if _OBJECT in value:
        kind = _class_of(value[_OBJECT], OBJECTS)
        made = kind.__new__(kind)
        vars(made).update(value["fields"])
        return made
    if _TENSOR in value:
        kind = _class_of(value[_TENSOR], TENSORS)
        shape = torch.Size(value["shape"])
        context = [torch.Size(one) if isinstance(one, list) else one for one in value["context"]]
        return kind.__tensor_unflatten__(value["inner"], context, shape, None)
    return value


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, torch.Size) else value


def _class_of(name: str, known: set[str]) -> Any:
    if name not in known:
        raise IncompatibleCheckpoint(
            f"the optimizer's state holds a `{name}`, which is none of {', '.join(sorted(known))}"
        )
    module, _, kind = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), kind)
    except (ImportError, AttributeError) as error:
        package = module.partition(".")[0].replace("_", "-")
        raise IncompatibleCheckpoint(
            f"the optimizer's state holds a `{name}`, which cannot be imported: {error}",
            hint=f"pip install {package}",
        ) from error
