"""Which checkpoint a reference names, for all ranks alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.format.names import CheckpointId
from resilient.vault.registry.references import resolve
from resilient.world.agreement import agree

if TYPE_CHECKING:
    from resilient.vault.desk import Desk


def named_by(desk: Desk, topic: str, ref: str) -> CheckpointId:
    """Return the checkpoint that ``ref`` names, as the coordinator sees it.

    Collective: every rank, same topic, each topic once.
    Crash: reads only.

    Args:
        desk: the repository and the ranks.
        topic: names this agreement.
        ref: as :func:`resilient.vault.registry.references.resolve` takes it.

    Raises:
        RepositoryNotFound: nothing was ever committed there.
        NothingToResume: it names no checkpoint.
        UsageError: it names several.
    """

    def rule(_: object) -> list[int]:
        found = resolve(desk.store, ref)
        return [found.generation, found.step]

    return CheckpointId(*agree(desk.comms, topic, None, rule, desk.limits.within_seconds))
