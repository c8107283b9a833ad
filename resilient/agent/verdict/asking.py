"""What the agent asks of the repository; nothing here holds it for long."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from resilient.agent.verdict.progress import Progress
from resilient.errors import ResilientError
from resilient.format.names import CHECKPOINTS, MANIFEST, CheckpointId, split_checkpoint_key
from resilient.storage.open import open_store
from resilient.vault.registry.generations import read_generations

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from resilient.storage.store import Store

_LISTING_SECONDS_MAX = 15.0


def newest_committed(url: str, storage_options: Mapping[str, Any] | None = None) -> object:
    """Return the newest committed checkpoint under ``url``, None before the first.

    Never raises and never takes long: a store that does not answer must not hold the agent.
    """
    return _ask_store(find_newest, url, storage_options, Progress.UNKNOWN)


def launches_of(url: str, storage_options: Mapping[str, Any] | None = None) -> int:
    """Return how often the run under ``url`` was launched; 0 when nobody answers."""

    def count(store: Store) -> int:
        return sum(one.cause == "start" for one in read_generations(store))

    return int(_ask_store(count, url, storage_options, 0))


def _ask_store(
    question: Callable[[Store], Any],
    url: str,
    storage_options: Mapping[str, Any] | None,
    unknown: Any,
) -> Any:
    found: list[Any] = [unknown]

    def ask() -> None:
        try:
            found[0] = question(open_store(url, storage_options=storage_options))
        except (ResilientError, OSError, ImportError):
            found[0] = unknown

    thread = threading.Thread(target=ask, name="list-checkpoints", daemon=True)
    thread.start()
    thread.join(_LISTING_SECONDS_MAX)
    return found[0]


def find_newest(store: Store) -> CheckpointId | None:
    """Return the newest checkpoint whose manifest is in the store."""
    keys = (split_checkpoint_key(entry.key) for entry in store.list(CHECKPOINTS))
    return max((key[0] for key in keys if key and key[1] == MANIFEST), default=None)
