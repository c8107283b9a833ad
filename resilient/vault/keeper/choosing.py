"""Who persists: the keeper of this host, or a thread where there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from resilient.vault.keeper.link import KeeperPersister
from resilient.vault.saving.persister import ThreadPersister

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.vault.keeper.guest import KeeperAddress
    from resilient.vault.saving.persister import Persister


def persister_for(
    keeper: KeeperAddress | None, url: str, storage_options: Mapping[str, Any]
) -> Persister:
    """Return who persists jobs for ``url``: the keeper if there is one, else a thread."""
    thread = ThreadPersister()
    if keeper is None:
        return thread
    address = replace(keeper, url=url, storage_options=storage_options)
    return KeeperPersister(address, thread)
