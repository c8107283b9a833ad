"""Generation records: claims, marks of committed checkpoints, and the fence.

A generation is the number of an attempt of a run. A mark shows that the generation has committed a
checkpoint. The fence is the check that rejects processes of older generations.

An attempt claims the next generation by an exclusive create of ``generations/g<number>.json``. The
record names the checkpoint that the attempt starts from. Higher numbers outrank lower numbers, so
resume never selects a checkpoint that an older generation saved late.
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
    """Record of one attempt that claimed the repository.

    Attributes:
        number: 1 for the first attempt; a later attempt has a higher number.
        run_id: Id of the run in all of its attempts.
        parent: Checkpoint that the attempt began from; None for a start from scratch.
        cause: Cause of the attempt, for example ``start`` or ``restart``.
        claimed_at: UTC, ISO 8601.
        host: Name of the machine that claimed it.
        token: Unique to the claim. The token shows after a lost response whether the claim
            succeeded, and distinguishes two claims of one number.
        skipped: Count of the numbers directly before this number that were skipped, because folders
            with these numbers existed. Every other number has a record.
        start: Identity of the start that claimed the number; None in records of older releases.
        process: Agent, or training process without an agent; None for a tool.
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
            ValueError: The fields describe no record.
        """
        check_record(fields)
        folder = fields["parent"]
        parent = parse_checkpoint(folder) if folder is not None else None
        if folder is not None and parent is None:
            raise ValueError(f"{folder!r} is not the name of a checkpoint")
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
    """Begin an attempt: create the record of the next free number, exclusively.

    Crash: the record exists and its number is used up, or the record does not exist. Both are
        harmless.

    Args:
        store: Repository.
        parent: Checkpoint that the attempt starts from.
        cause: Cause of the attempt.
        clock: Source of ``claimed_at``.
        above: Generation number of the highest checkpoint seen; the new number must exceed it.
        single_writer: Promise of the user that no other job writes here, which allows a store
            without exclusive create (docs/guarantees.md).
        start: Identity of the start that claims the number.
        process: Process that claims the number; None for a tool.

    Raises:
        ConfigError: The cause is not a short text.
        NotExclusive: The store cannot fence and the user did not set ``single_writer``.
        StoreError: The store failed.
    """
    if not store.exclusive and not single_writer:
        raise NotExclusive(
            f"{store.url} has no exclusive create, so a stale process cannot be fenced; if no "
            "other job writes there, pass --single-writer",
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
            # A rival has just claimed every number between `number` and a later candidate.
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
    raise Fenced(
        f"{_ATTEMPTS_MAX} other generations were claimed at {store.url} at the same moment"
    )


def _check_writable(record: Generation) -> None:
    """Refuse a record that no reader would accept."""
    try:
        check_record(record.to_json())
    except ValueError as error:
        raise ConfigError(
            f"generation {record.number} cannot be recorded: {error}; a cause is one word"
        ) from error


def create_record(store: Store, key: str, data: bytes) -> None:
    """Store ``data`` only if no object has the key, as exclusively as the store can.

    Crash: the whole object exists, or nothing.

    Raises:
        KeyExists: The key is taken; nothing was changed.
        StoreError: The store failed.
    """
    if store.exclusive:
        store.put_new(key, data)
        return
    try:
        store.stat(key)
    except KeyNotFound:
        store.put(key, data)
        return
    raise KeyExists(f"`{key}` already exists", key=key)


def list_numbers(store: Store) -> list[int]:
    """Return the numbers of all generations in rising order, readable or not.

    Crash: reads only.
    """
    numbers = (parse_generation(entry.key) for entry in store.list(GENERATIONS))
    return sorted(number for number in numbers if number)


def list_marks(store: Store) -> list[int]:
    """Return the numbers of all generations that have committed a checkpoint, in rising order.

    Crash: reads only.
    """
    marks = (parse_committed(entry.key) for entry in store.list(GENERATIONS))
    return sorted(number for number in marks if number)


def mark_committed(store: Store, number: int) -> None:
    """Mark that a generation has committed a checkpoint.

    The mark has no effect while a checkpoint exists. It distinguishes "every manifest was lost",
    which must not restart training silently, from "nothing was ever committed".

    Crash: without the mark, the committed checkpoint is equally safe.

    Raises:
        StoreError: The store failed; the commit stands.
    """
    document = {"format": _MARK_FORMAT, "version": _VERSION, "number": number}
    store.put(committed_key(number), seal(document))


def check_mark(store: Store, number: int) -> None:
    """Verify the content of a generation's mark; resume checks only that the mark exists.

    Crash: reads only.

    Raises:
        IntegrityError: The mark is damaged.
        KeyNotFound: There is no mark.
    """
    key = committed_key(number)
    fields = fetch(store, key, lambda data: unseal(data, key), RECORD_BYTES_MAX)
    if (fields.get("format"), fields.get("number")) != (_MARK_FORMAT, number):
        raise IntegrityError(f"`{key}` is not the mark of generation {number}", key=key)


def read_generation(store: Store, number: int) -> Generation:
    """Read and verify one generation record.

    Crash: reads only.

    Raises:
        IntegrityError: The record is damaged.
        KeyNotFound: There is no record.
    """
    key = generation_key(number)
    return _decode(_read_fields(store, key), key, number)


def _read_fields(store: Store, key: str) -> dict[str, Any]:
    fields = fetch(store, key, lambda data: unseal(data, key), RECORD_BYTES_MAX)
    if fields.get("format") != _FORMAT or fields.get("version") != _VERSION:
        raise IntegrityError(f"`{key}`: this release cannot read the record", key=key)
    return fields


def _decode(fields: Mapping[str, Any], key: str, number: int) -> Generation:
    try:
        record = Generation.from_json(fields)
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(
            f"`{key}`: the record contradicts itself ({error})", key=key
        ) from error
    if record.number != number:
        raise IntegrityError(f"`{key}` is the record of generation {record.number}", key=key)
    if record.parent and record.parent.generation >= number:
        raise IntegrityError(f"`{key}` names a parent that is newer than itself", key=key)
    return record


def read_generations(store: Store) -> list[Generation]:
    """Return all readable generation records in rising order.

    Crash: reads only.
    """
    records = []
    for number in list_numbers(store):
        try:
            records.append(read_generation(store, number))
        except (IntegrityError, KeyNotFound):
            continue
    return records


def check_fence(store: Store, generation: int, token: str = "") -> None:
    """Refuse a process whose claim is not the newest claim of the repository.

    After a restore of the repository from a backup, a second claim gets the same number. Only the
    token distinguishes the two claims. A damaged record cannot be compared, so it fences no run.

    Crash: reads only.

    Args:
        store: Repository.
        generation: Number of the generation that writes.
        token: Token of its claim; empty compares the number alone.

    Raises:
        Fenced: A newer generation began, or the record belongs to another claim or is missing.
        StoreError: The store failed.
    """
    newest = max(list_numbers(store), default=generation)
    if newest > generation:
        raise Fenced(
            f"generation {newest} of this run started while generation {generation} was still "
            f"running at {store.url}: this process has to stop",
            hint=f"resilient ckpt reflog {shell_quote(store.url)}",
        )
    if token:
        _require_own_record(store, generation, token)


def newest_claim(store: Store) -> tuple[int, str]:
    """Return the newest claim, for :func:`check_fence` of a command that claims nothing.

    Crash: reads only.

    Returns:
        Number and token; 0 without a claim, no token if the record cannot be read.

    Raises:
        StoreError: The store failed, so the newest claim is unknown.
    """
    number = max(list_numbers(store), default=0)
    try:
        return number, read_generation(store, number).token if number else ""
    except (IntegrityError, KeyNotFound):
        return number, ""


def _require_own_record(store: Store, generation: int, token: str) -> None:
    """Refuse unless the record of a generation holds this token."""
    key = generation_key(generation)
    try:
        fields = _read_fields(store, key)
        if fields.get("token") == token:
            return
        _decode(fields, key, generation)
        problem = "belongs to another process"
    except IntegrityError:
        return
    except KeyNotFound:
        problem = "was deleted"
    raise Fenced(
        f"the record of generation {generation} at {store.url} {problem}: the repository was "
        "restored or replaced while this process ran. This process changed no committed file and "
        "has to stop",
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
