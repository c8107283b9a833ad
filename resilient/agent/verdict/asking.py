"""What the agent asks of the repository; nothing here holds it for long."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from resilient.agent.verdict.progress import ASKING_SECONDS_MAX, Progress
from resilient.errors import ResilientError
from resilient.format.names import CHECKPOINTS, MANIFEST, CheckpointId, split_checkpoint_key
from resilient.storage.open import open_store
from resilient.vault.registry.generations import read_generations

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from resilient.storage.store import Store


def newest_committed(
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    within_seconds: float = ASKING_SECONDS_MAX,
) -> object:
    """Return the newest committed checkpoint under ``url``, None before the first.

    Never raises and takes ``within_seconds`` at most: a store that does not answer must not
    hold the agent. Then, as without any time to ask, it is ``Progress.UNKNOWN``.
    """
    return _ask_store(find_newest, url, storage_options, within_seconds)


def launches_of(url: str, storage_options: Mapping[str, Any] | None = None) -> int | None:
    """Return how often the run under ``url`` was launched; None when nobody answers."""

    def count(store: Store) -> int:
        return sum(one.cause == "start" for one in read_generations(store))

    found = _ask_store(count, url, storage_options, ASKING_SECONDS_MAX)
    return None if found is Progress.UNKNOWN else int(found)


def _ask_store(
    question: Callable[[Store], Any],
    url: str,
    storage_options: Mapping[str, Any] | None,
    within_seconds: float,
) -> Any:
    found: list[Any] = [Progress.UNKNOWN]
    if within_seconds <= 0:
        return found[0]

    def ask() -> None:
        try:
            found[0] = question(open_store(url, storage_options=storage_options))
        except (ResilientError, OSError, ImportError):
            found[0] = Progress.UNKNOWN

    thread = threading.Thread(target=ask, name="list-checkpoints", daemon=True)
    thread.start()
    thread.join(within_seconds)
    return found[0]


def find_newest(store: Store) -> CheckpointId | None:
    """Return the newest checkpoint whose manifest is in the store."""
    keys = (split_checkpoint_key(entry.key) for entry in store.list(CHECKPOINTS))
    return max((key[0] for key in keys if key and key[1] == MANIFEST), default=None)
