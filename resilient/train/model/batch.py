"""Batches of a model: transfer to the device, forward pass, and outputs.

A batch is a mapping (passed by name), a tuple (passed by position) or one tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch

from resilient.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn


def to_device(value: Any, device: torch.device, *, ahead: bool = True) -> Any:
    """Return ``value`` with every tensor in it on ``device``.

    Args:
        value: Batch.
        device: Target device.
        ahead: Copy pinned memory asynchronously.
    """
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=ahead)
    if isinstance(value, Mapping):
        return {name: to_device(item, device, ahead=ahead) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(to_device(item, device, ahead=ahead) for item in value)
    return value


def forward(model: nn.Module, inputs: Any) -> Any:
    """Call ``model`` on a batch."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, (list, tuple)):
        return model(*inputs)
    return model(inputs)


def split_columns(inputs: Any, model: nn.Module) -> tuple[Any, tuple[str, ...]]:
    """Return the part of a batch that a model's forward takes by name, and the other names.

    Only a mapping has names. A forward with ``**kwargs`` takes all names.
    """
    if not isinstance(inputs, Mapping):
        return inputs, ()
    accepted_names, takes_all = _taken_by(getattr(model.forward, "__func__", model.forward))
    if takes_all or inputs.keys() <= accepted_names:
        return inputs, ()
    unused_names = tuple(name for name in inputs if name not in accepted_names)
    return {name: value for name, value in inputs.items() if name in accepted_names}, unused_names


@lru_cache(maxsize=16)
def _taken_by(function: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    """Return the names of a function's parameters, and whether the function has ``**kwargs``."""
    parameters = inspect.signature(function).parameters
    return frozenset(parameters), any(
        value.kind is value.VAR_KEYWORD for value in parameters.values()
    )


def find_loss(outputs: Any) -> torch.Tensor | None:
    """Return the loss in a model's outputs: ``loss`` by name, or the first item."""
    if isinstance(outputs, Mapping):
        return cast("torch.Tensor | None", outputs.get("loss"))
    if isinstance(outputs, (list, tuple)):
        return cast("torch.Tensor | None", outputs[0] if outputs else None)
    if isinstance(outputs, torch.Tensor):
        return outputs
    return cast("torch.Tensor | None", getattr(outputs, "loss", None))


def require_loss(outputs: Any, model: nn.Module) -> torch.Tensor:
    """Return the loss of ``outputs``.

    Raises:
        ConfigError: There is no loss, or it is not a scalar.
    """
    loss = find_loss(outputs)
    if loss is None or loss.dim() != 0:
        description = "none" if loss is None else f"a tensor of shape {tuple(loss.shape)}"
        raise ConfigError(
            f"model `{type(model).__name__}` returned no scalar loss ({description}): return it "
            "first or as `loss`, give labels, or override `compute_loss`"
        )
    return loss


def split_outputs(outputs: Any, ignore_keys: Sequence[str] = ()) -> Any:
    """Return a model's predictions: its outputs without the loss.

    A single output is returned without a container. The result is None if the outputs contain only
    a loss.
    """
    if isinstance(outputs, Mapping):
        predictions = tuple(
            value for name, value in outputs.items() if name != "loss" and name not in ignore_keys
        )
    elif isinstance(outputs, (list, tuple)):
        predictions = tuple(outputs[1:])
    elif isinstance(outputs, torch.Tensor):
        return outputs if outputs.dim() else None
    else:
        return None
    if len(predictions) == 1:
        return predictions[0]
    return predictions or None


def label_names_of(model: nn.Module) -> tuple[str, ...]:
    """Return the label arguments of a model's forward: all with ``label`` in their name.

    A model for question answering also takes positions. If there are no such names, the result is
    ``labels``.
    """
    parameters = inspect.signature(model.forward).parameters
    positions = ("start_positions", "end_positions")
    position_names = positions if "QuestionAnswering" in type(model).__name__ else ()
    return tuple(name for name in parameters if "label" in name or name in position_names) or (
        "labels",
    )


def returns_loss_alone(model: nn.Module) -> bool:
    """Return whether a model computes a loss without labels (``return_loss=True``)."""
    parameter = inspect.signature(model.forward).parameters.get("return_loss")
    return parameter is not None and parameter.default is True


def find_labels(inputs: Any, names: Sequence[str] = ("labels",), *, finds_all: bool = False) -> Any:
    """Return the labels of a batch: the ``names`` of a mapping, or the last item of a tuple.

    Args:
        inputs: Batch.
        names: Keys that are labels; if several are present, their values form a tuple.
        finds_all: Whether a missing name means that there are no labels.
    """
    if isinstance(inputs, Mapping):
        labels = tuple(inputs[name] for name in names if inputs.get(name) is not None)
        if not labels or (finds_all and len(labels) < len(names)):
            return None
        return labels if len(labels) > 1 else labels[0]
    if isinstance(inputs, (list, tuple)) and len(inputs) > 1:
        return inputs[-1]
    return None


def main_input(inputs: Any, model: nn.Module) -> Any:
    """Return a model's main input in a batch: ``main_input_name``, or the first item."""
    if isinstance(inputs, Mapping):
        main_value = inputs.get(getattr(model, "main_input_name", "input_ids"))
        return next(iter(inputs.values())) if main_value is None else main_value
    return inputs[0] if isinstance(inputs, (list, tuple)) else inputs


def ignored_outputs(model: nn.Module) -> Sequence[str]:
    """Return the outputs that a model's config excludes from predictions (mostly caches)."""
    ignored = getattr(getattr(model, "config", None), "keys_to_ignore_at_inference", None)
    return ignored or ("past_key_values",)
