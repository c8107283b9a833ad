"""Where the vault's work is done: the repository, the ranks, the bounds, the time, the listener."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError
from resilient.format.parity import check_parity
from resilient.format.signature import Signing
from resilient.vault.retention import Retention

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.clock import Clock
    from resilient.events import Emitter, Event
    from resilient.storage.store import Store
    from resilient.vault.generations import Generation
    from resilient.vault.promoter import Promoter
    from resilient.world.comms import Comms
    from resilient.world.world import World

UNCHANGED = ("refer", "write")


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one run at its repository.

    Attributes:
        retention: which checkpoints stay.
        within_seconds: how long one phase of a save or one candidate of a resume may take.
        single_writer: the user promises to be the only job, so a store without exclusive
            create may be used.
        save_unchanged: ``refer``: bytes that the store has already are not written again;
            ``write``: every checkpoint stands for itself.
        parity: how many files of each rank may be lost and be computed back.
        repair_on_restore: whether a restore computes damaged files back, in memory, where parity
            can, instead of going back to an older checkpoint.

    Raises:
        ConfigError: a value that is not accepted.
    """

    retention: Retention = field(default_factory=Retention)
    within_seconds: float = 600.0
    single_writer: bool = False
    save_unchanged: str = "refer"
    parity: int = 0
    repair_on_restore: bool = True

    def __post_init__(self) -> None:
        check_parity(self.parity)
        if self.save_unchanged not in UNCHANGED:
            raise ConfigError(
                f"`save_unchanged`={self.save_unchanged!r} is not accepted: "
                f"use one of {', '.join(UNCHANGED)}"
            )

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able value."""
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Limits:
        """Return the limits that ``to_json`` described."""
        return Limits(**{**value, "retention": Retention.from_json(value["retention"])})


@dataclass(frozen=True, slots=True)
class Desk:
    """What every collective act of the vault needs.

    Attributes:
        store: the repository.
        comms: the ranks; used by one thread at a time.
        limits: the bounds.
        clock: time.
        emit: where events go.
        signing: whether what is committed is signed, and what is read must be.
        promoter: brings what the store's near tier took to the durable one; None without tiers.
    """

    store: Store
    comms: Comms
    limits: Limits
    clock: Clock
    emit: Emitter
    signing: Signing = field(default_factory=Signing)
    promoter: Promoter | None = None

    @property
    def world(self) -> World:
        """Who this rank is."""
        return self.comms.world

    def tell(self, event: Event) -> None:
        """Emit a fact of the whole gang once, from the coordinator."""
        if self.world.is_coordinator:
            self.emit(event)

    def within(self, life: Generation) -> Desk:
        """Return a desk whose events name the run and its life."""
        return replace(self, emit=self.emit.bind(run=life.run_id, generation=life.number))

    def finish(self) -> None:
        """Return when what was saved last is in the durable tier, if there are tiers.

        Crash: the near tier has it.

        Raises:
            SaveFailed: the near tier alone has it.
            Fenced: a newer life began.
        """
        if self.promoter and self.world.is_coordinator:
            self.promoter.finish(self)

    def close(self) -> None:
        """Let go of threads.

        Crash: nothing changes.
        """
        if self.promoter:
            self.promoter.close()
