"""Checksums in place of signed bodies, over https: only where the server holds them."""

import os
import tempfile
from pathlib import Path

import pytest
from manifests import Values

from resilient.checkpointer import About
from resilient.clock import SystemClock
from resilient.errors import StoreUnavailable
from resilient.events import Emitter
from resilient.opening import open_checkpointer
from resilient.state.capture import Part
from resilient.storage import s3_wire
from resilient.storage.s3_proofs import Proof, summed
from resilient.vault.health.verify import verify
from resilient.vault.registry.catalog import committed
from tests.services.ceph import Ceph
from tests.services.newer import newer_ceph
from tests.services.presence import require

PART = 5 << 20
SIZES = {"in one": 2 << 20, "in parts": 2 * PART + 12345}


@pytest.fixture(scope="session")
def newer():
    root, problem = newer_ceph()
    require("ceph20", problem)
    temporary = {"dir": root / "tmp", "prefix": "ceph-"}
    with (
        tempfile.TemporaryDirectory(**temporary) as folder,
        Ceph(Path(folder), root=root) as running,
    ):
        yield running


@pytest.fixture
def on_newer(newer, bucket_of):
    return bucket_of(newer)


def open_https(bucket, **more):
    authority = str(bucket.server.certificate.authority)
    more = {"part_bytes": PART, "ca_file": authority, **more}
    # The retries' layer holds what holds the connections.
    return bucket.open("obstore", bucket.server.tls_endpoint, **more)


def sent_digests(monkeypatch):
    found = []
    sign = s3_wire.signed_headers

    def signed_headers(method, *arguments):
        found.extend([arguments[3]] if method == "PUT" else [])
        return sign(method, *arguments)

    monkeypatch.setattr(s3_wire, "signed_headers", signed_headers)
    return found


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_server_that_knows_checksums_keeps_ours_and_no_body_is_signed(
    on_newer, monkeypatch, size
):
    digests = sent_digests(monkeypatch)
    data = os.urandom(size)
    store = open_https(on_newer)
    store.put("a", data)
    assert set(digests) == {"UNSIGNED-PAYLOAD"}
    assert store.get("a") == data
    head = on_newer.admin.head_object(Bucket=on_newer.name, Key="run/a", ChecksumMode="ENABLED")
    assert head["ChecksumCRC32C"]
    assert on_newer.uploads() == []


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_body_that_is_not_the_one_meant_is_refused(on_newer, monkeypatch, size):
    def of_another(body):
        good = summed(body)
        broken = summed(memoryview(bytes(body[:-1]) + bytes([body[-1] ^ 1])))
        return Proof(good.digest, broken.headers)

    monkeypatch.setattr(s3_wire, "summed", of_another)
    store = open_https(on_newer, within_seconds=1)
    with pytest.raises(StoreUnavailable):
        store.put("a", os.urandom(size))
    assert list(store.list()) == []
    assert on_newer.uploads() == []


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_server_that_passes_over_checksums_gets_a_signature(bucket, monkeypatch, size):
    digests = sent_digests(monkeypatch)
    data = os.urandom(size)
    store = open_https(bucket)
    store.put("a", data)
    tried = digests.count("UNSIGNED-PAYLOAD")
    # One body shows it; of an upload its beginning does.
    assert tried == (1 if size < PART else 0)
    store.put("b", data)
    assert digests.count("UNSIGNED-PAYLOAD") == tried
    assert (store.get("a"), store.get("b")) == (data, data)
    assert bucket.uploads() == []


@pytest.mark.parametrize("where", ["http", "wish"])
def test_bodies_are_signed_over_http_and_on_request(on_newer, monkeypatch, where):
    digests = sent_digests(monkeypatch)
    store = open_https(on_newer, sign_bodies=True) if where == "wish" else on_newer.open("obstore")
    store.put("a", os.urandom(2 << 20))
    assert "UNSIGNED-PAYLOAD" not in digests


def test_a_checkpoint_whose_bodies_are_not_signed_is_whole(on_newer):
    authority = str(on_newer.server.certificate.authority)
    options = on_newer.options(
        "obstore", on_newer.server.tls_endpoint, ca_file=authority, part_bytes=PART
    )
    checkpointer = open_checkpointer(
        on_newer.url, emit=Emitter(SystemClock()), storage_options=options
    )
    parts = {"model": Part(Values(mark=os.urandom(1 << 20) * 12))}
    checkpointer.resume(parts)
    for step in (1, 2):
        checkpointer.save(step, parts, About())
    checkpointer.close()
    store = open_https(on_newer)
    assert [verify(store, one, "deep") for one in committed(store)] == [[], []]
