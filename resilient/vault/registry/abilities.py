"""Whether a server keeps the one promise that cannot be seen from here: the exclusive create.

A server that ignores ``If-None-Match`` answers politely and lets two writers win, and asking it
once shows nothing. So writers race for keys of their own, once per repository, and the verdict
is recorded there.
"""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier, BrokenBarrierError
from typing import TYPE_CHECKING

from resilient.errors import IntegrityError, KeyExists, KeyNotFound, NotExclusive, StoreDenied
from resilient.format.document import RECORD_BYTES_MAX, seal, unseal
from resilient.format.names import ABILITIES, probe_key
from resilient.showing import quoted
from resilient.storage.urls import protocol_of
from resilient.vault.access.fetch import fetch

if TYPE_CHECKING:
    from resilient.clock import Clock
    from resilient.storage.store import Store

RACERS = 6
ROUNDS = 8
_START_SECONDS = 30.0
# Where the condition is another program's to judge. The others decide in this process or in
# the kernel, and their tests race them.
_JUDGED_ELSEWHERE = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})


def check_abilities(store: Store, clock: Clock, *, single_writer: bool = False) -> None:
    """Refuse a server that says it creates exclusively and does not, unless one job writes alone.

    The first life of a repository races for it and records the verdict; later ones read it. To
    ask again, after a change of the server, delete ``store-abilities.json``.

    Crash: a few objects of some bytes may be left under ``store-probe/``; they are never read.
    A role that may not delete leaves them too.

    Args:
        store: the repository.
        clock: gives the record's time.
        single_writer: the user promises that no other job writes here.

    Raises:
        NotExclusive: more or fewer than one racer won a round.
        StoreError: the store failed.
    """
    if protocol_of(store.url) not in _JUDGED_ELSEWHERE or not store.exclusive or single_writer:
        return
    verdict = recorded(store)
    if verdict is None:
        verdict = is_exclusive(store)
        store.put(ABILITIES, _record(store, clock, exclusive=verdict))
    if not verdict:
        raise NotExclusive(
            f"{store.url} accepts `If-None-Match` and lets several writers win, so a stale process "
            f"could not be fenced off (recorded in `{ABILITIES}`, which is to be deleted after a "
            "change of the server); a job that is the only one may promise that",
            hint=f"resilient train --single-writer --repo {quoted(store.url)} SCRIPT",
        )


def recorded(store: Store) -> bool | None:
    """Return the verdict of an earlier probe of this URL, or None.

    Crash: reads only.

    Raises:
        StoreError: the store failed.
    """
    try:
        fields = fetch(store, ABILITIES, lambda data: unseal(data, ABILITIES), RECORD_BYTES_MAX)
    except (IntegrityError, KeyNotFound):
        return None
    # A repository that was copied says nothing about where it lies now.
    if fields.get("format") != "resilient-abilities" or fields.get("url") != store.url:
        return None
    verdict = fields.get("exclusive")
    return verdict if isinstance(verdict, bool) else None


def is_exclusive(store: Store, rounds: int = ROUNDS) -> bool:
    """Say whether exactly one of several racers wins each round, and keeps what it wrote.

    Crash: objects of a round may be left under ``store-probe/``.

    Args:
        store: where to race.
        rounds: how often; a server whose check and write are two steps loses most of them.

    Raises:
        StoreError: the store failed.
    """
    token = secrets.token_hex(16)
    return all(_race(store, probe_key(token, number)) for number in range(rounds))


def _race(store: Store, key: str) -> bool:
    start = Barrier(RACERS)

    def run(racer: int) -> bytes | None:
        content = f"{key} racer {racer}".encode()
        # On a starved machine whoever comes late still races the others.
        with suppress(BrokenBarrierError):
            start.wait(_START_SECONDS)
        try:
            store.put_new(key, content)
        except KeyExists:
            return None
        return content

    with ThreadPoolExecutor(RACERS, thread_name_prefix="resilient-probe") as pool:
        won = [content for content in pool.map(run, range(RACERS)) if content is not None]
    # A late writer meets a key that is settled; a server that forgot the condition lets it in.
    with suppress(KeyExists):
        store.put_new(key, b"late")
        won.append(b"late")
    kept = store.get(key)
    # A role that may not delete is a good one to train with; another one tidies up.
    with suppress(StoreDenied):
        store.delete(key)
    return len(won) == 1 and kept == won[0]


def _record(store: Store, clock: Clock, *, exclusive: bool) -> bytes:
    return seal(
        {
            "format": "resilient-abilities",
            "version": 1,
            "url": store.url,
            "exclusive": exclusive,
            "racers": RACERS,
            "rounds": ROUNDS,
            "probed_at": clock.now_iso(),
        }
    )
