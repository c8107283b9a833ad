"""What a checkpoint says of itself, before anything of it is stored."""

from __future__ import annotations

import importlib.metadata
import math
import platform
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from resilient.errors import UnsavableState
from resilient.format.manifest import Manifest
from resilient.format.names import CheckpointId

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from resilient.format.ledger import Segment
    from resilient.vault.desk import Desk
    from resilient.vault.registry.generations import Generation


CloseLedger = Callable[[CheckpointId, str], "Segment | None"]
"""Closes the ledger for a checkpoint of the run with this id; None where another rank does."""


@dataclass(frozen=True, slots=True)
class About:
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

    def closing(self, checkpoint: CheckpointId, life: Generation) -> About:
        """Return it with the ledger closed, if there is one.

        Crash: nothing was stored.
        """
        segment = self.ledger(checkpoint, life.run_id) if self.ledger else None
        if segment is None:
            return self
        anchor = segment.anchor.to_json()
        return replace(self, segment=segment, data={**self.data, "ledger": anchor})


def describe(
    desk: Desk, life: Generation, step: int, about: About, keep: Collection[CheckpointId]
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
