"""Stores that hand out only what the key has signed."""

from __future__ import annotations

import pytest

from resilient.checkpoint.catalog import read_manifest
from resilient.checkpoint.restore.read import read
from resilient.checkpoint.signed_store import SignedStore, reading_signed, require_signed
from resilient.checkpoint.signing import Signature, digests_stored, put_signature
from resilient.errors import SignatureRefused
from resilient.format.keys import CheckpointId
from resilient.storage.local import LocalStore
from tests.helpers.cli_repositories import write_usual_run
from tests.helpers.tiny import SIGNING

CHECKPOINT = CheckpointId(2, 35)


@pytest.fixture
def store(tmp_path):
    write_usual_run(tmp_path)
    return LocalStore(tmp_path)


def sign(store, **forged):
    manifest = read_manifest(store, CHECKPOINT)
    files = {**digests_stored(store, manifest), **forged}
    put_signature(store, CHECKPOINT, manifest.root, Signature(SIGNING.key, files))
    return manifest


def test_signed_store_unsigned_manifest_is_refused(store):
    with pytest.raises(SignatureRefused, match="is not signed"):
        read(SignedStore(store, SIGNING), CHECKPOINT)
    with pytest.raises(SignatureRefused, match="is not signed"):
        require_signed(reading_signed(store, SIGNING), CHECKPOINT)
    require_signed(store, CHECKPOINT)


def test_signed_store_signed_checkpoint_reads_the_same(store):
    sign(store)
    found, plain = read(SignedStore(store, SIGNING), CHECKPOINT), read(store, CHECKPOINT)
    assert {name: bytes(one) for name, one in found.files.items()} == {
        name: bytes(one) for name, one in plain.files.items()
    }


def test_signed_store_other_content_is_refused_whole_and_in_ranges(store):
    """A file whose digest in the manifest was made to fit still has another SHA-256."""
    name = "model.r00000.safetensors"
    manifest = sign(store, **{name: "0" * 64})
    signed = SignedStore(store, SIGNING)
    key = manifest.key(name)
    read_manifest(signed, CHECKPOINT)
    with pytest.raises(SignatureRefused, match="is not the signed file"):
        signed.get(key)
    with pytest.raises(SignatureRefused, match="is not the signed file"):
        signed.get_range(key, 3, 4)
    assert store.get_range(key, 3, 4)
