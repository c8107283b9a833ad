"""A desk with a near tier before its durable one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from resilient.errors import ConfigError
from resilient.vault import facts
from resilient.vault.saving.promoter import Promoter
from resilient.vault.tiers.tiers import TieredStore

if TYPE_CHECKING:
    from resilient.storage.store import Store
    from resilient.vault.desk import Desk
    from resilient.vault.saving.tiering import Tiering


def with_near_tier(desk: Desk, near: Store, tiering: Tiering) -> Desk:
    """Return a desk that saves to ``near`` and promotes to the store of ``desk``.

    Crash: nothing was stored.

    Args:
        desk: at the durable repository.
        near: takes every save.
        tiering: which of them go on, and what stays near.

    Raises:
        ConfigError: both are one.
    """
    if near.url == desk.store.url:
        raise ConfigError(f"the near tier is the repository itself: {near.url}")
    durable = desk.store

    def told(key: str, where: str) -> None:
        desk.emit(facts.NearCopyDoubted(key, where, durable.url))

    tiers = TieredStore(near, durable, told)
    return replace(desk, store=tiers, promoter=Promoter(tiers, tiering))
