"""Checks of an import before its commit: resumability of the source, and a test resume."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from resilient.diff.verification import refuse_losses, require_importable, verify_folder
from resilient.errors import IncompatibleCheckpoint
from resilient.layouts.resumability import reasons
from resilient.state_dict.changes import refused_changes
from resilient.strategies.module_wrapper import find_redirect
from resilient.strategies.pipeline.registry import pipeline_of
from resilient.train.hf_interop.checkpoint import TransformersCheckpoint
from resilient.train.state import TrainerState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import nn

    from resilient.state_dict.changes import ChangePolicy
    from resilient.state_dict.snapshot import Part
    from resilient.train.data.sampler import DataCursor

_NAMED_MAX = 3
_OPTIONS = {"betas", "momentum", "alpha", "rho", "dampening", "lambd", "lr_decay", "eps"}
"""Options of an optimizer that reveal its kind."""


@dataclass(frozen=True, slots=True)
class ImportSource:
    """Folder that the verification found to be resumable.

    Attributes:
        found: Its files.
        lost: Losses of a resume, in words.
        odd: Findings of ``ckpt verify`` without a known loss.
    """

    found: TransformersCheckpoint
    lost: tuple[str, ...]
    odd: tuple[str, ...] = ()


def open_source(folder: str | Path, *, strict: bool = False) -> ImportSource:
    """Verify every byte of a folder, and return the folder if training can continue from it.

    Args:
        folder: Folder saved by Transformers.
        strict: Whether any loss is refused.

    Raises:
        NothingToResume: The folder has no checkpoint.
        IntegrityError: The verdict is "not resumable".
        IncompatibleCheckpoint: Our Trainer does not import it, or ``strict`` refuses its losses.
    """
    source = TransformersCheckpoint(folder)
    verified = verify_folder(source.source.folder)
    require_importable(verified, str(folder))
    contents = verified.contents
    source.world = contents.world
    losses = (*verified.verdict.lost, *source.losses)
    if strict:
        refuse_losses(str(folder), losses)
    odd = reasons([problem for problem in contents.problems if not problem.loses])
    return ImportSource(source, losses, odd)


def require_loadable(parts: Mapping[str, Part], model: nn.Module) -> None:
    """Require that the weights fit a model by names and shapes, and that the state is valid.

    Args:
        parts: Parts to be committed.
        model: The model that will load them.

    Raises:
        IncompatibleCheckpoint: A name is missing or unknown, a shape differs, or a value of the
            trainer's state has the wrong type.
    """
    _require_weights(parts["model"].stateful.state_dict(), model)
    try:
        TrainerState().load_state_dict(parts["trainer_state"].stateful.state_dict())
    except TypeError as error:
        raise _unfit(f"its trainer_state.json has a value of another kind: {error}") from error


def require_place(parts: Mapping[str, Part], cursor: DataCursor) -> None:
    """Require that the position in the data exists in the training set.

    Args:
        parts: Parts to be committed.
        cursor: Position in the data of the run that will load them.

    Raises:
        IncompatibleCheckpoint: The checkpoint is of another training set.
    """
    rehearsed = copy.copy(cursor)
    try:
        rehearsed.load_state_dict(parts["data"].stateful.state_dict())
    except (ValueError, ArithmeticError, LookupError, TypeError) as error:
        raise _unfit(f"its data position does not fit this training set: {error}") from error


def require_same_optimizer(parts: Mapping[str, Part], groups: Sequence[Mapping[str, Any]]) -> None:
    """Require that the saved groups have the same options as this optimizer.

    Args:
        parts: Parts to be committed.
        groups: ``param_groups`` of the optimizer that will load them.

    Raises:
        IncompatibleCheckpoint: The checkpoint is of another optimizer.
    """
    saved_groups = parts["optimizer"].stateful.state_dict()["param_groups"]
    saved_options = {name for group in saved_groups for name in group} & _OPTIONS
    own_options = {name for group in groups for name in group} & _OPTIONS
    if saved_groups and groups and saved_options != own_options:
        differ = ", ".join(sorted(saved_options ^ own_options))
        raise _unfit(f"another optimizer saved it: only one of both has {differ}")


def require_same_objects(
    parts: Mapping[str, Part], live: Mapping[str, Part], policy: ChangePolicy
) -> None:
    """Require that a resume would accept the weights' dtypes and the schedule's class.

    Args:
        parts: Parts to be committed.
        live: Objects of the run that will load them, by the names of their parts.
        policy: Differences that the run allows.

    Raises:
        IncompatibleCheckpoint: The resume would refuse a difference.
    """
    refused_parts = refused_changes(parts, live, policy)
    if refused_parts:
        text = "; ".join(f"`{change.part}`: {change.text}" for change in refused_parts)
        names = ", ".join(
            f'"{policy.prefix}{part}"' for part in {change.part: 0 for change in refused_parts}
        )
        raise IncompatibleCheckpoint(
            f"cannot import the checkpoint: {text}. Nothing was committed",
            hint=policy.hint.format(names=names),
        )


def _require_weights(weights: Mapping[str, Any], model: nn.Module) -> None:
    """Compare weights with a model; flat shards and pipelines are compared at the resume."""
    if find_redirect(model) is not None or pipeline_of(model) is not None:
        return
    expected = {
        name: tuple(getattr(value, "ds_shape", value.shape))
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor)
    }
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    if lacking := sorted(set(expected) - set(shapes)):
        raise _unfit(f"it has no weights for {_names_text(lacking)} of this model")
    if strange := sorted(set(shapes) - set(expected)):
        raise _unfit(f"it has weights that this model does not have: {_names_text(strange)}")
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise _unfit(
                f"`{name}` has the shape {list(shapes[name])}, but {list(shape)} in this model"
            )


def _names_text(names: Sequence[str]) -> str:
    text = ", ".join(f"`{name}`" for name in names[:_NAMED_MAX])
    return text if len(names) <= _NAMED_MAX else f"{text} and {len(names) - _NAMED_MAX} more"


def _unfit(why: str) -> IncompatibleCheckpoint:
    return IncompatibleCheckpoint(
        f"cannot import the checkpoint: {why}. Nothing was committed",
        hint="train the same model on the same data with the same optimizer",
    )
