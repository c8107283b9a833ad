"""Sign a checkpoint as it is committed, and refuse what is not signed where that is asked for.

The signature is put before the manifest: a committed checkpoint of a run with a key is a signed
one, whenever the writer dies. Its name holds the beginning of the manifest's root, so a second
try at the same step cannot take the signature of the first away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.errors import IntegrityError, KeyNotFound, SignatureRefused
from resilient.format.document import RECORD_BYTES_MAX
from resilient.format.names import signature_name
from resilient.format.signature import check_mac, decode_signature, encode_signature
from resilient.vault.fetch import fetch

if TYPE_CHECKING:
    from resilient.format.manifest import Manifest
    from resilient.format.names import CheckpointId
    from resilient.format.signature import Signing, SigningKey
    from resilient.storage.store import Store


def put_signature(store: Store, checkpoint: CheckpointId, root: str, key: SigningKey) -> None:
    """Store the signature of the manifest with this root.

    Crash: the signature is there, whole, or not; without the manifest it means nothing.

    Args:
        store: the repository.
        checkpoint: which one.
        root: of its manifest.
        key: signs.

    Raises:
        StoreError: the store failed.
    """
    document = encode_signature(key, checkpoint, root)
    store.put(checkpoint.key(signature_name(root)), document)


def check_signature(store: Store, manifest: Manifest, signing: Signing) -> None:
    """Refuse a checkpoint that the key has not signed, if a signature is required.

    Crash: reads only.

    Args:
        store: the repository.
        manifest: as it was read; its root is proved.
        signing: what is asked for.

    Raises:
        SignatureRefused: it is not signed, with another key, or its signature does not fit.
        StoreError: the store failed.
    """
    if not signing.is_required or signing.key is None:
        return
    checkpoint = manifest.checkpoint
    way_out = f"if you trust it: resilient ckpt sign {checkpoint} {store.url}"
    key = checkpoint.key(signature_name(manifest.root))
    try:
        fields = fetch(
            store, key, lambda data: decode_signature(data, key, manifest.root), RECORD_BYTES_MAX
        )
        check_mac(fields, signing.key, manifest.root)
    except KeyNotFound as error:
        raise SignatureRefused(
            f"{checkpoint} is not signed, and a signature is required; {way_out}", key=key
        ) from error
    except IntegrityError as error:
        raise SignatureRefused(f"{checkpoint}: {error.message}; {way_out}", key=key) from error


def signature_problem(store: Store, manifest: Manifest) -> str:
    """Return what is wrong with the signature that lies beside a manifest; empty if there is none.

    No key is needed: this finds damage, not forgery.

    Crash: reads only.

    Raises:
        StoreError: the store failed.
    """
    key = manifest.checkpoint.key(signature_name(manifest.root))
    try:
        fetch(store, key, lambda data: decode_signature(data, key, manifest.root), RECORD_BYTES_MAX)
    except KeyNotFound:
        return ""
    except IntegrityError as error:
        return error.message
    return ""
