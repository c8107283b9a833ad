"""Import without a training script: the names of a model from its configuration alone."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from resilient.errors import ConfigError
from resilient.opening import open_checkpointer
from resilient.showing import quoted
from resilient.train.interop.files import CONFIG, TransformersCheckpoint
from resilient.train.interop.naming import Naming, naming_of
from resilient.train.interop.taking import holds_run, prepare_import
from resilient.train.optimizers.groups import parameter_groups

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from resilient.format.names import CheckpointId

_HINT = "resilient train --resume {folder} SCRIPT takes it over with the script's own model"


@dataclass(frozen=True, slots=True)
class ImportedFolder:
    """Result of an import.

    Attributes:
        checkpoint: Its name in the repository.
        lost: What is lost, in words.
    """

    checkpoint: CheckpointId
    lost: tuple[str, ...] = ()


def import_folder(
    folder: str | os.PathLike[str],
    url: str,
    *,
    strict: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> ImportedFolder:
    """Write a checkpoint of Transformers to an empty repository as one of ours.

    Its model must be one that Transformers builds from ``config.json``, with no parameter frozen:
    the optimizer's state goes by position, and only the model says whose is whose.

    Args:
        folder: what Transformers saved.
        url: the repository.
        strict: Whether any loss is refused.
        storage_options: how to reach it; by default those of the environment.

    Raises:
        ConfigError: the repository is in use, or the model cannot be built.
        NothingToResume: the folder holds no checkpoint.
        IntegrityError: the folder is damaged.
        IncompatibleCheckpoint: the optimizer is not of this model, or there is none.
    """
    model = model_from_config(os.fspath(folder))
    naming = naming_of(model, parameter_groups(model, 1.0))
    made = prepare_import(folder, naming, model, strict=strict)
    spine = open_checkpointer(url, storage_options=storage_options)
    try:
        if holds_run(spine):
            raise ConfigError(
                f"the repository `{url}` holds {spine.committed()[0]} already: a run begins once",
                hint=f"resilient ckpt ls {quoted(url)}",
            )
        return ImportedFolder(made.commit(spine), made.lost)
    finally:
        spine.close()


def naming_from_config(folder: str) -> Naming:
    """Return the names of the model that ``config.json`` describes; no memory, no network."""
    model = model_from_config(folder)
    return naming_of(model, parameter_groups(model, 1.0))


def model_from_config(folder: str) -> nn.Module:
    """Return the model that ``config.json`` describes, without memory for its weights.

    Raises:
        ConfigError: there is no such file, or nothing that Transformers builds from it.
        NothingToResume: the folder holds no checkpoint.
    """
    found = TransformersCheckpoint(folder)
    hint = _HINT.format(folder=folder)
    if not found.source.has(CONFIG):
        raise ConfigError(f"`{folder}` has no {CONFIG} to build its model from", hint=hint)
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "to build a model from its configuration takes transformers",
            hint="pip install transformers",
        ) from error
    said = found.document(CONFIG)
    name = str((said.get("architectures") or ["none"])[0])
    kind = getattr(transformers, name, None)
    if kind is None or not issubclass(kind, transformers.PreTrainedModel):
        raise ConfigError(f"Transformers has no model `{name}`, of which `{folder}` is", hint=hint)
    config = kind.config_class.from_dict(said)
    with torch.device("meta"):
        model: nn.Module = kind(config)
    return model
