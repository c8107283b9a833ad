"""Both clients of S3 over https: whom they trust, and what they say when they do not."""

import time

import pytest

from resilient.checkpoint.catalog import committed
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.checkpoint.verify import verify
from resilient.clock import SystemClock
from resilient.engine_factory import open_engine
from resilient.errors import ConfigError, StoreDenied
from resilient.events import Emitter
from resilient.state_dict.snapshot import Part
from resilient.storage.open import open_store
from tests.helpers.manifests import Values
from tests.services.tls import make_certificate

PART = 5 << 20


def options_of(bucket, client, **more):
    return bucket.options(client, bucket.server.tls_endpoint, **more)


@pytest.fixture
def authority(server):
    return str(server.certificate.authority)


@pytest.mark.smoke
def test_a_checkpoint_is_saved_and_verified_under_an_authority_of_ones_own(
    bucket, client, authority
):
    options = options_of(bucket, client, ca_file=authority, part_bytes=PART)
    checkpointer = open_engine(bucket.url, emit=Emitter(SystemClock()), storage_options=options)
    parts = {"model": Part(Values(mark=bytes(range(256)) * (2 * PART // 256 + 1)))}
    checkpointer.resume(parts)
    checkpointer.save(1, parts, CheckpointInfo())
    checkpointer.close()
    store = bucket.open(client, bucket.server.tls_endpoint, ca_file=authority)
    assert [verify(store, one, "deep") for one in committed(store)] == [[]]
    # What was put over https is what is got without.
    assert committed(bucket.open(client)) == committed(store)


def test_an_exclusive_create_and_a_sweep_work_over_https(bucket, client, authority):
    store = bucket.open(client, bucket.server.tls_endpoint, ca_file=authority)
    store.put_new("a", b"x")
    bucket.admin.create_multipart_upload(Bucket=bucket.name, Key="run/left")
    assert store.sweep(lambda _: True, 0, SystemClock()) == ("left",)
    assert bucket.uploads() == []


VERBS = {
    "put": lambda store: store.put("a", b"x"),
    "sweep": lambda store: store.sweep(lambda _: True, 0, SystemClock()),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_certificate_that_nobody_vouches_for_is_refused_at_once_and_says_what_to_do(
    bucket, client, verb, tmp_path
):
    stranger = make_certificate(tmp_path, "somebody else").authority
    for trusted in ({}, {"ca_file": str(stranger)}):
        store = bucket.open(client, bucket.server.tls_endpoint, within_seconds=60, **trusted)
        began = time.monotonic()
        with pytest.raises(StoreDenied) as caught:
            VERBS[verb](store)
        assert time.monotonic() - began < 5
        assert "certificate" in caught.value.message
        assert "ca_file" in caught.value.hint


def test_the_standard_variable_names_whom_to_trust(bucket, client, authority, monkeypatch):
    monkeypatch.setenv("AWS_CA_BUNDLE", authority)
    store = bucket.open(client, bucket.server.tls_endpoint)
    store.put("a", b"x")
    assert store.get("a") == b"x"


def test_a_file_without_certificates_is_refused_before_anything_is_asked(bucket, client, tmp_path):
    nonsense = tmp_path / "ca.pem"
    for content in (None, b"", b"no certificate"):
        if content is not None:
            nonsense.write_bytes(content)
        with pytest.raises(ConfigError, match=r"ca\.pem.*ca_file"):
            open_store(
                bucket.url, storage_options=options_of(bucket, client, ca_file=str(nonsense))
            )
