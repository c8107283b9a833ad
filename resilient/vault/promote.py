"""From the near tier to the durable one: files first, each proved, the manifest last.

The manifest is the same in both, to the byte. It is put by an exclusive create after a look at
the fence, so a checkpoint comes to be in the durable tier exactly as one that was saved there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.errors import IntegrityError, KeyNotFound
from resilient.format.digest import digest_file
from resilient.format.document import DOCUMENT_BYTES_MAX
from resilient.format.manifest import decode
from resilient.format.names import origin_of, signature_name
from resilient.vault.commit import copy_manifest, put_manifest
from resilient.vault.damage import missing_is_damage
from resilient.vault.fetch import fetch
from resilient.vault.generations import check_fence

if TYPE_CHECKING:
    from resilient.format.manifest import FileEntry, Manifest
    from resilient.format.names import CheckpointId
    from resilient.storage.store import Store
    from resilient.vault.tiers import TieredStore


def is_committed(store: Store, checkpoint: CheckpointId) -> bool:
    """Say whether a checkpoint has a manifest in a repository.

    Crash: reads only.

    Raises:
        StoreError: the store failed, which says neither.
    """
    return _size_of(store, checkpoint.manifest_key) >= 0


def promote(tiers: TieredStore, checkpoint: CheckpointId, mine: int) -> int:
    """Copy a checkpoint from the near tier to the durable one, and what it refers to.

    One file at a time is in memory. A checkpoint that is durable already is left as it is.

    Crash: files may be there; without a manifest the checkpoint is not in the durable tier, and
    the near one is untouched.

    Args:
        tiers: both.
        checkpoint: committed in the near tier.
        mine: number of the life that promotes.

    Returns:
        Bytes that were put.

    Raises:
        Fenced: a newer life began; no manifest was put.
        IntegrityError: the near copy is damaged; no manifest was put.
        KeyNotFound: it is not in the near tier.
        StoreError: a tier failed; the manifest may be there, and if so it is whole.
    """
    if is_committed(tiers.durable, checkpoint):
        return 0
    key = checkpoint.manifest_key
    manifest, data = fetch(
        tiers.near, key, lambda data: (decode(data, key), data), DOCUMENT_BYTES_MAX
    )
    put_bytes = sum(_carry(tiers, manifest, entry) for entry in manifest.files)
    _carry_signature(tiers, manifest)
    check_fence(tiers.durable, mine)
    put_manifest(tiers.durable, key, data)
    # A prune that looked before the manifest came may have taken what only this one needs.
    for entry in manifest.files:
        put_bytes += _carry(tiers, manifest, entry) if origin_of(entry.name) else 0
    if manifest.parity:
        copy_manifest(tiers.durable, checkpoint)
    return put_bytes + len(data)


def _carry(tiers: TieredStore, manifest: Manifest, entry: FileEntry) -> int:
    """Put one file unless it is there; return how many bytes that took."""
    key = manifest.key(entry.name)
    if _size_of(tiers.durable, key) == entry.size_bytes:
        return 0

    def proved(data: bytes) -> bytes:
        if digest_file(data) != entry.proof:
            raise IntegrityError(f"`{key}` in the near tier is not what was saved", key=key)
        return data

    with missing_is_damage(tiers.near, manifest, key):
        data = fetch(tiers.near, key, proved, entry.size_bytes)
    tiers.durable.put(key, data)
    return entry.size_bytes


def _carry_signature(tiers: TieredStore, manifest: Manifest) -> None:
    key = manifest.checkpoint.key(signature_name(manifest.root))
    try:
        tiers.durable.put(key, tiers.near.get(key))
    except KeyNotFound:
        return


def _size_of(store: Store, key: str) -> int:
    """Return an object's bytes, -1 if there is none."""
    try:
        return store.stat(key).size_bytes
    except KeyNotFound:
        return -1
