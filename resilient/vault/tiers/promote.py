"""From the near tier to the durable one: files first, each proved, the manifest last.

The manifest is the same in both, to the byte. It is put by an exclusive create after a look at
the fence, so a checkpoint comes to be in the durable tier exactly as one that was saved there.
Until then its files look like leftovers if a newer one is committed there, and a sweep may take
them: so all of them are looked at once more when the manifest is there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from resilient.errors import IntegrityError, KeyNotFound
from resilient.format.digest import digest_file
from resilient.format.document import DOCUMENT_BYTES_MAX
from resilient.format.manifest import decode
from resilient.format.names import signature_name
from resilient.vault.access.fetch import fetch
from resilient.vault.registry.commit import copy_manifest, put_manifest
from resilient.vault.registry.generations import check_fence
from resilient.world.agreement import Failure, agree, attempt
from resilient.world.comms import Comms
from resilient.world.memory import MemoryBoard
from resilient.world.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from resilient.format.manifest import FileEntry, Manifest
    from resilient.format.names import CheckpointId
    from resilient.storage.store import Store
    from resilient.vault.tiers.tiers import TieredStore


def is_committed(store: Store, checkpoint: CheckpointId) -> bool:
    """Say whether a checkpoint has a manifest in a repository.

    Crash: reads only.

    Raises:
        StoreError: the store failed, which says neither.
    """
    return _size_of(store, checkpoint.manifest_key) >= 0


@dataclass(frozen=True, slots=True)
class Together:
    """The leaders of all places, as one of them meets the others: who carries a checkpoint.

    Attributes:
        comms: the leaders; the coordinator is the first.
        topic: names this promotion, the same for all and never used before.
        within_seconds: how long they wait for one that brings no further file meanwhile.
    """

    comms: Comms = field(default_factory=lambda: Comms(MemoryBoard(), World(), "alone"))
    topic: str = "promote"
    within_seconds: float = 600.0


@dataclass(frozen=True, slots=True)
class _Cargo:
    """What one place has of a checkpoint, when that is in the durable tier.

    Attributes:
        manifest: of all places.
        data: its bytes.
        names: which files lie in this near tier.
        put_bytes: what it took to bring those that were not there.
        is_committed: whether the durable tier had the manifest before.
    """

    manifest: Manifest
    data: bytes
    names: list[str]
    put_bytes: int
    is_committed: bool


def promote(
    tiers: TieredStore,
    checkpoint: CheckpointId,
    mine: int,
    together: Together | None = None,
    token: str = "",
) -> int:
    """Copy a checkpoint from the near tier to the durable one, and what it refers to.

    Each place brings the files that lie there; then the coordinator puts the one manifest. One
    file at a time is in memory. Then all look again, and bring back what a sweep took meanwhile.
    To one that is durable already they bring what it lacks, as far as it is near; one that is
    gone is left.

    Collective: the leader of each place, same checkpoint.
    Crash: files may be there; without a manifest the checkpoint is not in the durable tier, and
    the near one is untouched.

    Args:
        tiers: both.
        checkpoint: committed in the near tier.
        mine: number of the life that promotes.
        together: the leaders of all places; this one alone by default.
        token: token of the claim of that life; empty compares the number alone.

    Returns:
        Bytes that were put, by all.

    Raises:
        Fenced: another claim replaced this one; no manifest was put.
        IntegrityError: the near copy is damaged, or a file is nowhere; no manifest was put.
        StoreError: a tier failed; the manifest may be there, and if so it is whole.
    """
    together = together or Together()
    fence = partial(check_fence, tiers.durable, mine, token)
    with together.comms.at_work() as beat:
        cargo: Any = attempt(lambda: _carry_all(tiers, checkpoint, fence, beat))
    shown = cargo
    if not isinstance(cargo, Failure):
        shown = {"names": cargo.names, "put": cargo.put_bytes} if cargo else None

    def rule(shown: list[Any]) -> dict[str, Any]:
        return _put_manifest(tiers, cargo, shown, fence) if cargo else {"put": 0, "is_new": False}

    ruling = _agree(together, "carried", shown, rule)
    put_bytes = int(ruling["put"])
    if ruling["is_new"]:
        # A sweep that looked before the manifest came may have taken any of it for leftovers.
        leads = together.comms.world.is_coordinator
        with together.comms.at_work() as beat:
            again = attempt(lambda: _carry_again(tiers, cargo, fence, beat, signature=leads))
        put_bytes += _agree(together, "again", again, sum)
        if leads and cargo.manifest.parity:
            copy_manifest(tiers.durable, checkpoint)
    return put_bytes


def _agree(together: Together, what: str, shown: Any, rule: Callable[[list[Any]], Any]) -> Any:
    topic = f"{together.topic}/{what}"
    return agree(together.comms, topic, shown, rule, together.within_seconds)


def _carry_all(
    tiers: TieredStore,
    checkpoint: CheckpointId,
    fence: Callable[[], None],
    beat: Callable[[], None],
) -> _Cargo | None:
    """Put what lies in this near tier; None if the checkpoint is gone."""
    key = checkpoint.manifest_key
    was_committed = is_committed(tiers.durable, checkpoint)
    try:
        manifest, data = fetch(
            tiers, key, lambda data: (decode(data, key), data), DOCUMENT_BYTES_MAX
        )
    except KeyNotFound:
        return None
    here = [one for one in manifest.files if _size_of(tiers.near, manifest.key(one.name)) >= 0]
    put_bytes = _carry_each(tiers, manifest, here, fence, beat)
    return _Cargo(manifest, data, [one.name for one in here], put_bytes, was_committed)


def _carry_again(
    tiers: TieredStore,
    cargo: _Cargo | None,
    fence: Callable[[], None],
    beat: Callable[[], None],
    *,
    signature: bool,
) -> int:
    if cargo is None:
        return 0
    if signature:
        fence()
        _carry_signature(tiers, cargo.manifest)
    here = [one for one in cargo.manifest.files if one.name in cargo.names]
    return _carry_each(tiers, cargo.manifest, here, fence, beat)


def _put_manifest(
    tiers: TieredStore, cargo: _Cargo, shown: list[Any], fence: Callable[[], None]
) -> dict[str, Any]:
    """Rule over what all places brought: the manifest is put here, by the coordinator alone."""
    manifest = cargo.manifest
    put_bytes = sum(one["put"] for one in shown if one)
    if cargo.is_committed:
        return {"put": put_bytes, "is_new": False}
    carried = {name for one in shown if one for name in one["names"]}
    for entry in manifest.files:
        key = manifest.key(entry.name)
        if entry.name not in carried and _size_of(tiers.durable, key) != entry.size_bytes:
            raise IntegrityError(f"`{key}` is missing in every near tier", key=key)
    fence()
    _carry_signature(tiers, manifest)
    put_manifest(tiers.durable, manifest.checkpoint.manifest_key, cargo.data)
    return {"put": put_bytes + len(cargo.data), "is_new": True}


def _carry_each(
    tiers: TieredStore,
    manifest: Manifest,
    entries: Iterable[FileEntry],
    fence: Callable[[], None],
    beat: Callable[[], None],
) -> int:
    """Put files one after the other; return how many bytes that took."""
    put_bytes = 0
    for entry in entries:
        put_bytes += _carry(tiers, manifest, entry, fence)
        beat()
    return put_bytes


def _carry(
    tiers: TieredStore, manifest: Manifest, entry: FileEntry, fence: Callable[[], None]
) -> int:
    """Put one file unless it is there; return how many bytes that took."""
    key = manifest.key(entry.name)
    if _size_of(tiers.durable, key) == entry.size_bytes:
        return 0

    def proved(data: bytes) -> bytes:
        if digest_file(data) != entry.proof:
            raise IntegrityError(f"`{key}` in the near tier is not what was saved", key=key)
        return data

    data = fetch(tiers.near, key, proved, entry.size_bytes)
    fence()
    tiers.durable.put(key, data)
    return entry.size_bytes


def _carry_signature(tiers: TieredStore, manifest: Manifest) -> None:
    key = manifest.checkpoint.key(signature_name(manifest.root))
    try:
        tiers.durable.put(key, tiers.get(key))
    except KeyNotFound:
        return


def _size_of(store: Store, key: str) -> int:
    """Return an object's bytes, -1 if there is none."""
    try:
        return store.stat(key).size_bytes
    except KeyNotFound:
        return -1
