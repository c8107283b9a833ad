"""Weights from any checkpoint, without the run that saved them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.opening import open_checkpointer
from resilient.state.capture import Part
from resilient.storage.open import open_store
from resilient.strategies.detour import stateful_of
from resilient.strategies.pipeline.known import pipeline_of
from resilient.vault.registry.references import resolve
from resilient.world.agreement import agree

if TYPE_CHECKING:
    from torch import nn

    from resilient.train.session import Session

_PREFIX = "checkpoint-"


def load_weights(session: Session, model: nn.Module, reference: str) -> str:
    """Load the model part of a checkpoint into ``model``; nothing else of it, and claim nothing.

    All ranks load the one that the coordinator finds, or none.

    Args:
        session: where the ranks meet.
        model: takes the weights in place.
        reference: a repository (its newest), a checkpoint's path in one, or a checkpoint of the
            session's own by any name that ``resilient ckpt`` takes.

    Returns:
        The folder's name of the checkpoint.

    Raises:
        RepositoryNotFound: there is none.
        NothingToResume: it has no such checkpoint.
        IntegrityError: the checkpoint is damaged; the model is as it was.
        IncompatibleCheckpoint: it holds another model.
    """
    url, name = split_reference(reference, session.repository)
    launch, args = session.gang.launch, session.args
    options = {**(args.storage_options or {}), **launch.storage_options}
    topic = f"weights/{session.next_topic()}"
    comms = session.comms(topic)

    def found(_: object) -> str:
        return resolve(open_store(url, storage_options=options), name).folder

    try:
        folder: str = agree(comms, "which", None, found, args.save_within_seconds)
    finally:
        comms.close()
    checkpointer = open_checkpointer(
        url,
        session.world,
        session.gang.board,
        emit=session.emit,
        scope=topic,
        within_seconds=args.save_within_seconds,
        storage_options=options,
        require_signature=launch.require_signature,
    )
    try:
        wanted = next(one for one in checkpointer.committed() if one.folder == folder)
        pipelined = pipeline_of(model)
        part = Part(stateful_of(model)) if pipelined is None else pipelined.part()
        checkpointer.load_part(wanted, "model", part)
    finally:
        checkpointer.close()
    return folder


def split_reference(reference: str, repository: str) -> tuple[str, str]:
    """Return the repository that a reference means, and the checkpoint in it."""
    folder, slash, name = reference.rstrip("/").rpartition("/")
    if name.startswith(_PREFIX):
        return (folder or "/", name) if slash else (repository, name)
    is_name = not slash and (":" in name or name.isdigit() or name.startswith("latest"))
    return (repository, name) if is_name else (reference, "latest")
