"""What a checkpoint says of itself; steps already saved.

What a checkpoint says of itself, before anything of it is stored.

The checkpoints that one life has begun to save: each step once, and none below another.
"""

from __future__ import annotations

import importlib.metadata
import math
import platform
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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

CloseLedger = Callable[[CheckpointId, str], "Segment | None"]
"""Closes the ledger for a checkpoint of the run with this id; None where another rank does."""


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What a checkpoint says of itself besides state; all of it JSON-able.

    Attributes:
        config: the resolved configuration of the run.
        data: the data position, for people and tools; the state itself is a part.
        strategy: how the model is parallel, for example ``ddp``.
        metrics: what was measured at this step, by name; retention finds the best by them. What
            is not finite is left out, for nothing is better or worse than it.
        ledger: closes the ledger of samples, once it is sure that the save before is durable.
        segment: what that has closed.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    strategy: str = "single"
    metrics: Mapping[str, float] = field(default_factory=dict)
    ledger: CloseLedger | None = None
    segment: Segment | None = None

    def closing(self, checkpoint: CheckpointId, life: Generation) -> CheckpointInfo:
        """Return it with the ledger closed, if there is one.

        Crash: nothing was stored.
        """
        segment = self.ledger(checkpoint, life.run_id) if self.ledger else None
        if segment is None:
            return self
        anchor = segment.anchor.to_json()
        return replace(self, segment=segment, data={**self.data, "ledger": anchor})


def draft_manifest(
    desk: CheckpointContext,
    life: Generation,
    step: int,
    about: CheckpointInfo,
    keep: Collection[CheckpointId],
) -> Manifest:
    """Return a manifest with what the run says of itself and no files.

    Args:
        desk: the ranks and the time.
        life: who saves.
        step: what is saved.
        about: what the manifest says besides.
        keep: checkpoints that rotation must not delete.

    Raises:
        UnsavableState: a metric is no number.
    """
    return Manifest(
        run_id=life.run_id,
        checkpoint=CheckpointId(life.number, step),
        parent=life.parent,
        created_at=desk.clock.now_iso(),
        world={"size": desk.world.size, "strategy": about.strategy},
        config=about.config,
        data=about.data,
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
    """Return the metrics that a manifest can hold, as plain numbers; NaN and infinity cannot.

    Raises:
        UnsavableState: one is no number.
    """
    plain = {}
    for name, value in metrics.items():
        try:
            plain[name] = float(value)
        except (TypeError, ValueError) as error:
            path = f"metrics/{name}"
            raise UnsavableState(f"`{path}` is no number: {value!r}", path=path) from error
    return {name: value for name, value in plain.items() if math.isfinite(value)}


class SavedSteps:
    """Remembers what was handed to be persisted."""

    def __init__(self) -> None:
        self._all: set[CheckpointId] = set()

    def claim(self, checkpoint: CheckpointId) -> CheckpointId:
        """Return a checkpoint that may be saved.

        Crash: nothing was stored.

        Raises:
            ConfigError: this life has saved it, or tried to, or has saved a higher step.
        """
        if checkpoint in self._all:
            raise ConfigError(
                f"step {checkpoint.step} is saved already as {checkpoint}, or that save failed and "
                "may be committed all the same; a step is saved once in a life",
                hint="none but to count the step up before the next save, or to leave this one out",
            )
        newest = max(self._all, default=checkpoint)
        if checkpoint < newest:
            raise ConfigError(
                f"step {checkpoint.step} comes after step {newest.step} was saved: the highest "
                "of a life is its newest, so nobody would resume this one",
                hint="none but to count steps over all epochs, and to go back only by resuming",
            )
        return checkpoint

    def add(self, checkpoint: CheckpointId) -> None:
        """Remember that it was handed over.

        Crash: nothing was stored.
        """
        self._all.add(checkpoint)
