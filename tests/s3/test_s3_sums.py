"""Checksums in place of signed bodies, over https: only where the server holds them."""

import socket
import ssl
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from resilient.checkpoint.catalog import committed
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.checkpoint.verify import verify
from resilient.clock import SystemClock
from resilient.engine_factory import open_engine
from resilient.errors import StoreUnavailable
from resilient.events import Emitter
from resilient.state_dict.snapshot import Part
from resilient.storage import s3_client
from resilient.storage.open import open_store
from resilient.storage.s3_client import BodyChecksum, ChecksumSupport, summed
from tests.helpers.manifests import Values
from tests.helpers.seeds import drawn_bytes
from tests.services.ceph import Ceph
from tests.services.faultproxy import Fault, FaultProxy
from tests.services.newer import newer_ceph
from tests.services.presence import require
from tests.services.tls import make_certificate

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
    sign = s3_client.signed_headers

    def signed_headers(method, *arguments):
        found.extend([arguments[3]] if method == "PUT" else [])
        return sign(method, *arguments)

    monkeypatch.setattr(s3_client, "signed_headers", signed_headers)
    return found


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_server_that_knows_checksums_keeps_ours_and_no_body_is_signed(
    on_newer, monkeypatch, size
):
    digests = sent_digests(monkeypatch)
    data = drawn_bytes(size)
    store = open_https(on_newer)
    store.put("a", data)
    assert set(digests) == {"UNSIGNED-PAYLOAD"}
    assert store.get("a") == data
    head = on_newer.admin.head_object(Bucket=on_newer.name, Key="run/a", ChecksumMode="ENABLED")
    assert head["ChecksumCRC32C"]
    assert on_newer.uploads() == []


@pytest.mark.smoke
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_body_that_is_not_the_one_meant_is_refused(on_newer, monkeypatch, size):
    def of_another(body):
        good = summed(body)
        broken = summed(memoryview(bytes(body[:-1]) + bytes([body[-1] ^ 1])))
        return BodyChecksum(good.digest, broken.headers)

    store = open_https(on_newer, within_seconds=1)
    store.put("known", drawn_bytes(2 << 20))
    monkeypatch.setattr(s3_client, "summed", of_another)
    with pytest.raises(StoreUnavailable):
        store.put("a", drawn_bytes(size))
    assert [one.key for one in store.list()] == ["known"]
    assert on_newer.uploads() == []


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_server_that_passes_over_checksums_gets_a_signature(bucket, monkeypatch, size):
    digests = sent_digests(monkeypatch)
    data = drawn_bytes(size)
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
    store.put("a", drawn_bytes(2 << 20))
    assert "UNSIGNED-PAYLOAD" not in digests


def test_a_checkpoint_whose_bodies_are_not_signed_is_whole(on_newer):
    authority = str(on_newer.server.certificate.authority)
    options = on_newer.options(
        "obstore", on_newer.server.tls_endpoint, ca_file=authority, part_bytes=PART
    )
    checkpointer = open_engine(on_newer.url, emit=Emitter(SystemClock()), storage_options=options)
    parts = {"model": Part(Values(mark=drawn_bytes(1 << 20) * 12))}
    checkpointer.resume(parts)
    for step in (1, 2):
        checkpointer.save(step, parts, CheckpointInfo())
    checkpointer.close()
    store = open_https(on_newer)
    assert [verify(store, one, "deep") for one in committed(store)] == [[], []]


@pytest.mark.parametrize(
    "fault", [Fault(reset_share=0.5), Fault(cut_after_bytes=PART), Fault(status=503)]
)
def test_under_faults_bodies_with_checksums_land_whole(on_newer, fault):
    with FaultProxy(on_newer.server.port) as proxy:
        store = on_newer.open("obstore", proxy.endpoint, part_bytes=PART, parts_in_flight=2)
        inner = store._store
        # What breaks connections sees no TLS, so the checksums are asked for without it.
        inner._transfers._sums = ChecksumSupport(is_asked=True)
        store.put("known", drawn_bytes(2 << 20))
        proxy.fault = fault
        ends = threading.Timer(1.5, lambda: setattr(proxy, "fault", Fault()))
        ends.start()
        data = [drawn_bytes(2 * PART + one) for one in range(4)]
        for number, one in enumerate(data):
            store.put(f"a{number}", one)
        ends.join()
        assert proxy.broken
        assert inner._transfers._sums.begin()
    assert [store_of(on_newer).get(f"a{number}") for number in range(4)] == data


def store_of(bucket):
    return bucket.open("obstore")


def refuse_early(context, digests, connection):
    """Answer one request: what is not signed before its body was read, and then hang up."""
    with suppress(OSError), context.wrap_socket(connection, server_side=True) as secure:
        file = secure.makefile("rb")
        head = b"".join(iter(lambda: file.readline().strip() + b"\n", b"\n")).decode().lower()
        fields = dict(line.split(": ", 1) for line in head.splitlines()[1:])
        digests.append(fields["x-amz-content-sha256"])
        if digests[-1] == "unsigned-payload":
            secure.sendall(b"HTTP/1.1 403 x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            return
        file.read(int(fields["content-length"]))
        secure.sendall(b"HTTP/1.1 200 x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")


def test_a_server_that_refuses_early_and_hangs_up_gets_a_signature(tmp_path):
    made = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.certificate, made.key)
    digests = []

    serving = []

    def accept():
        with suppress(OSError):
            while True:
                connection, _ = listening.accept()
                connection.settimeout(20)
                serving.append(
                    threading.Thread(target=refuse_early, args=(context, digests, connection))
                )
                serving[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        accepting = threading.Thread(target=accept)
        accepting.start()
        options = {
            "endpoint": f"https://127.0.0.1:{listening.getsockname()[1]}",
            "key": "k",
            "secret": "s",
            "ca_file": str(made.authority),
        }
        store = open_store("s3://bucket/run", within_seconds=20, storage_options=options)
        store.put("a", bytes(16 << 20))
        listening.shutdown(socket.SHUT_RDWR)
        accepting.join()
    for one in serving:
        one.join()
    assert digests[0] == "unsigned-payload"
    assert digests[-1] != "unsigned-payload"
    assert len(digests) <= 3
