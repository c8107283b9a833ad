"""Checks before an import is committed: verification of the source, and a trial resume."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from resilient.diff.verification import refuse_losses, require_importable, verify_folder
from resilient.errors import IncompatibleCheckpoint
from resilient.layouts.detect import read_layout
from resilient.layouts.resumability import assess_resumability, reasons
from resilient.layouts.run_folder import WEIGHTS
from resilient.redaction import shell_quote
from resilient.start_guard import STEP_FOLDER, TRANSFORMERS, checkpoints_in_folder
from resilient.state_dict.changes import refused_changes
from resilient.state_dict.round_trip import REJECTIONS, rehearse_options, rehearse_step
from resilient.storage.folder import open_folder
from resilient.storage.open import local_root
from resilient.strategies.module_wrapper import find_redirect
from resilient.strategies.pipeline import pipeline_of
from resilient.train.hf_interop.checkpoint import TransformersCheckpoint
from resilient.train.hf_interop.conversion import RawState
from resilient.train.state import TrainerState

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import nn

    from resilient.start_guard import FoundCheckpoint
    from resilient.state_dict.changes import ChangePolicy
    from resilient.state_dict.snapshot import Part
    from resilient.train.data.sampler import DataCursor
    from resilient.train.hf_interop.conversion import Naming

_NAMED_MAX = 3
_COUNTED_WEIGHTS = re.compile(r"\d+ of \d+ weights")
_RESTORE = "resume an older checkpoint, or train with the arguments of the run that saved it"
_OPTIONS = {"betas", "momentum", "alpha", "rho", "dampening", "lambd", "lr_decay", "eps"}
"""Options that differ between optimizers, from which the optimizer is identified."""


@dataclass(frozen=True, slots=True)
class SkippedFolder:
    """Checkpoint folder that is not intact.

    Attributes:
        path: Path of the folder.
        reason: Damage or loss.
        is_lossy: Whether a resume works but loses the state that ``reason`` names.
    """

    path: str
    reason: str
    is_lossy: bool = False


@dataclass(frozen=True, slots=True)
class TakeoverPlan:
    """Checkpoint folders of the Hugging Face Trainer from which a run can continue.

    Attributes:
        candidates: Folders whose headers show no loss, newest first. Only headers were read.
        skipped: Other folders, newest first.
    """

    candidates: tuple[str, ...] = ()
    skipped: tuple[SkippedFolder, ...] = ()


def plan_takeover(folder: str) -> TakeoverPlan:
    """Classify the ``checkpoint-<step>`` folders of the Hugging Face Trainer, newest first.

    Crash: reads only.

    Args:
        folder: Output folder of the run; a URL has no candidates.
    """
    root = local_root(folder)
    checkpoints = checkpoints_in_folder(root) if root is not None else []
    paths = [checkpoint.path for checkpoint in checkpoints if _is_step_folder(checkpoint, root)]
    candidates: list[str] = []
    skipped_folders: list[SkippedFolder] = []
    for path in sorted(paths, key=step_of, reverse=True):
        flaw = _flaw_of(path)
        if flaw is None:
            candidates.append(path)
        else:
            skipped_folders.append(flaw)
    return TakeoverPlan(tuple(candidates), tuple(skipped_folders))


def step_of(path: str) -> int:
    """Return the step in the name of a folder of the Hugging Face Trainer."""
    return int(path.rpartition("-")[2])


def _is_step_folder(checkpoint: FoundCheckpoint, root: Path | None) -> bool:
    path = Path(checkpoint.path)
    is_named = STEP_FOLDER.fullmatch(path.name) is not None
    return checkpoint.layout in (TRANSFORMERS, WEIGHTS) and is_named and path.parent == root


def _flaw_of(path: str) -> SkippedFolder | None:
    """Return the reason why a resume from a checkpoint would lose state; None: no loss."""
    folder = open_folder(path)
    contents = read_layout(folder, folder.list())
    if contents is None or contents.layout != TRANSFORMERS:
        return SkippedFolder(path, "incomplete: the state of the trainer is missing")
    verdict = assess_resumability(contents, path)
    if verdict.answer == "yes":
        return None
    is_lossy = verdict.answer == "partly"
    return SkippedFolder(path, verdict.line() if is_lossy else "; ".join(verdict.why), is_lossy)


@dataclass(frozen=True, slots=True)
class ImportSource:
    """Folder that is resumable according to the verification.

    Attributes:
        found: Files of the folder.
        lost: Losses of a resume, in words.
        odd: Contradictions that ``ckpt verify`` found, without a known loss.
    """

    found: TransformersCheckpoint
    lost: tuple[str, ...]
    odd: tuple[str, ...] = ()


def open_source(
    folder: str | Path, *, strict: bool = False, buffers: Collection[str] = ()
) -> ImportSource:
    """Verify every byte of a folder, and return the folder if training can continue from it.

    Args:
        folder: Folder saved by Transformers.
        strict: Whether any loss is refused.
        buffers: Names of the model's buffers, as far as they are known.

    Raises:
        NothingToResume: The folder has no checkpoint.
        IntegrityError: The verdict is "not resumable".
        IncompatibleCheckpoint: Our Trainer does not import it, or ``strict`` refuses its losses.
    """
    source = TransformersCheckpoint(folder)
    verified = verify_folder(source.source.folder, buffers=buffers)
    require_importable(verified, str(folder))
    contents = verified.contents
    source.world = contents.world
    losses = (*verified.verdict.lost, *source.losses)
    if strict:
        refuse_losses(str(folder), losses)
    odd = reasons([problem for problem in contents.problems if not problem.loses])
    return ImportSource(source, losses, odd)


def require_loadable(
    parts: Mapping[str, Part], model: nn.Module, folder: str
) -> tuple[dict[str, Part], tuple[str, ...]]:
    """Require that the weights fit a model by names and shapes, and that the state is valid.

    As in Transformers, weights that the model does not have are ignored, and a copy in a wider
    dtype is cast. :func:`require_same_objects` checks casts that round numbers. Missing weights are
    refused, because the model would continue with new random weights.

    Args:
        parts: Parts to be committed.
        model: The model that will load them.
        folder: The imported folder, for hints.

    Returns:
        The parts with the weights of this model, and a description of the ignored weights.

    Raises:
        IncompatibleCheckpoint: A name is missing, a shape differs, or a value of the trainer's
            state has the wrong type.
    """
    weights, odd = _fitted(parts["model"].stateful.state_dict(), model, folder)
    try:
        TrainerState().load_state_dict(parts["trainer_state"].stateful.state_dict())
    except TypeError as error:
        raise _unfit(
            f"its trainer_state.json has a value of another kind: {error}",
            f"resilient ckpt verify {shell_quote(folder)}",
        ) from error
    return {**parts, "model": replace(parts["model"], stateful=RawState(weights))}, odd


def lost_weights(tensors: Mapping[str, torch.Tensor], naming: Naming, folder: str) -> str:
    """Return the loss of the adapter weights that a folder lacks; empty if it lacks none.

    An adapted model takes all other weights from the base model of the script. So only the names
    show that a weight of the adapter would start again.

    Args:
        tensors: Weights of the folder.
        naming: Names of the model that will load them.
        folder: The imported folder, for hints.

    Raises:
        IncompatibleCheckpoint: No weight of the folder belongs to the model.
    """
    missing_names, count = naming.missing(tensors)
    if missing_names and len(missing_names) == count:
        raise _unfit(
            f"none of its weights, such as {_names_text(sorted(tensors)[:1])}, belongs to an "
            f"adapter of this model: {_names_text(missing_names)} would start with new numbers",
            "train the model that saved the checkpoint, with the same names of adapters, or "
            f"verify it: resilient ckpt verify {shell_quote(folder)}",
        )
    return f"{len(missing_names)} of {count} weights" if missing_names else ""


def with_lost_weights(losses: tuple[str, ...], lost: str) -> tuple[str, ...]:
    """Return the losses with the exact loss of weights in place of one counted by shapes."""
    if not lost:
        return losses
    return (*(loss for loss in losses if not _COUNTED_WEIGHTS.fullmatch(loss)), lost)


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
        raise _unfit(
            f"its data position does not fit this training set: {error}",
            "train on the data of the run that saved it",
        ) from error


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
        raise _unfit(
            f"another optimizer saved it: only one of both has {differ}",
            "train with the `optim` of the run that saved it",
        )


def require_same_kinds(parts: Mapping[str, Part], groups: Sequence[Mapping[str, Any]]) -> None:
    """Require that each saved option has the kind of the live option, such as a number.

    Args:
        parts: Parts to be committed.
        groups: ``param_groups`` of the optimizer that will load them.

    Raises:
        IncompatibleCheckpoint: An option has another kind, and the first step would fail.
    """
    saved_groups = parts["optimizer"].stateful.state_dict()["param_groups"]
    is_paired = len(groups) == len(saved_groups)
    live_groups = [*groups] if is_paired else [*groups[:1]] * len(saved_groups)
    for at, (saved, live) in enumerate(zip(saved_groups, live_groups, strict=False)):
        for name in saved.keys() & live.keys() - {"params"}:
            if not _is_alike(saved[name], live[name]):
                raise _unfit(
                    f"`{name}` of group {at} of its optimizer is {saved[name]!r:.40}, and "
                    f"{live[name]!r:.40} in this run",
                    _RESTORE,
                )


def require_step(parts: Mapping[str, Part], optimizer: torch.optim.Optimizer) -> None:
    """Require that an optimizer of this class makes a step with the saved options.

    Args:
        parts: Parts to be committed.
        optimizer: The optimizer that will load them.

    Raises:
        IncompatibleCheckpoint: The optimizer rejects the combination of options.
    """
    try:
        rehearse_options(optimizer, parts["optimizer"].stateful.state_dict()["param_groups"])
    except REJECTIONS as error:
        raise _unfit(
            f"the optimizer of this run rejects the saved options: {error}", _RESTORE
        ) from error


def _is_alike(saved: Any, live: Any) -> bool:
    """Return whether an optimizer can use a saved option in place of its own."""
    if live is None or (saved is None and isinstance(live, bool)):
        return True
    if isinstance(live, list | tuple):
        is_row = isinstance(saved, list | tuple) and len(saved) == len(live)
        return is_row and all(map(_is_alike, saved, live))
    if _is_number(live):
        return _is_number(saved)
    return type(saved) is type(live)


def _is_number(value: Any) -> bool:
    is_element = isinstance(value, torch.Tensor) and value.numel() == 1
    return is_element or isinstance(value, bool | int | float)


def require_schedule(parts: Mapping[str, Part], live: Mapping[str, Part]) -> None:
    """Require that a copy of the live schedule loads the saved state and makes a step.

    Args:
        parts: Parts to be committed.
        live: Objects of the run that will load them, by the names of their parts.

    Raises:
        IncompatibleCheckpoint: The load or the step fails.
    """
    part = live.get("scheduler")
    if part is None:
        return
    stateful: Any = part.stateful
    try:
        rehearse_step(stateful, stateful.scheduler, parts["scheduler"].stateful.state_dict())
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise _unfit(
            f"the schedule of this run cannot continue from it: {error}", _RESTORE
        ) from error


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


def _fitted(
    weights: Mapping[str, Any], model: nn.Module, folder: str
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return the weights of a model; the resume itself compares flat shards and pipelines."""
    if find_redirect(model) is not None or pipeline_of(model) is not None:
        return weights, ()
    expected = {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor)
    }
    if missing_names := sorted(set(expected) - set(weights)):
        raise _unfit(
            f"it has no weights for {_names_text(missing_names)} of this model, which would start "
            "with new numbers",
            "resume an older checkpoint, or restore the file: "
            f"resilient ckpt repair {shell_quote(folder)} --from COPY",
        )
    for name, value in expected.items():
        shape, saved_shape = tuple(getattr(value, "ds_shape", value.shape)), weights[name].shape
        if tuple(saved_shape) != shape:
            raise _unfit(
                f"`{name}` has the shape {list(saved_shape)}, but {list(shape)} in this model",
                "train the model that saved the checkpoint, or verify it: "
                f"resilient ckpt verify {shell_quote(folder)}",
            )
        if value.is_floating_point() and not weights[name].is_floating_point():
            raise _unfit(
                f"`{name}` is {weights[name].dtype}, but {value.dtype} in this model: its "
                "fractions are lost",
                "resume an older checkpoint, or restore the file: "
                f"resilient ckpt repair {shell_quote(folder)} --from COPY",
            )
    ignored_names = sorted(set(weights) - set(expected))
    odd = (
        (f"this model does not have its weights {_names_text(ignored_names)}",)
        if ignored_names
        else ()
    )
    return {
        name: _cast(tensor, expected[name].dtype)
        for name, tensor in weights.items()
        if name in expected
    }, odd


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy in a narrower dtype if no number is rounded, else the tensor."""
    if not (tensor.is_floating_point() and dtype.is_floating_point):
        return tensor
    if dtype.itemsize >= tensor.dtype.itemsize:
        return tensor
    narrow = tensor.to(dtype)
    return narrow if torch.equal(narrow.to(tensor.dtype), tensor) else tensor


def _names_text(names: Sequence[str]) -> str:
    text = ", ".join(f"`{name}`" for name in names[:_NAMED_MAX])
    return text if len(names) <= _NAMED_MAX else f"{text} and {len(names) - _NAMED_MAX} more"


def _unfit(why: str, hint: str) -> IncompatibleCheckpoint:
    return IncompatibleCheckpoint(
        f"cannot import the checkpoint: {why}. Nothing was committed", hint=hint
    )
