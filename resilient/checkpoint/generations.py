"""The lives of a run: who is allowed to write, and where each life began.

A life claims the next number by an exclusive create of ``generations/g<number>.json``. The
record names the checkpoint that the life starts from. Later numbers outrank earlier ones, so a
process of an older life may write what it likes and is never chosen.
"""

from __future__ import annotations

import socket
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resilient.checkpoint.verified_read import fetch
from resilient.distributed.start_identity import StartIdentity
from resilient.errors import (
    ConfigError,
    Fenced,
    IntegrityError,
    KeyExists,
    KeyNotFound,
    NotExclusive,
)
from resilient.format.document import RECORD_BYTES_MAX, check_record, seal, unseal
from resilient.format.keys import (
    GENERATIONS,
    CheckpointId,
    committed_key,
    generation_key,
    parse_checkpoint,
    parse_committed,
    parse_generation,
)
from resilient.processes import ProcessIdentity
from resilient.redaction import shell_quote

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.clock import Clock
    from resilient.storage.store import Store

_ATTEMPTS_MAX = 64
_FORMAT = "resilient-generation"
_MARK_FORMAT = "resilient-committed"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Generation:
    """One life of the run.

    Attributes:
        number: 1 for the first life; a later life has a higher one.
        run_id: names the run through all of its lives.
        parent: the checkpoint that this life began from, None when from scratch.
        cause: why it began, for example ``start`` or ``restart``.
        claimed_at: UTC, ISO 8601.
        host: name of the machine that claimed it.
        token: Unique to the claim. It settles a lost answer, and tells two claims of one number
            apart.
        skipped: how many numbers right before this one no life was ever to have, because
            folders bore them already; without that every number has a record.
        start: Identity of the start that claimed the number; None in records of older releases.
        process: The agent, or the training process without one; None for a tool.
    """

    number: int
    run_id: str
    parent: CheckpointId | None
    cause: str
    claimed_at: str
    host: str
    token: str
    skipped: int = 0
    start: StartIdentity | None = None
    process: ProcessIdentity | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the record's fields."""
        fields = {
            "format": _FORMAT,
            "version": _VERSION,
            "number": self.number,
            "run_id": self.run_id,
            "parent": self.parent.folder if self.parent else None,
            "cause": self.cause,
            "claimed_at": self.claimed_at,
            "host": self.host,
            "token": self.token,
        }
        skipped = {"skipped": self.skipped} if self.skipped else {}
        start = {"start": self.start.to_json()} if self.start else {}
        process = {"process": self.process.to_json()} if self.process else {}
        return {**fields, **skipped, **start, **process}

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Generation:
        """Return the record that ``to_json`` described.

        Raises:
            ValueError: it is none.
        """
        check_record(fields)
        folder = fields["parent"]
        parent = parse_checkpoint(folder) if folder is not None else None
        if folder is not None and parent is None:
            raise ValueError(f"{folder!r} names no checkpoint")
        return Generation(
            fields["number"],
            fields["run_id"],
            parent,
            fields["cause"],
            fields["claimed_at"],
            fields["host"],
            fields["token"],
            fields.get("skipped", 0),
            StartIdentity.from_json(fields["start"]) if "start" in fields else None,
            ProcessIdentity.from_json(fields["process"]) if "process" in fields else None,
        )


def claim(  # noqa: PLR0913 - the fields of a record, and the store's conditions
    store: Store,
    parent: CheckpointId | None,
    *,
    cause: str,
    clock: Clock,
    above: int = 0,
    single_writer: bool = False,
    start: StartIdentity | None = None,
    process: ProcessIdentity | None = None,
) -> Generation:
    """Begin a life: create the record of the next free number, exclusively.

    Crash: either the record is there, and the number is used up by a life that saved nothing,
    or it is not. Both are harmless.

    Args:
        store: the repository.
        parent: the checkpoint that this life starts from.
        cause: why it begins.
        clock: gives ``claimed_at``.
        above: a number that the new one must exceed (of the highest checkpoint seen).
        single_writer: the user promises that no other job writes here, which allows a store
            without exclusive create (docs/guarantees.md).
        start: Identity of the start that claims the number.
        process: The process that claims it; None for a tool.

    Raises:
        ConfigError: the cause is no short text.
        NotExclusive: the store cannot fence and the user did not promise to be alone.
        StoreError: the store failed.
    """
    if not store.exclusive and not single_writer:
        raise NotExclusive(
            f"{store.url} has no exclusive create, so a stale process could not be fenced off; "
            "a job that is the only one may promise that",
            hint=f"resilient train --single-writer --repo {shell_quote(store.url)} SCRIPT",
        )
    numbers = list_numbers(store)
    run_id = _run_id(store, numbers)
    newest = max(numbers, default=0)
    number = max(above, newest) + 1
    for candidate in range(number, number + _ATTEMPTS_MAX):
        record = Generation(
            candidate,
            run_id,
            parent,
            cause,
            clock.now_iso(),
            socket.gethostname(),
            uuid.uuid4().hex,
            # Whatever lies between `number` and a later candidate a rival has just claimed.
            number - newest - 1 if candidate == number else 0,
            start,
            process,
        )
        _check_writable(record)
        try:
            create_record(store, generation_key(candidate), seal(record.to_json()))
        except KeyExists:
            continue
        return record
    raise Fenced(f"{_ATTEMPTS_MAX} other lives began at {store.url} at the same moment")


