"""Receipts to Manifest, put last, by the coordinator: here a checkpoint begins to exist."""

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
    """Return the manifest of everything that the ranks stored.

    Args:
        about: a manifest with what the run says of itself and no files.
        receipts: one per rank.

    Raises:
        IntegrityError: ranks disagree on a tensor or a file, or left holes in a tensor.
    """
    return replace(
        about,
        files=merge_receipt_files(receipts),
        tensors=merge_receipt_tensors(receipts),
        parts=tuple(part for receipt in receipts for part in receipt.parts),
        # Ranks may refer to files that are protected together.
        parity=tuple(dict.fromkeys(one for receipt in receipts for one in receipt.parity)),
    )


def commit(
    store: Store, manifest: Manifest, signature: Signature | None = None, token: str = ""
) -> None:
    """Put the manifest; from here on the checkpoint exists. A signature comes before it.

    Crash: before the put the checkpoint does not exist and older ones are untouched; after it,
    it does. A store puts all of an object or none.

    Args:
        store: the repository.
        manifest: of everything that the ranks stored.
        signature: what to sign it with; None leaves it unsigned.
        token: token of the claim that commits; empty compares the number alone.

    Raises:
        Fenced: another claim replaced this one; nothing was committed.
        IntegrityError: the manifest contradicts itself, or is out of bounds.
        KeyExists: this step of this life was committed before, as something else.
        StoreError: the store failed; the manifest may be there, and if so it is whole.
    """
    checkpoint = manifest.checkpoint
    check_fence(store, checkpoint.generation, token)
    data = encode(manifest)
    # What no reader would take must not count as saved.
    root = decode(data, checkpoint.manifest_key).root
    if signature is not None:
        put_signature(store, checkpoint, root, signature)
    put_manifest(store, checkpoint.manifest_key, data)


def require_files(store: Store, manifest: Manifest) -> None:
    """See that what was written for a checkpoint is still there, at its length.

    Crash: reads only.

    Raises:
        IntegrityError: another process deleted or replaced a file meanwhile.
        StoreError: the store failed.
    """
    checkpoint = manifest.checkpoint
    there = {one.key: one.size_bytes for one in store.list(f"{checkpoint.folder}/")}
    for file in manifest.files:
        key = checkpoint.key(file.name)
        if "/" not in file.name and there.get(key) != file.size_bytes:
            raise IntegrityError(f"`{key}` was written and is not there any more", key=key)


def put_manifest(store: Store, key: str, data: bytes) -> None:
    """Put a manifest's bytes if there are none, as exclusively as the store can.

    Crash: as in ``commit``.

    Raises:
        KeyExists: another manifest is there.
        StoreError: the store failed; the manifest may be there, and if so it is whole.
    """
    try:
        if store.exclusive:
            store.put_new(key, data)
        else:
            _put_if_absent(store, key, data)
    except (StoreUnavailable, KeyExists):
        # The answer may have been lost after the effect, or another process put the same: only
        # the store knows.
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
    """Put the bytes of a committed manifest once more, for a repair of the first.

    Crash: the copy is there or not; nothing ever asks it whether the checkpoint exists.

    Raises:
        KeyNotFound: the checkpoint is not committed.
        IntegrityError: its manifest is damaged; nothing was copied.
        StoreError: the copy may be missing; the checkpoint is committed all the same.
    """
    key = checkpoint.manifest_key

    def proved(data: bytes) -> bytes:
        decode(data, key)
        return data

    store.put(checkpoint.copy_key, fetch(store, key, proved, DOCUMENT_BYTES_MAX))
