"""Store wrapper that returns only checkpoints with a valid signature of the user's key."""

from __future__ import annotations

import hashlib
import threading
from typing import TYPE_CHECKING

from resilient.checkpoint.catalog import read_manifest
from resilient.checkpoint.signing import check_signature
from resilient.errors import IncompatibleCheckpoint, IntegrityError, SignatureRefused
from resilient.format.keys import MANIFEST, split_checkpoint_key
from resilient.format.manifest import decode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from resilient.format.keys import CheckpointId
    from resilient.format.signature import SigningPolicy
    from resilient.storage.store import Data, ObjectInfo, Store

_BLOCK_BYTES = 8 << 20


def reading_signed(store: Store, signing: SigningPolicy) -> Store:
    """Return the store, wrapped to refuse unsigned checkpoints if a signature is required.

    Crash: reads only.
    """
    return SignedStore(store, signing) if signing.is_required else store


def require_signed(store: Store, checkpoint: CheckpointId) -> None:
    """Refuse a checkpoint that the key has not signed, if ``store`` requires a signature.

    Crash: reads only.

    Raises:
        SignatureRefused: The key has not signed it.
        StoreError: The store failed.
    """
    if isinstance(store, SignedStore):
        read_manifest(store, checkpoint)


class SignedStore:
    """Wrapper of a store that refuses manifests and files that the key has not signed.

    A file is read whole before any range of it is returned, because the signature has one
    digest for the whole file. Documents outside of checkpoints pass: tags and records of
    generations are not signed.

    Args:
        inner: Wrapped store.
        signing: Signing policy with the key; it requires a signature.
    """

    def __init__(self, inner: Store, signing: SigningPolicy) -> None:
        self._inner, self._signing = inner, signing
        self._lock = threading.Lock()
        self._digests: dict[str, str] = {}
        self._verified_keys: set[str] = set()
        self.url = inner.url
        self.exclusive = inner.exclusive

    def put(self, key: str, data: Data) -> None:
        """Store an object."""
        self._forget(key)
        self._inner.put(key, data)

    def put_new(self, key: str, data: Data) -> None:
        """Store an object that is not there yet."""
        self._inner.put_new(key, data)

    def get(self, key: str) -> bytes:
        """Return the whole object.

        Raises:
            SignatureRefused: The object is not signed with the key.
        """
        data = self._inner.get(key)
        split = split_checkpoint_key(key)
        if split and split[1] == MANIFEST:
            self._check_manifest(key, data)
        elif key in self._digests:
            self._compare(key, hashlib.sha256(data).hexdigest())
        return data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return a piece of the object.

        Raises:
            SignatureRefused: The object is not signed with the key.
        """
        split = split_checkpoint_key(key)
        if split and split[1] == MANIFEST:
            return self.get(key)[start : start + length]
        if key in self._digests and key not in self._verified_keys:
            self._compare(key, self._digest(key))
        return self._inner.get_range(key, start, length)

    def list(self, prefix: str = "") -> Iterable[ObjectInfo]:
        """Return every object whose key begins with ``prefix``, in the order of keys."""
        return self._inner.list(prefix)

    def delete(self, key: str) -> None:
        """Remove an object."""
        self._forget(key)
        self._inner.delete(key)

    def stat(self, key: str) -> ObjectInfo:
        """Return the object's entry."""
        return self._inner.stat(key)

    def _check_manifest(self, key: str, data: bytes) -> None:
        try:
            manifest = decode(data, key)
        except (IntegrityError, IncompatibleCheckpoint):
            return  # the reader decodes the same bytes, and reports the damage
        signed = check_signature(self._inner, manifest, self._signing) or {}
        with self._lock:
            self._digests |= {manifest.key(name): digest for name, digest in signed.items()}

    def _compare(self, key: str, digest: str) -> None:
        if digest != self._digests[key]:
            raise SignatureRefused(
                f"`{key}` is not the signed file, although its digest in the manifest may match",
                key=key,
            )
        with self._lock:
            self._verified_keys.add(key)

    def _digest(self, key: str) -> str:
        digest, start = hashlib.sha256(), 0
        while block := self._inner.get_range(key, start, _BLOCK_BYTES):
            digest.update(block)
            start += len(block)
        return digest.hexdigest()

    def _forget(self, key: str) -> None:
        with self._lock:
            self._verified_keys.discard(key)
