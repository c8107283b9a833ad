"""Committed checkpoints of a run, and their models as folders for other tools."""

from __future__ import annotations

import json
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.checkpoint.catalog import lineage, read_manifest
from resilient.engine_factory import open_engine
from resilient.format.keys import parse_checkpoint
from resilient.storage.open import open_store
from resilient.train.hf_interop.checkpoint import STATE
from resilient.train.hf_interop.exporter import read_parts, write_model_files
from resilient.train.model.artifacts import SIDECAR_FILES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from resilient.format.keys import CheckpointId
    from resilient.train.saver import BestCheckpoint, CheckpointSaver
    from resilient.train.session import Session


@dataclass(frozen=True, slots=True)
class SavedModel:
    """Model of a committed checkpoint, in a folder that is deleted after use.

    Attributes:
        folder: Weights (``model.safetensors``, or an adapter's), the model's configurations and
            tokenizer if it has them, and ``trainer_state.json``.
        checkpoint: Source checkpoint.
        epoch: Progress of training, in epochs.
        metrics: Metrics of the checkpoint.
        is_final: Whether this model is the result of training: the last model, or the best.
    """

    folder: Path
    checkpoint: CheckpointId
    epoch: float
    metrics: Mapping[str, float]
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class SavedModels:
    """Committed checkpoints of a run, read from the store at each call; read-only.

    Safe during training and in any thread, because this object has its own readers.

    Attributes:
        url: URL of the repository.
        options: Access options of the repository.
        generation: Generation of this attempt.
        resumed_from: Checkpoint from which this attempt continued.
        best: Current record of the best model's checkpoint.
        require_signature: Whether only signed checkpoints count.
    """

    url: str
    options: Mapping[str, Any]
    generation: int
    resumed_from: CheckpointId | None
    best: BestCheckpoint
    require_signature: bool = False

    def since(self, mark: str) -> list[CheckpointId]:
        """Return the checkpoints after ``mark`` in this lineage of attempts, oldest first.

        Args:
            mark: Folder of a checkpoint; empty: all checkpoints of the lineage. Checkpoints of
                abandoned attempts and checkpoints deleted by retention are left out.
        """
        marked_checkpoint = parse_checkpoint(mark)
        descent = lineage(open_store(self.url, storage_options=self.options))
        own_checkpoints = [
            candidate for candidate in descent.candidates if self._is_in_lineage(candidate)
        ]
        return sorted(
            checkpoint
            for checkpoint in own_checkpoints
            if marked_checkpoint is None or checkpoint > marked_checkpoint
        )

    def final(self, *, best: bool) -> CheckpointId | None:
        """Return the last checkpoint, or the best model's checkpoint; None if missing."""
        if best and self.best.checkpoint is not None:
            return self.best.checkpoint
        own_checkpoints = [
            checkpoint for checkpoint in self.since("") if checkpoint.generation == self.generation
        ]
        return own_checkpoints[-1] if own_checkpoints else self.resumed_from

    def _is_in_lineage(self, checkpoint: CheckpointId) -> bool:
        is_older = self.resumed_from is not None and checkpoint <= self.resumed_from
        return is_older or checkpoint.generation == self.generation

    @contextmanager
    def model_of(self, checkpoint: CheckpointId, *, is_final: bool = False) -> Iterator[SavedModel]:
        """Write a checkpoint's model into a temporary folder, with every byte verified.

        Raises:
            KeyNotFound: Retention deleted the checkpoint.
            IntegrityError: The checkpoint is damaged.
            IncompatibleCheckpoint: The checkpoint has no model that can be written.
        """
        manifest = read_manifest(open_store(self.url, storage_options=self.options), checkpoint)
        engine = open_engine(
            self.url, storage_options=self.options, require_signature=self.require_signature
        )
        try:
            parts = read_parts(
                engine, manifest, ("model", "optimizer", "trainer_state", *SIDECAR_FILES)
            )
        finally:
            engine.close()
        state = parts.get("trainer_state", {})
        with tempfile.TemporaryDirectory(prefix="resilient-") as name:
            folder = Path(name)
            write_model_files(folder, parts)
            (folder / STATE).write_text(json.dumps(dict(state), indent=2, default=str) + "\n")
            epoch, metrics = float(state.get("epoch") or 0.0), dict(manifest.metrics)
            yield SavedModel(folder, checkpoint, epoch, metrics, is_final)


def saved_models(session: Session, saver: CheckpointSaver) -> SavedModels:
    """Return the saved models of a resumed or new run."""
    launch, args = session.rank_group.launch, session.args
    return SavedModels(
        session.repository,
        {**(args.storage_options or {}), **launch.storage_options},
        saver.generation,
        saver.resumed_from,
        saver.best,
        launch.require_signature,
    )
