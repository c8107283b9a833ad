"""Load and export of weights without a training run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from resilient.checkpoint.refs import resolve
from resilient.distributed.coordination import agree
from resilient.engine_factory import open_engine
from resilient.state_dict.snapshot import Part
from resilient.state_dict.staging import to_safetensors
from resilient.storage.local import LocalStore
from resilient.storage.open import open_store
from resilient.strategies.module_wrapper import find_redirect, stateful_of
from resilient.strategies.pipeline import pipeline_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import nn

    from resilient.train.session import Session

_PREFIX = "checkpoint-"


def load_weights(session: Session, model: nn.Module, reference: str) -> str:
    """Load only the model part of a checkpoint into ``model``; no generation is claimed.

    All ranks load the checkpoint that the coordinator finds, or no rank loads one.

    Args:
        session: Session of this rank.
        model: Receives the weights in place.
        reference: A repository (its newest checkpoint), or a checkpoint's path in a repository.
            Also any name that ``resilient ckpt`` accepts, for a checkpoint of the session's
            repository.

    Returns:
        The folder name of the checkpoint.

    Raises:
        RepositoryNotFound: There is no repository.
        NothingToResume: The repository has no such checkpoint.
        IntegrityError: The checkpoint is damaged; the model is unchanged.
        IncompatibleCheckpoint: The checkpoint has another model.
    """
    url, name = split_reference(reference, session.repository)
    launch, args = session.rank_group.launch, session.args
    options = {**(args.storage_options or {}), **launch.storage_options}
    topic = f"weights/{session.next_topic()}"
    comms = session.comms(topic)

    def find_tensors(_: object) -> str:
        return resolve(open_store(url, storage_options=options), name).folder

    try:
        folder: str = agree(comms, "which", None, find_tensors, args.save_within_seconds)
    finally:
        comms.close()
    checkpointer = open_engine(
        url,
        session.world,
        session.rank_group.board,
        emit=session.emit,
        scope=topic,
        within_seconds=args.save_within_seconds,
        storage_options=options,
        require_signature=launch.require_signature,
    )
    try:
        checkpoint = next(
            committed for committed in checkpointer.committed() if committed.folder == folder
        )
        pipelined = pipeline_of(model)
        part = Part(stateful_of(model)) if pipelined is None else pipelined.part()
        checkpointer.load_part(checkpoint, "model", part)
    finally:
        checkpointer.close()
    return folder


def split_reference(reference: str, repository: str) -> tuple[str, str]:
    """Return the repository and the checkpoint of a reference."""
    folder, slash, name = reference.rstrip("/").rpartition("/")
    if name.startswith(_PREFIX):
        return (folder or "/", name) if slash else (repository, name)
    is_name = not slash and (":" in name or name.isdigit() or name.startswith("latest"))
    return (repository, name) if is_name else (reference, "latest")


def gather_state(model: nn.Module, *, keep: bool) -> dict[str, Any]:
    """Return the state of ``model`` on the CPU, with every sharded tensor gathered.

    One tensor is gathered at a time, and kept only if ``keep`` is set. Collective if the model is
    sharded.
    """
    state: dict[str, Any] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    pipelined = pipeline_of(model)
    for name, value in stateful_of(model).state_dict().items():
        if pipelined is not None and torch.is_tensor(value):
            full_value = pipelined.gathered(name, value)
        else:
            full_value = _whole(value, parameters.get(name))
        if keep:
            state[name] = full_value
    return state


def _whole(value: Any, parameter: nn.Parameter | None) -> Any:
    if hasattr(parameter, "ds_id"):
        # Only DeepSpeed can gather its partitioned parameters.
        from resilient.strategies.deepspeed import gathered

        return gathered(parameter)
    return value.full_tensor().cpu() if hasattr(value, "full_tensor") else value


def is_sharded(model: nn.Module) -> bool:
    """Return whether a parameter is sharded, or is only on other ranks."""
    if find_redirect(model) is not None or pipeline_of(model) is not None:
        return True
    return any(
        hasattr(parameter, "full_tensor") or hasattr(parameter, "ds_id")
        for parameter in model.parameters()
    )


def write_model(model: nn.Module, state: Mapping[str, Any], folder: Path) -> None:
    """Write ``model`` into ``folder``, by its own ``save_pretrained`` if it has one.

    Any other model becomes ``model.safetensors``, which is written atomically.

    Args:
        model: Selects the method.
        state: State to write; see :func:`gather_state`.
        folder: Target folder.

    Raises:
        UnsavableState: A tensor has a dtype that the format does not support.
        StoreError: The folder cannot be written; an existing file is unchanged.
    """
    if hasattr(model, "save_pretrained"):
        folder.mkdir(parents=True, exist_ok=True)
        # `save_pretrained` knows which files belong to the model.
        options = {"state_dict": state} if is_sharded(model) else {}
        cast("Any", model).save_pretrained(folder, **options)
        return
    tensors = {name: value for name, value in state.items() if torch.is_tensor(value)}
    LocalStore(folder).put("model.safetensors", to_safetensors(tensors, {"format": "pt"}))
