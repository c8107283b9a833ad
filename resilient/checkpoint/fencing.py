"""Fencing: test of a store's exclusive create, and exclusion of older attempts from writing.

Exclusive create is a put that fails if the object exists. A server that ignores ``If-None-Match``
responds normally and accepts the puts of two writers. A single request does not reveal such a
server. Several writers therefore race for probe keys, once per repository. The result of the race
is stored in the repository.

The repository has no lock that a dead process could leave behind. A new attempt can therefore begin
at any time. Each attempt claims the next number (generation), and only the newest generation may
write. Any process of this generation may save and delete until a newer generation begins, even a
process that hung, was forgotten, or lost its launcher. To exclude such a process from writing
(fence it), begin a generation from the checkpoint that resume would take, and save nothing. Such a
generation abandons no checkpoint.
"""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from threading import Barrier, BrokenBarrierError
from typing import TYPE_CHECKING

from resilient.checkpoint.catalog import folders_of, lineage, read_manifest
from resilient.checkpoint.generations import check_fence, claim, list_numbers, read_generation
from resilient.checkpoint.reflog import BY_HAND, UNLOCK
from resilient.checkpoint.verified_read import fetch
from resilient.errors import (
    Fenced,
    IncompatibleCheckpoint,
    IntegrityError,
    KeyExists,
    KeyNotFound,
    NotExclusive,
    StoreDenied,
)
from resilient.format.document import RECORD_BYTES_MAX, seal, unseal
from resilient.format.keys import ABILITIES, MANIFEST, probe_key
from resilient.redaction import shell_quote
from resilient.storage.urls import protocol_of

if TYPE_CHECKING:
    from resilient.checkpoint.generations import Generation
    from resilient.clock import Clock
    from resilient.format.keys import CheckpointId
    from resilient.storage.store import Store

RACERS = 6
ROUNDS = 8
_START_SECONDS = 30.0
# Stores whose condition is checked by another program. The other stores check it in this process
# or in the kernel, and their tests race them.
_REMOTE_PROTOCOLS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})


def check_store_capabilities(store: Store, clock: Clock, *, single_writer: bool = False) -> None:
    """Refuse a server without working exclusive create, unless one job writes alone.

    The first attempt of a repository runs the race and records the verdict; later attempts read
    it. To run the race again, after a change of the server, delete ``store-abilities.json``.

    Crash: a few small objects may be left under ``store-probe/``; they are never read. A role that
        may not delete leaves them too.

    Args:
        store: Repository.
        clock: Source of the record's time.
        single_writer: Promise of the user that no other job writes here.

    Raises:
        NotExclusive: More or fewer than one racer won a round.
        StoreError: The store failed.
    """
    if protocol_of(store.url) not in _REMOTE_PROTOCOLS or not store.exclusive or single_writer:
        return
    verdict = recorded(store)
    if verdict is None:
        verdict = is_exclusive(store)
        store.put(ABILITIES, _record(store, clock, exclusive=verdict))
    if not verdict:
        raise NotExclusive(
            f"{store.url} accepts `If-None-Match` but lets several writers succeed, so a stale "
            f"process cannot be fenced (recorded in `{ABILITIES}`; delete that file after a "
            "change of the server); if no other job writes there, pass --single-writer",
            hint=f"resilient train --single-writer --repo {shell_quote(store.url)} SCRIPT",
        )


def recorded(store: Store) -> bool | None:
    """Return the verdict of an earlier probe of this URL, or None.

    Crash: reads only.

    Raises:
        StoreError: The store failed.
    """
    try:
        fields = fetch(store, ABILITIES, lambda data: unseal(data, ABILITIES), RECORD_BYTES_MAX)
    except (IntegrityError, KeyNotFound):
        return None
    # The record of a copied repository is not valid for its present store.
    if fields.get("format") != "resilient-abilities" or fields.get("url") != store.url:
        return None
    verdict = fields.get("exclusive")
    return verdict if isinstance(verdict, bool) else None


def is_exclusive(store: Store, rounds: int = ROUNDS) -> bool:
    """Return whether exactly one of several racers wins each round, and keeps its content.

    Crash: objects of a round may be left under ``store-probe/``.

    Args:
        store: Store to probe.
        rounds: Number of rounds; a server that checks and writes in two steps loses most of them.

    Raises:
        StoreError: The store failed.
    """
    token = secrets.token_hex(16)
    return all(_race(store, probe_key(token, number)) for number in range(rounds))


