"""Signature of a checkpoint's manifest (HMAC): proof that a holder of the key wrote the checkpoint.

The manifest is the checkpoint's table of contents. An HMAC-SHA-256 (RFC 2104) covers the manifest's
root, which is the SHA-256 of its content. The HMAC also covers the SHA-256 of every file, because
the manifest's file digests detect damage but not forgery. The signature is in its own JSON
document, because a manifest cannot contain a value computed from its own root.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError, IntegrityError, SignatureRefused
from resilient.format.document import any_object, canonical, number, object_with, seal, text, unseal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.format.keys import CheckpointId

FORMAT = "resilient-signature"
VERSION = 1
SECRET_BYTES_MIN = 16
_ALGORITHM = "hmac-sha256"
# The signed bytes begin with their purpose, so that no other use of the key has the same bytes.
_SIGNED = b"resilient manifest root\n"
_NAMED = b"resilient key id\n"
_KEY_ID_LENGTH = 16
_FIELDS = object_with(
    checkpoint=text, manifest=text, algorithm=text, key_id=text, mac=text, files=any_object
)


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A secret that signs and verifies; never shown, stored or logged.

    Attributes:
        secret: At least 16 bytes; 32 random bytes are better.

    Raises:
        ConfigError: The secret is shorter.
    """

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) < SECRET_BYTES_MIN:
            raise ConfigError(
                f"the signing key has {len(self.secret)} bytes, and keys below {SECRET_BYTES_MIN} "
                "can be guessed",
                hint="openssl rand -hex 32 > signing.key",
            )

    @property
    def key_id(self) -> str:
        """Fingerprint that distinguishes keys and reveals nothing about the secret."""
        return hmac.new(self.secret, _NAMED, hashlib.sha256).hexdigest()[:_KEY_ID_LENGTH]

    def mac(self, root: str, files: Mapping[str, str]) -> str:
        """Return the signature of a manifest's root and its files' SHA-256, in hex."""
        signed = _SIGNED + canonical({"manifest": root, "files": dict(files)})
        return hmac.new(self.secret, signed, hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True)
class SigningPolicy:
    """Signature policy of a run.

    Attributes:
        key: Key that signs every save and verifies; None to sign nothing.
        is_required: Whether only checkpoints signed with this key are read.

    Raises:
        ConfigError: A signature is required but there is no key to verify it.
    """

    key: SigningKey | None = None
    is_required: bool = False

    def __post_init__(self) -> None:
        if self.is_required and self.key is None:
            raise ConfigError(
                "a signature is required, but there is no key to check it with",
                hint="export RESILIENT_SIGNING_KEY_FILE=signing.key",
            )

    @staticmethod
    def of_secret(secret: str, *, is_required: bool = False) -> SigningPolicy:
        """Return the policy of a secret text; an empty text means no key."""
        key = SigningKey(secret.encode("utf-8", "surrogateescape")) if secret else None
        return SigningPolicy(key, is_required)


UNSIGNED = SigningPolicy()
"""Nothing is signed, and no signature is required."""


def encode_signature(
    key: SigningKey, checkpoint: CheckpointId, root: str, files: Mapping[str, str]
) -> bytes:
    """Return the document that signs the manifest with this root, and files by their SHA-256."""
    return seal(
        {
            "format": FORMAT,
            "version": VERSION,
            "checkpoint": checkpoint.folder,
            "manifest": root,
            "algorithm": _ALGORITHM,
            "key_id": key.key_id,
            "files": dict(files),
            "mac": key.mac(root, files),
        }
    )


def decode_signature(data: bytes, name: str, root: str) -> dict[str, Any]:
    """Parse the signature of the manifest with this root, without verifying it by key.

    Raises:
        IntegrityError: The signature is damaged, belongs to another manifest, or has an unknown
            version.
    """
    fields = unseal(data, name)
    expected = {"format": FORMAT, "version": VERSION, "algorithm": _ALGORITHM, "manifest": root}
    try:
        _FIELDS(fields, "signature")
        number(fields["version"], "version")
    except (KeyError, ValueError) as error:
        raise IntegrityError(f"`{name}` is not a signature: {error}", key=name) from error
    for field_name, value in expected.items():
        if fields.get(field_name) != value:
            raise IntegrityError(f"`{name}` belongs to another {field_name}", key=name)
    return fields


def check_mac(fields: Mapping[str, Any], key: SigningKey) -> None:
    """Verify a signature with the key, in constant time.

    Raises:
        SignatureRefused: Another key made it, or a writer without this key made it.
    """
    if not hmac.compare_digest(str(fields["key_id"]).encode(), key.key_id.encode()):
        raise SignatureRefused(
            f"it was signed with another key ({fields['key_id']}; this one is {key.key_id})"
        )
    expected = key.mac(fields["manifest"], fields["files"])
    if not hmac.compare_digest(str(fields["mac"]).encode(), expected.encode()):
        raise SignatureRefused(
            f"its signature does not match: its writer did not have the key {key.key_id}"
        )
