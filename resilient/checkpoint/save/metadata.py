"""Fields of a checkpoint's manifest other than its files, and the record of steps already saved."""

from __future__ import annotations

import importlib.metadata
import math
import platform
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError, UnsavableState
from resilient.format.keys import CheckpointId
from resilient.format.manifest import Manifest

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from resilient.checkpoint.context import CheckpointContext
    from resilient.checkpoint.generations import Generation
    from resilient.format.ledger import Segment


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """Content of a manifest besides state; all values are JSON-able.

    Attributes:
        config: Resolved configuration of the run.
        data: Position in the training data, for people and tools; the exact state is saved as a
            part.
        strategy: Parallelism of the model, for example ``ddp``.
        metrics: Numbers measured at this step, by name; retention ranks checkpoints by them. Values
            that are not finite are left out, because they cannot be ranked.
        segment: Segment of the sample ledger that belongs to the checkpoint; None on ranks that
            keep no ledger.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    strategy: str = "single"
    metrics: Mapping[str, float] = field(default_factory=dict)
    segment: Segment | None = None


def draft_manifest(
    context: CheckpointContext,
    generation: Generation,
    step: int,
    about: CheckpointInfo,
    keep: Collection[CheckpointId],
) -> Manifest:
    """Return a manifest with the run's own content and no files.

    Args:
        context: Context: ranks and clock.
        generation: Generation that saves.
        step: Step that is saved.
        about: Further content of the manifest.
        keep: Checkpoints that retention must not delete.

    Raises:
        UnsavableState: A metric is not a number.
    """
    anchor = {"ledger": about.segment.anchor.to_json()} if about.segment else {}
    return Manifest(
        run_id=generation.run_id,
        checkpoint=CheckpointId(generation.number, step),
        parent=generation.parent,
        created_at=context.clock.now_iso(),
        world={"size": context.world.size, "strategy": about.strategy},
        config=about.config,
        data={**about.data, **anchor},
        metrics=_finite(about.metrics),
        protects=tuple(sorted(keep)),
        software=_software(),
        files=(),
        tensors=(),
        parts=(),
    )


@cache
def _software() -> dict[str, str]:
    names = ("resilient-train", "torch", "numpy")
    versions = {name: importlib.metadata.version(name) for name in names}
    return {"python": platform.python_version(), **versions}


def _finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite metrics as plain numbers; a manifest cannot hold NaN and infinity.

    Raises:
        UnsavableState: A metric is not a number.
    """
    plain = {}
    for name, value in metrics.items():
        try:
            plain[name] = float(value)
        except (TypeError, ValueError) as error:
            path = f"metrics/{name}"
            raise UnsavableState(f"`{path}` is not a number: {value!r}", path=path) from error
    return {name: value for name, value in plain.items() if math.isfinite(value)}


class SavedSteps:
    """Record of the checkpoints that one attempt has begun to save.

    Each step is saved at most once, and never after a higher step.
    """

    def __init__(self) -> None:
        self._all: set[CheckpointId] = set()

    def claim(self, checkpoint: CheckpointId) -> CheckpointId:
        """Return the checkpoint if it may be saved.

        Crash: nothing was stored.

        Raises:
            ConfigError: This attempt has saved the step, or tried to, or has saved a higher step.
        """
        if checkpoint in self._all:
            raise ConfigError(
                f"cannot save step {checkpoint.step}: this run already saved it as {checkpoint}, "
                "or that save failed and may still be committed",
                hint="increment the step before the next save, or skip this save",
            )
        newest = max(self._all, default=checkpoint)
        if checkpoint < newest:
            raise ConfigError(
                f"cannot save step {checkpoint.step}: step {newest.step} was already saved in "
                "this run",
                hint="count steps across epochs; to go back, resume an older checkpoint",
            )
        return checkpoint

    def add(self, checkpoint: CheckpointId) -> None:
        """Record that a checkpoint was handed over.

        Crash: nothing was stored.
        """
        self._all.add(checkpoint)
