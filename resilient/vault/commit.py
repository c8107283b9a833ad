"""Receipts to Manifest, put last, by the coordinator: here a checkpoint begins to exist."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from resilient.errors import KeyExists, KeyNotFound, StoreUnavailable
from resilient.format.manifest import Receipt, decode, encode, merge_tensors
from resilient.vault.generations import check_fence
from resilient.vault.signing import put_signature

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.format.manifest import Manifest
    from resilient.storage.store import Store
    from resilient.vault.signing import Signature


def gather_receipts(about: Manifest, receipts: Sequence[Receipt]) -> Manifest:
    """Return the manifest of everything that the ranks stored.

    Args:
        about: a manifest with what the run says of itself and no files.
        receipts: one per rank.

    Raises:
        IntegrityError: ranks disagree on a tensor, or left holes in one.
    """
    return replace(
        about,
        files=tuple(file for receipt in receipts for file in receipt.files),
        tensors=merge_tensors(receipts),
        parts=tuple(part for receipt in receipts for part in receipt.parts),
    )


def commit(store: Store, manifest: Manifest, signature: Signature | None = None) -> None:
    """Put the manifest; from here on the checkpoint exists. A signature comes before it.

    Crash: before the put the checkpoint does not exist and older ones are untouched; after it,
    it does. A store puts all of an object or none.

    Args:
        store: the repository.
        manifest: of everything that the ranks stored.
        signature: what to sign it with; None leaves it unsigned.

    Raises:
        Fenced: a newer life began; nothing was committed.
        IntegrityError: the manifest contradicts itself, or is out of bounds.
        KeyExists: this step of this life was committed before.
        StoreError: the store failed; the manifest may be there, and if so it is whole.
    """
    checkpoint = manifest.checkpoint
    check_fence(store, checkpoint.generation)
    data = encode(manifest)
    # What no reader would take must not count as saved.
    root = decode(data, checkpoint.manifest_key).root
    if signature is not None:
        put_signature(store, checkpoint, root, signature)
    try:
        if store.exclusive:
            store.put_new(checkpoint.manifest_key, data)
        else:
            _put_if_absent(store, checkpoint.manifest_key, data)
    except StoreUnavailable:
        # The answer may have been lost after the effect: only the store knows.
        if not _is_there(store, checkpoint.manifest_key, data):
            raise


def _put_if_absent(store: Store, key: str, data: bytes) -> None:
    try:
        store.stat(key)
    except KeyNotFound:
        store.put(key, data)
        return
    raise KeyExists(f"`{key}` was committed before", key=key)


def _is_there(store: Store, key: str, data: bytes) -> bool:
    try:
        return store.get(key) == data
    except KeyNotFound:
        return False
