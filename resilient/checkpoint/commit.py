"""Commit of a checkpoint: check and merge the file lists of all ranks, then create the manifest.

The file list of a rank is its receipt. The manifest is the table of contents of the checkpoint. The
commit creates the manifest only if no manifest exists (exclusive create).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from resilient.checkpoint.generations import check_fence
from resilient.checkpoint.signing import put_signature
from resilient.checkpoint.verified_read import fetch
from resilient.errors import IntegrityError, KeyExists, KeyNotFound, StoreUnavailable
from resilient.format.document import DOCUMENT_BYTES_MAX
from resilient.format.manifest import (
    Receipt,
    decode,
    encode,
    merge_receipt_files,
    merge_receipt_tensors,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.checkpoint.signing import Signature
    from resilient.format.keys import CheckpointId
    from resilient.format.manifest import Manifest
    from resilient.storage.store import Store


def gather_receipts(about: Manifest, receipts: Sequence[Receipt]) -> Manifest:
    """Merge the receipts of all ranks into one manifest.

    Args:
        about: Manifest with the run's own content and no files.
        receipts: One receipt per rank.

    Raises:
        IntegrityError: Ranks disagree on a tensor or a file, or left holes in a tensor.
    """
    return replace(
        about,
        files=merge_receipt_files(receipts),
        tensors=merge_receipt_tensors(receipts),
        parts=tuple(part for receipt in receipts for part in receipt.parts),
        # Ranks may reference files of one parity group.
        parity=tuple(dict.fromkeys(group for receipt in receipts for group in receipt.parity)),
    )


def commit(
    store: Store, manifest: Manifest, signature: Signature | None = None, token: str = ""
) -> None:
    """Store the signature, then the manifest; with the manifest the checkpoint exists.

    Crash: before the put the checkpoint does not exist and older ones are untouched; after the put
        it exists. A store writes the whole object or nothing.

    Args:
        store: Repository.
        manifest: Manifest of everything that the ranks stored.
        signature: Signing key and digests; None leaves the checkpoint unsigned.
        token: Token of the claim that commits; empty compares the number alone.

    Raises:
        Fenced: Another claim replaced this claim; nothing was committed.
        IntegrityError: The manifest contradicts itself, or exceeds a bound.
        KeyExists: This step of this generation was already committed with other content.
        StoreError: The store failed; the manifest may be there, and if so it is whole.
    """
    checkpoint = manifest.checkpoint
    check_fence(store, checkpoint.generation, token)
    data = encode(manifest)
    # A manifest that no reader would accept must not count as saved.
    root = decode(data, checkpoint.manifest_key).root
    if signature is not None:
        put_signature(store, checkpoint, root, signature)
    put_manifest(store, checkpoint.manifest_key, data)


def require_files(store: Store, manifest: Manifest) -> None:
    """Check that all files of a checkpoint are still stored with their length.

    Crash: reads only.

    Raises:
        IntegrityError: Another process deleted or replaced a file meanwhile.
        StoreError: The store failed.
    """
    checkpoint = manifest.checkpoint
    size_by_key = {info.key: info.size_bytes for info in store.list(f"{checkpoint.folder}/")}
    for file in manifest.files:
        key = checkpoint.key(file.name)
        if "/" not in file.name and size_by_key.get(key) != file.size_bytes:
            raise IntegrityError(f"`{key}` was written and no longer exists", key=key)


def put_manifest(store: Store, key: str, data: bytes) -> None:
    """Store a manifest if there is none, as exclusively as the store can.

    Crash: as in ``commit``.

    Raises:
        KeyExists: The store has another manifest under this key.
        StoreError: The store failed; the manifest may be there, and if so it is whole.
    """
    try:
        if store.exclusive:
            store.put_new(key, data)
        else:
            _put_if_absent(store, key, data)
    except (StoreUnavailable, KeyExists):
        # The response may have been lost after the write, or another process stored the same bytes.
        # Only the store has the answer.
        if not _is_there(store, key, data):
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


def copy_manifest(store: Store, checkpoint: CheckpointId) -> None:
    """Store a second copy of a committed manifest, from which the first can be repaired.

    Crash: the copy exists or not; readers never conclude from the copy that the checkpoint exists.

    Raises:
        KeyNotFound: The checkpoint is not committed.
        IntegrityError: Its manifest is damaged; nothing was copied.
        StoreError: The copy may be missing; the checkpoint is committed anyway.
    """
    key = checkpoint.manifest_key

    def require_valid(data: bytes) -> bytes:
        decode(data, key)
        return data

    store.put(checkpoint.copy_key, fetch(store, key, require_valid, DOCUMENT_BYTES_MAX))
