"""A repository's store: can it do what commits need, and how fast is it?

What is written lies under a name of its own, which nothing reads, and is deleted again.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from resilient.errors import KeyExists, NotExclusive, StoreError
from resilient.storage.space import free_bytes
from resilient.vault.registry.catalog import committed
from resilient_cli.doctor.check import Check

if TYPE_CHECKING:
    from collections.abc import Callable

    from resilient.clock import Clock
    from resilient.storage.store import Store

_SMALL_BYTES, _LARGE_BYTES = 1 << 10, 8 << 20
_ROUNDS = 5
_SLOW_SECONDS = 1.0
_MIB = 1 << 20


@dataclass(slots=True)
class Found:
    """What was found of a store.

    Attributes:
        checks: the answers.
        bytes_per_second: of a large object; 0 if it could not be put.
        checkpoint_bytes: of the newest checkpoint, 0 before the first.
    """

    checks: list[Check] = field(default_factory=list)
    bytes_per_second: float = 0.0
    checkpoint_bytes: int = 0

    @property
    def save_seconds(self) -> float | None:
        """What a save of the newest checkpoint's size would take; None if nobody can tell."""
        if not self.bytes_per_second or not self.checkpoint_bytes:
            return None
        return self.checkpoint_bytes / self.bytes_per_second


def examine(store: Store, clock: Clock) -> Found:
    """Return what a store can do; an error of the store is an answer, and not raised."""
    found, prefix = Found(), f"doctor-{secrets.token_hex(8)}"
    try:
        found.checks.append(_check_exclusive(store, f"{prefix}/new"))
        found.checks.append(_check_atomic(store, f"{prefix}/put"))
        found.checks.append(_check_latency(store, clock, f"{prefix}/small"))
        found.checks.append(_check_throughput(store, clock, f"{prefix}/large", found))
        found.checks.append(_check_space(store, found))
    except (StoreError, OSError) as error:
        hint = getattr(error, "hint", "")
        found.checks.append(Check("storage", is_ok=False, found=str(error), hint=hint))
    finally:
        for name in ("new", "put", "small", "large"):
            with suppress(StoreError, OSError):
                store.delete(f"{prefix}/{name}")
    return found


def _check_exclusive(store: Store, key: str) -> Check:
    try:
        store.put_new(key, b"first")
        store.put_new(key, b"second")
    except KeyExists:
        is_ok = store.get(key) == b"first"
    except NotExclusive as error:
        found, hint = error.message, "resilient train --single-writer"
        return Check("conditional write", is_ok=False, found=found, hint=hint)
    else:
        is_ok = False
    found = "of two writers one wins" if is_ok else "a second writer replaced what the first wrote"
    return Check("conditional write", is_ok, found, "" if is_ok else "resilient doctor --repo URL")


def _check_atomic(store: Store, key: str) -> Check:
    """Replace an object and read it; a half of it would be neither."""
    for data in (b"a" * _SMALL_BYTES, b"b" * (2 * _SMALL_BYTES)):
        store.put(key, data)
        if store.get(key) != data or store.stat(key).size_bytes != len(data):
            return Check("atomic put", is_ok=False, found="an object is not what was put")
    listed = [one.key for one in store.list(key.partition("/")[0])]
    is_ok = key in listed
    found = "whole objects, listed at once" if is_ok else "a listing lacks what was put"
    return Check("atomic put", is_ok, found)


def _check_latency(store: Store, clock: Clock, key: str) -> Check:
    took = sorted(
        _timed(clock, lambda: store.put(key, os.urandom(_SMALL_BYTES))) for _ in range(_ROUNDS)
    )
    found = (
        f"{took[len(took) // 2] * 1000:.1f} ms for a small object, {took[-1] * 1000:.1f} at most"
    )
    is_ok = took[-1] < _SLOW_SECONDS
    found += "" if is_ok else ", and each commit takes several such requests"
    return Check("latency", is_ok, found, "" if is_ok else "resilient help storage")


def _check_throughput(store: Store, clock: Clock, key: str, found: Found) -> Check:
    data = os.urandom(_LARGE_BYTES)
    took_seconds = _timed(clock, lambda: store.put(key, data))
    found.bytes_per_second = len(data) / max(took_seconds, 1e-9)
    text = f"{found.bytes_per_second / _MIB:.0f} MiB/s for one object of {_LARGE_BYTES // _MIB} MiB"
    return Check("throughput", is_ok=True, found=text)


def _check_space(store: Store, found: Found) -> Check:
    checkpoints = committed(store)
    if checkpoints:
        folder = checkpoints[0].folder
        found.checkpoint_bytes = sum(one.size_bytes for one in store.list(folder))
    free = free_bytes(store)
    if free is None:
        return Check("space", is_ok=True, found="the store does not say how much is left")
    # A rotation deletes the old one after the new one is there.
    is_ok = free >= 2 * found.checkpoint_bytes
    text = (
        f"{free // _MIB} MiB left, the newest checkpoint has {found.checkpoint_bytes // _MIB} MiB"
    )
    return Check("space", is_ok, text, "" if is_ok else "resilient ckpt prune --dry-run")


def _timed(clock: Clock, work: Callable[[], object]) -> float:
    began_seconds = clock.monotonic_seconds()
    work()
    return clock.monotonic_seconds() - began_seconds
