"""Begin a life together: the coordinator claims its number, every rank learns it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilient import events
from resilient.errors import ResilientError
from resilient.format.names import is_file_name, parse_checkpoint
from resilient.storage.settling import settle
from resilient.storage.store import Sweepable
from resilient.storage.temporaries import TEMPORARY
from resilient.vault.abilities import check_abilities
from resilient.vault.catalog import committed, folders_of
from resilient.vault.generations import Generation, claim
from resilient.vault.tiers import (
    TieredStore,
    require_same_run,
    require_shared_near,
    share_record,
)
from resilient.world.agreement import agree, attempt

if TYPE_CHECKING:
    from resilient.vault.choose import Choice
    from resilient.vault.desk import Desk


def begin(desk: Desk, choice: Choice, cause: str) -> Generation:
    """Claim the next number for a life that starts from ``choice``, and say so.

    Collective: every rank, once per life.
    Crash: the number is used up; nothing else changed.

    Args:
        desk: the repository and the ranks.
        choice: what the life starts from, and what was passed over.
        cause: why it begins.

    Raises:
        NotExclusive: the store cannot fence and the user did not promise to be alone.
        StoreError: the store failed.
    """

    def work(_shown: list[Any]) -> dict[str, Any]:
        if isinstance(desk.store, TieredStore):
            require_same_run(desk.store)
        check_abilities(desk.store, desk.clock, single_writer=desk.limits.single_writer)
        settle(desk.store)
        above = max((one.generation for one in folders_of(desk.store)), default=0)
        return claim(
            desk.store,
            choice.checkpoint,
            cause=cause,
            clock=desk.clock,
            above=above,
            single_writer=desk.limits.single_writer,
        ).to_json()

    ruling = agree(desk.comms, "resume/claim", None, work, desk.limits.within_seconds)
    life = Generation.from_json(ruling)
    _share_near_tier(desk, life)
    told = desk.within(life)
    for one in choice.skipped:
        told.tell(events.CheckpointSkipped(one.name, one.reason))
    if life.parent is None and desk.world.is_coordinator:
        _tell_what_is_left(told)
    parent = life.parent.folder if life.parent else ""
    told.tell(events.GenerationClaimed(life.number, parent, cause))
    if desk.world.is_coordinator:
        sweep_uploads(told, life.number)
    return life


def _share_near_tier(desk: Desk, life: Generation) -> None:
    """See to it that what this life saves near counts as its own, for every rank. Collective."""
    tiers = desk.store
    if not isinstance(tiers, TieredStore):
        return
    if desk.promoter:
        desk.promoter.begin(life.number, life.parent)
    within_seconds = desk.limits.within_seconds

    def share(_shown: list[Any]) -> None:
        share_record(tiers, life.number)

    agree(desk.comms, "resume/near", None, share, within_seconds)
    seen = attempt(lambda: require_shared_near(tiers, life.number, desk.world.rank))
    agree(desk.comms, "resume/near/seen", seen, lambda _: None, within_seconds)


def _tell_what_is_left(desk: Desk) -> None:
    left = committed(desk.store)
    if left:
        desk.tell(events.StartedOver(len(left), left[0].folder))


def sweep_uploads(desk: Desk, mine: int) -> None:
    """Remove what killed processes of older lives left unfinished: uploads, temporary files.

    No age is needed: nothing that an older life still writes can be committed any more. What
    cannot be cleaned up costs storage, not safety, so a failure is only an event.

    Crash: some are aborted; none of them was ever an object.
    """
    if not isinstance(desk.store, Sweepable):
        return

    def is_of_an_older_life(key: str) -> bool:
        folder, _, name = key.partition("/")
        checkpoint = parse_checkpoint(folder)
        is_known = is_file_name(name) or name.startswith(TEMPORARY)
        return is_known and checkpoint is not None and checkpoint.generation < mine

    try:
        gone = desk.store.sweep(is_of_an_older_life, 0.0, desk.clock)
    except ResilientError as error:
        desk.tell(events.UploadsLeft(error.message, error.hint))
        return
    if gone:
        desk.tell(events.UploadsAborted(len(gone)))
