"""Signatures of checkpoints.

The signature is put before the manifest: a committed checkpoint of a run with a key is a signed
one, whenever the writer dies. Its name holds the beginning of the manifest's root, so a second
try at the same step cannot take the signature of the first away.
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
    """What a commit is signed with.

    Attributes:
        key: signs.
        files: SHA-256 in hex of every file, by name.
    """

    key: SigningKey
    files: Mapping[str, str]


def read_signing(environ: Mapping[str, str], *, require_signature: bool = False) -> SigningPolicy:
    """Return the key of the environment, and whether a signature is required.

    Args:
        environ: the environment.
        require_signature: Requirement of an option; ``RESILIENT_REQUIRE_SIGNATURE`` adds its own.

    Raises:
        ConfigError: a variable has a value that is not accepted, or the key is missing.
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
    """Return the SHA-256 in hex of every file that a checkpoint needs, by name, each proved.

    Crash: reads only.

    Raises:
        IntegrityError: a file is damaged.
        KeyNotFound: a file is missing.
        StoreError: the store failed.
    """
    needed = manifest.needed
    return {
        entry.name: fetch(
            store,
            manifest.key(entry.name),
            lambda data, entry=entry: _proved_digest(manifest, entry, data),  # type: ignore[misc]
            entry.size_bytes,
        )
        for entry in manifest.files
        if entry.name in needed
    }


def _proved_digest(manifest: Manifest, entry: FileEntry, data: bytes) -> str:
    if digest_file(data) != entry.proof:
        key = manifest.key(entry.name)
        raise IntegrityError(f"`{key}`: content is not what was committed", key=key)
    return hashlib.sha256(data).hexdigest()


def put_signature(store: Store, checkpoint: CheckpointId, root: str, signature: Signature) -> None:
    """Store the signature of the manifest with this root.

    Crash: the signature is there, whole, or not; without the manifest it means nothing.

    Args:
        store: the repository.
        checkpoint: which one.
        root: of its manifest.
        signature: the key, and what it signs besides.

    Raises:
        StoreError: the store failed.
    """
    document = encode_signature(signature.key, checkpoint, root, signature.files)
    store.put(checkpoint.key(signature_name(root)), document)


def check_signature(
    store: Store, manifest: Manifest, signing: SigningPolicy
) -> Mapping[str, str] | None:
    """Refuse a checkpoint that the key has not signed, if a signature is required.

    Crash: reads only.

    Args:
        store: the repository.
        manifest: as it was read; its root is proved.
        signing: what is asked for.

    Returns:
        SHA-256 by file name as signed, for ``check_contents``; None if nothing is required.

    Raises:
        SignatureRefused: it is not signed, with another key, or its signature does not fit.
        StoreError: the store failed.
    """
    if not signing.is_required or signing.key is None:
        return None
    checkpoint = manifest.checkpoint
    way_out = f"if you trust it: resilient ckpt sign {checkpoint} {store.url}"
    key = checkpoint.key(signature_name(manifest.root))
    try:
        fields = fetch(
            store, key, lambda data: decode_signature(data, key, manifest.root), DOCUMENT_BYTES_MAX
        )
        check_mac(fields, signing.key)
    except KeyNotFound as error:
        raise SignatureRefused(
            f"{checkpoint} is not signed, and a signature is required; {way_out}", key=key
        ) from error
    except IntegrityError as error:
        raise SignatureRefused(f"{checkpoint}: {error.message}; {way_out}", key=key) from error
    files: Mapping[str, str] = fields["files"]
    return files


def check_contents(
    manifest: Manifest, stated: Mapping[str, str], contents: Mapping[str, Content]
) -> None:
    """Hold whole files against what was signed of them.

    Args:
        manifest: whose files.
        stated: what ``check_signature`` returned.
        contents: whole content by file name.

    Raises:
        SignatureRefused: a file is not what was signed, or nothing was signed of it.
    """
    for name, content in contents.items():
        digest = hashlib.sha256()
        for part in content.parts if isinstance(content, PartialFile) else (content,):
            digest.update(part)
        if digest.hexdigest() != stated.get(name):
            key = manifest.key(name)
            raise SignatureRefused(
                f"`{key}` is not the file that was signed, though its digest in the manifest fits",
                key=key,
            )


def signature_problem(store: Store, manifest: Manifest) -> str:
    """Return what is wrong with the signature that lies beside a manifest; empty if there is none.

    No key is needed: this finds damage, not forgery.

    Crash: reads only.

    Raises:
        StoreError: the store failed.
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