def _race(store: Store, key: str) -> bool:
    start = Barrier(RACERS)

    def run(number: int) -> bytes | None:
        content = f"{key} racer {number}".encode()
        # On a starved machine a late racer still races the others.
        with suppress(BrokenBarrierError):
            start.wait(_START_SECONDS)
        try:
            store.put_new(key, content)
        except KeyExists:
            return None
        return content

    with ThreadPoolExecutor(RACERS, thread_name_prefix="resilient-probe") as pool:
        winners = [content for content in pool.map(run, range(RACERS)) if content is not None]
    # A late writer must fail on the existing key. A server that ignores the condition overwrites
    # the key.
    with suppress(KeyExists):
        store.put_new(key, b"late")
        winners.append(b"late")
    stored_content = store.get(key)
    # A role without permission to delete is acceptable for training. Another role cleans up.
    with suppress(StoreDenied):
        store.delete(key)
    return len(winners) == 1 and stored_content == winners[0]


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


_ATTEMPTS_MAX = 8


@dataclass(frozen=True, slots=True)
class Writer:
    """Newest generation of a run; only its processes may write.

    Attributes:
        life: Generation number.
        record: Generation record; None if it cannot be read.
        problem: Reason why the record cannot be read. In that case nothing is deleted until a newer
            generation begins.
        last: Newest checkpoint that the generation committed; None for none.
        committed_at: Time of that commit; empty if unknown.
        unfinished: Newer checkpoints with files and no manifest: in flight, or left by a crash.
        resume: First candidate of a resume.
    """

    life: int
    record: Generation | None
    problem: str
    last: CheckpointId | None
    committed_at: str
    unfinished: tuple[CheckpointId, ...]
    resume: CheckpointId | None

    @property
    def is_nobody(self) -> bool:
        """True if a command began the generation only to fence, so that no process may write."""
        by_command = self.record is not None and self.record.cause in BY_HAND | {UNLOCK}
        return by_command and self.last is None and not self.unfinished


def find_writer(store: Store) -> Writer | None:
    """Return the newest generation of the run; None if there is none.

    Crash: reads only.

    Raises:
        StoreError: The store failed, so the newest generation is unknown.
    """
    numbers, folders = list_numbers(store), folders_of(store)
    generation = max([*numbers, *(folder.generation for folder in folders)], default=0)
    if not generation:
        return None
    own_checkpoints = sorted(
        (folder for folder in folders if folder.generation == generation), reverse=True
    )
    last = next(
        (checkpoint for checkpoint in own_checkpoints if MANIFEST in folders[checkpoint]), None
    )
    unfinished_saves = tuple(
        checkpoint for checkpoint in own_checkpoints if last is None or checkpoint > last
    )
    record, problem = _read(store, generation)
    line = lineage(store, folders, numbers).candidates
    resume = line[0] if line else None
    return Writer(
        generation, record, problem, last, _commit_time(store, last), unfinished_saves, resume
    )


def _read(store: Store, generation: int) -> tuple[Generation | None, str]:
    try:
        return read_generation(store, generation), ""
    except IntegrityError as error:
        return None, error.message
    except KeyNotFound:
        return None, f"generation {generation} has no record"


def _commit_time(store: Store, checkpoint: CheckpointId | None) -> str:
    try:
        return read_manifest(store, checkpoint).created_at if checkpoint else ""
    except (IntegrityError, IncompatibleCheckpoint, KeyNotFound):
        return ""


def shut_out(store: Store, clock: Clock, *, single_writer: bool = False) -> Generation:
    """Claim a generation from the checkpoint that resume takes, so that older ones cannot commit.

    Checkpoints that the older generation commits before the claim are not lost. The new generation
    begins from the newest of these checkpoints.

    Crash: the generation exists, or nothing changed. The call can be repeated.

    Args:
        store: Repository.
        clock: Source of the record's time.
        single_writer: Promise of the user that no other job writes here.

    Raises:
        Fenced: Another generation began at the same moment and is newer; it may write now.
        NotExclusive: The store cannot fence and the user did not set ``single_writer``.
        StoreError: The store failed; the generation may be there.
    """
    check_store_capabilities(store, clock, single_writer=single_writer)
    first: int | None = None
    for _ in range(_ATTEMPTS_MAX):
        head = _resume_below(store, first)
        highest_generation = max((folder.generation for folder in folders_of(store)), default=0)
        generation = claim(
            store,
            head,
            cause=UNLOCK,
            clock=clock,
            above=highest_generation,
            single_writer=single_writer,
        )
        check_fence(store, generation.number, generation.token)
        first = first or generation.number
        # The writer may have saved, or deleted, between the look and the claim.
        if _resume_below(store, first) == head:
            return generation
    raise Fenced(
        f"another process saved to or deleted from {store.url} during each of {_ATTEMPTS_MAX} "
        "attempts",
        hint=f"resilient ckpt unlock {shell_quote(store.url)}",
    )


def _resume_below(store: Store, number: int | None) -> CheckpointId | None:
    """Return the checkpoint that resume would take without the generations from ``number`` on."""
    numbers, folders = list_numbers(store), folders_of(store)
    if number is not None:
        numbers = [generation for generation in numbers if generation < number]
        folders = {
            checkpoint: names
            for checkpoint, names in folders.items()
            if checkpoint.generation < number
        }
    line = lineage(store, folders, numbers).candidates
    return line[0] if line else None
