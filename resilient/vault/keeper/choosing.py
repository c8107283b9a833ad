"""Who persists: the keeper of this host, or a thread where there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from resilient.vault.keeper.link import KeeperPersister
from resilient.vault.saving.bound import Bound
from resilient.vault.saving.persister import ThreadPersister

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.vault.keeper.guest import KeeperAddress
    from resilient.vault.saving.persister import Persister


def persister_for(
    keeper: KeeperAddress | None,
    url: str,
    storage_options: Mapping[str, Any],
    host_bytes_max: int | None = None,
) -> Persister:
    """Return who persists jobs for ``url``: the keeper if there is one, else a thread.

    Args:
        keeper: where it is; it has a bound of its own.
        url: of the repository.
        storage_options: the way there.
        host_bytes_max: how much memory the thread may take.

    Raises:
        ConfigError: that is no number of bytes.
    """
    thread = ThreadPersister(Bound(host_bytes_max))
    if keeper is None:
        return thread
    address = replace(keeper, url=url, storage_options=storage_options)
    return KeeperPersister(address, thread)
