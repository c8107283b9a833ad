"""Signatures of committed checkpoints.

The signature is put before the manifest (table of contents), and a checkpoint is committed only
with its manifest. If a run has a key, each committed checkpoint is therefore signed, even if the
writer dies at any moment. The signature's name contains the beginning of the manifest's digest
(root). So a second save of the same step cannot replace the signature of the first save.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from resilient.checkpoint.verified_read import fetch
from resilient.distributed.launch_env import REQUIRE_SIGNATURE, read_signing_key
from resilient.environment import read_flag
from resilient.errors import IntegrityError, KeyNotFound, SignatureRefused
from resilient.format.digest import digest_file
from resilient.format.document import DOCUMENT_BYTES_MAX
from resilient.format.keys import signature_name
from resilient.format.partial_read import PartialFile
from resilient.format.signature import SigningPolicy, check_mac, decode_signature, encode_signature

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from resilient.format.keys import CheckpointId
    from resilient.format.manifest import FileEntry, Manifest
    from resilient.format.partial_read import Content
    from resilient.format.safetensors_file import FileContent
    from resilient.format.signature import SigningKey
    from resilient.storage.store import Store


@dataclass(frozen=True, slots=True)
class Signature:
    """Signing key of a commit and the digests to sign.

    Attributes:
        key: Signing key.
        files: SHA-256 in hex of every file, by name.
    """

    key: SigningKey
    files: Mapping[str, str]


def read_signing(environ: Mapping[str, str], *, require_signature: bool = False) -> SigningPolicy:
    """Return the key from the environment, and whether a signature is required.

    Args:
        environ: Environment.
        require_signature: Whether an option requires a signature; ``RESILIENT_REQUIRE_SIGNATURE``
            can require it too.

    Raises:
        ConfigError: A variable has a value that is not accepted, or the key is missing.
    """
    is_required = read_flag(environ, REQUIRE_SIGNATURE) or require_signature
    return SigningPolicy.of_secret(read_signing_key(environ), is_required=is_required)


def digests_of(files: Iterable[FileContent]) -> dict[str, str]:
    """Return the SHA-256 in hex of files in host memory, by name."""
    return {file.name: _digest(file) for file in files}


def _digest(file: FileContent) -> str:
    with file.lend() as data:
        return hashlib.sha256(data).hexdigest()


def digests_stored(store: Store, manifest: Manifest) -> dict[str, str]:
    """Return the SHA-256 in hex of every file that a checkpoint needs, by name, after verification.

    Crash: reads only.

    Raises:
        IntegrityError: A file is damaged.
        KeyNotFound: A file is missing.
        StoreError: The store failed.
    """
    needed_names = manifest.needed
    return {
        entry.name: fetch(
            store,
            manifest.key(entry.name),
            lambda data, entry=entry: _proved_digest(manifest, entry, data),  # type: ignore[misc]
            entry.size_bytes,
        )
        for entry in manifest.files
        if entry.name in needed_names
    }


def _proved_digest(manifest: Manifest, entry: FileEntry, data: bytes) -> str:
    if digest_file(data) != entry.proof:
        key = manifest.key(entry.name)
        raise IntegrityError(f"`{key}`: content is not what was committed", key=key)
    return hashlib.sha256(data).hexdigest()


def put_signature(store: Store, checkpoint: CheckpointId, root: str, signature: Signature) -> None:
    """Store the signature of the manifest with this root.

    Crash: the complete signature exists, or nothing; without the manifest it has no meaning.

    Args:
        store: Repository.
        checkpoint: Checkpoint.
        root: Root of its manifest.
        signature: Key, and digests to sign.

    Raises:
        StoreError: The store failed.
    """
    document = encode_signature(signature.key, checkpoint, root, signature.files)
    store.put(checkpoint.key(signature_name(root)), document)


def check_signature(
    store: Store, manifest: Manifest, signing: SigningPolicy
) -> Mapping[str, str] | None:
    """Refuse a checkpoint that the key has not signed, if a signature is required.

    Crash: reads only.

    Args:
        store: Repository.
        manifest: Manifest whose root was verified.
        signing: Signing policy.

    Returns:
        SHA-256 by file name as signed, for ``check_contents``; None if nothing is required.

    Raises:
        SignatureRefused: The manifest is unsigned, signed with another key, or does not match its
            signature.
        StoreError: The store failed.
    """
    if not signing.is_required or signing.key is None:
        return None
    checkpoint = manifest.checkpoint
    trust_hint = f"if you trust it: resilient ckpt sign {checkpoint} {store.url}"
    key = checkpoint.key(signature_name(manifest.root))
    try:
        fields = fetch(
            store, key, lambda data: decode_signature(data, key, manifest.root), DOCUMENT_BYTES_MAX
        )
        check_mac(fields, signing.key)
    except KeyNotFound as error:
        raise SignatureRefused(
            f"{checkpoint} is not signed, and a signature is required; {trust_hint}", key=key
        ) from error
    except IntegrityError as error:
        raise SignatureRefused(f"{checkpoint}: {error.message}; {trust_hint}", key=key) from error
    files: Mapping[str, str] = fields["files"]
    return files


def check_contents(
    manifest: Manifest, signed_digests: Mapping[str, str], contents: Mapping[str, Content]
) -> None:
    """Compare whole files with their signed digests.

    Args:
        manifest: Manifest of the files.
        signed_digests: Result of ``check_signature``.
        contents: Whole content by file name.

    Raises:
        SignatureRefused: A file differs from what was signed, or was not signed.
    """
    for name, content in contents.items():
        digest = hashlib.sha256()
        for part in content.parts if isinstance(content, PartialFile) else (content,):
            digest.update(part)
        if digest.hexdigest() != signed_digests.get(name):
            key = manifest.key(name)
            raise SignatureRefused(
                f"`{key}` is not the signed file, although its digest in the manifest matches",
                key=key,
            )


def signature_problem(store: Store, manifest: Manifest) -> str:
    """Return the problem of the signature beside a manifest; empty without a problem or signature.

    No key is needed, because this check finds damage, not forgery.

    Crash: reads only.

    Raises:
        StoreError: The store failed.
    """
    key = manifest.checkpoint.key(signature_name(manifest.root))
    try:
        fetch(
            store, key, lambda data: decode_signature(data, key, manifest.root), DOCUMENT_BYTES_MAX
        )
    except KeyNotFound:
        return ""
    except IntegrityError as error:
        return error.message
    return ""