def _check_writable(record: Generation) -> None:
    """Refuse a record that no reader would take."""
    try:
        check_record(record.to_json())
    except ValueError as error:
        raise ConfigError(
            f"life {record.number} cannot be recorded: {error}; a cause is one word"
        ) from error


def create_record(store: Store, key: str, data: bytes) -> None:
    """Store ``data`` only if no object has the key; as well as the store can.

    Crash: all of the object is there, or nothing.

    Raises:
        KeyExists: the key is taken; nothing was changed.
        StoreError: the store failed.
    """
    if store.exclusive:
        store.put_new(key, data)
        return
    try:
        store.stat(key)
    except KeyNotFound:
        store.put(key, data)
        return
    raise KeyExists(f"`{key}` is taken", key=key)


def list_numbers(store: Store) -> list[int]:
    """Return the numbers of all lives, rising, readable or not.

    Crash: reads only.
    """
    found = (parse_generation(entry.key) for entry in store.list(GENERATIONS))
    return sorted(number for number in found if number)


def list_marks(store: Store) -> list[int]:
    """Return the numbers of all lives that have committed something, rising.

    Crash: reads only.
    """
    found = (parse_committed(entry.key) for entry in store.list(GENERATIONS))
    return sorted(number for number in found if number)


def mark_committed(store: Store, number: int) -> None:
    """Remember that a life has committed something.

    The mark decides nothing while a checkpoint is there. It tells "every manifest was lost",
    which must not start training over silently, from "nothing was ever committed".

    Crash: after the commit and before the mark, the checkpoint is as safe as ever.

    Raises:
        StoreError: the store failed; the commit stands.
    """
    document = {"format": _MARK_FORMAT, "version": _VERSION, "number": number}
    store.put(committed_key(number), seal(document))


def check_mark(store: Store, number: int) -> None:
    """Hold the mark of a life against what it must say; resume asks only whether it is there.

    Crash: reads only.

    Raises:
        IntegrityError: it is damaged.
        KeyNotFound: there is none.
    """
    key = committed_key(number)
    fields = fetch(store, key, lambda data: unseal(data, key), RECORD_BYTES_MAX)
    if (fields.get("format"), fields.get("number")) != (_MARK_FORMAT, number):
        raise IntegrityError(f"`{key}` is not the mark of life {number}", key=key)


def read_generation(store: Store, number: int) -> Generation:
    """Return one life's record.

    Crash: reads only.

    Raises:
        IntegrityError: the record is damaged.
        KeyNotFound: there is none.
    """
    key = generation_key(number)
    fields = fetch(store, key, lambda data: unseal(data, key), RECORD_BYTES_MAX)
    if fields.get("format") != _FORMAT or fields.get("version") != _VERSION:
        raise IntegrityError(f"`{key}`: not a record that this release reads", key=key)
    try:
        record = Generation.from_json(fields)
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(f"`{key}`: contradicts itself ({error})", key=key) from error
    if record.number != number:
        raise IntegrityError(f"`{key}` is the record of life {record.number}", key=key)
    if record.parent and record.parent.generation >= number:
        raise IntegrityError(f"`{key}` names a parent of its own future", key=key)
    return record


def read_generations(store: Store) -> list[Generation]:
    """Return the records of all lives that can be read, rising.

    Crash: reads only.
    """
    records = []
    for number in list_numbers(store):
        try:
            records.append(read_generation(store, number))
        except (IntegrityError, KeyNotFound):
            continue
    return records


def check_fence(store: Store, mine: int, token: str = "") -> None:
    """Refuse a process whose claim is not the newest claim of the repository.

    A repository that was restored from a backup gives the same number to a second claim. Only
    the token tells the two claims apart. A record that is damaged cannot be compared, and
    stops no run.

    Crash: reads only.

    Args:
        store: The repository.
        mine: Number of the generation that writes.
        token: Token of its claim; empty compares the number alone.

    Raises:
        Fenced: A newer generation began, or the record is of another claim or gone.
        StoreError: The store failed.
    """
    newest = max(list_numbers(store), default=mine)
    if newest > mine:
        raise Fenced(
            f"life {newest} of this run began while life {mine} was still running at "
            f"{store.url}: this process has to stop",
            hint=f"resilient ckpt reflog {shell_quote(store.url)}",
        )
    if token:
        _require_own_record(store, mine, token)


def _require_own_record(store: Store, mine: int, token: str) -> None:
    """Refuse unless the record of a generation holds this token."""
    try:
        if read_generation(store, mine).token == token:
            return
        found = "is of another process"
    except IntegrityError:
        return
    except KeyNotFound:
        found = "is gone"
    raise Fenced(
        f"the record of life {mine} at {store.url} {found}: the repository was restored or "
        "replaced while this process ran. This process changed no committed file and has to stop",
        hint=f"resilient ckpt reflog {shell_quote(store.url)}",
    )


def _run_id(store: Store, numbers: list[int]) -> str:
    """Return the run's id from the newest readable record, or a new one."""
    for number in reversed(numbers):
        try:
            return read_generation(store, number).run_id
        except (IntegrityError, KeyNotFound):
            continue
    return uuid.uuid4().hex
