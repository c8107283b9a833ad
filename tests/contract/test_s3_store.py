"""FsspecStore over s3fs and a real socket, to a server that can lose, refuse and misbehave."""

import re
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

from resilient.clock import SystemClock
from resilient.errors import (
    KeyExists,
    KeyNotFound,
    NotExclusive,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from resilient.storage.fsspec_store import FsspecStore
from resilient.storage.retry import RetryingStore
from resilient.testing.store_contract import StoreContract

pytest.importorskip("s3fs")


class Bucket(ThreadingHTTPServer):
    """Objects, and what goes wrong: one word per coming PUT, GET, HEAD or DELETE of an object."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.objects, self.lock, self.faults, self.trace = {}, threading.Lock(), [], []


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def say(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", headers.pop("length", len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status, code):
        xml = f"<Error><Code>{code}</Code><Message>no: {code}</Message></Error>"
        self.say(status, xml.encode(), Content_Type="application/xml")

    def hang_up(self):
        self.close_connection = True

    def answer(self):
        url = urlsplit(self.path)
        key = unquote(url.path).removeprefix("/bucket").removeprefix("/")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.server.lock:
            self.server.trace.append((self.command, key))
            fault = self.server.faults.pop(0) if key and self.server.faults else ""
        if not url.path.startswith("/bucket"):
            return self.refuse(404, "NoSuchBucket")
        if not key:
            return self.list(parse_qs(url.query))
        if fault == "hang up before":
            return self.hang_up()
        if fault and fault != "hang up after":
            return self.refuse(*fault)
        if fault:
            # The effect happens and its answer is lost.
            self.say, self.refuse = (lambda *_, **__: self.hang_up(),) * 2
        return getattr(self, self.command.lower())(key, body)

    do_PUT = do_GET = do_HEAD = do_DELETE = answer  # noqa: N815 - the base class's names

    def put(self, key, body):
        marks = {n: v for n, v in self.headers.items() if n.lower().startswith("x-amz-meta-")}
        with self.server.lock:
            if self.headers.get("If-None-Match") == "*" and key in self.server.objects:
                return self.refuse(412, "PreconditionFailed")
            self.server.objects[key] = (body, marks)
        return self.say(200, ETag='"e"')

    def get(self, key, _):
        with self.server.lock:
            body, marks = self.server.objects.get(key, (None, None))
        if body is None:
            return self.refuse(404, "NoSuchKey")
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if not asked:
            return self.say(200, body, ETag='"e"', Last_Modified=DATE, **marks)
        if int(asked[1]) >= len(body):
            return self.refuse(416, "InvalidRange")
        part = body[int(asked[1]) : int(asked[2]) + 1]
        return self.say(206, part, ETag='"e"', Last_Modified=DATE)

    head = get

    def delete(self, key, _):
        with self.server.lock:
            self.server.objects.pop(key, None)
        self.say(204)

    def list(self, query):
        prefix = query.get("prefix", [""])[0]
        with self.server.lock:
            found = {k: v for k, v in sorted(self.server.objects.items()) if k.startswith(prefix)}
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(body)}</Size></Contents>"
            for key, (body, _) in found.items()
        )
        xml = (
            '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<KeyCount>{len(found)}</KeyCount><IsTruncated>false</IsTruncated>{entries}"
            "</ListBucketResult>"
        )
        self.say(200, xml.encode(), Content_Type="application/xml")


DATE = "Sat, 22 Aug 2026 12:00:00 GMT"


@pytest.fixture(scope="module")
def server():
    bucket = Bucket()
    thread = threading.Thread(target=bucket.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield bucket
    bucket.shutdown()
    thread.join()
    bucket.server_close()


@pytest.fixture
def bucket(server):
    server.objects.clear()
    server.faults.clear()
    server.trace.clear()
    return server


def connect(bucket, name="bucket"):
    return FsspecStore(
        f"s3://{name}/{uuid.uuid4().hex}",
        key="k",
        secret="s",  # noqa: S106 - there is no lock for this key
        client_kwargs={"region_name": "us-east-1"},
        endpoint_url=f"http://127.0.0.1:{bucket.server_address[1]}",
        config_kwargs={"retries": {"mode": "standard", "max_attempts": 1}, "read_timeout": 5},
    )


@pytest.fixture
def store(bucket):
    return connect(bucket)


class TestS3(StoreContract):
    @pytest.fixture
    def store(self, bucket):
        store = connect(bucket)
        assert store.exclusive
        return store


def test_the_condition_is_the_servers_to_judge_in_one_request(store, bucket):
    store.put_new("claim", b"x" * (11 << 20))
    assert [method for method, _ in bucket.trace] == ["PUT"]


def test_a_create_whose_answer_is_lost_is_never_taken_for_anothers(store, bucket):
    """aiohttp may send it again by itself, and the second one meets the first."""
    store.put("warm", b"a connection that is already open")
    bucket.faults[:] = ["hang up after"]
    RetryingStore(store, SystemClock(), 10).put_new("claim", b"ours")
    assert store.get("claim") == b"ours"
    puts = [key for method, key in bucket.trace if method == "PUT" and key.endswith("claim")]
    assert len(puts) == 2


def test_a_412_without_an_earlier_try_is_lost_even_to_equal_content(store):
    store.put_new("claim", b"same")
    with pytest.raises(KeyExists):
        store.put_new("claim", b"same")


def test_our_own_412_is_recognised_by_its_token(store, bucket):
    pipe = store._filesystem.pipe_file

    def sent_twice(path, data, **options):
        pipe(path, data, **options)
        pipe(path, data, **options)

    store._filesystem.pipe_file = sent_twice
    try:
        store.put_new("claim", b"ours")
        with pytest.raises(KeyExists):
            store.put_new("claim", b"ours")
    finally:
        del store._filesystem.pipe_file


def test_a_409_with_a_winner_is_lost_and_without_one_is_tried_again(store, bucket):
    bucket.faults[:] = [(409, "ConditionalRequestConflict")]
    with pytest.raises(StoreUnavailable):
        store.put_new("claim", b"ours")
    store.put("claim", b"theirs")
    bucket.faults[:] = [(409, "ConditionalRequestConflict")]
    with pytest.raises(KeyExists):
        store.put_new("claim", b"ours")


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (503, "SlowDown", StoreUnavailable),
        (500, "InternalError", StoreUnavailable),
        (400, "BadDigest", StoreUnavailable),
        (400, "XAmzContentSHA256Mismatch", StoreUnavailable),
        (400, "RequestTimeout", StoreUnavailable),
        (403, "AccessDenied", StoreDenied),
        (403, "SignatureDoesNotMatch", StoreDenied),
        (507, "QuotaExceeded", StoreFull),
        (400, "InvalidRequest", StoreError),
        (404, "NoSuchBucket", StoreError),
    ],
)
def test_an_answer_of_the_server_is_an_error_of_ours(store, bucket, status, code, expected):
    store.put("a", b"x")
    for run in (lambda: store.put("b", b"x"), lambda: store.get_range("a", 0, 1)):
        bucket.faults[:] = [(status, code)] * 3
        with pytest.raises(StoreError) as caught:
            run()
        assert caught.type is expected
        bucket.faults.clear()


def test_a_server_without_conditions_is_not_exclusive(store, bucket):
    bucket.faults[:] = [(501, "NotImplemented")]
    with pytest.raises(NotExclusive):
        store.put_new("claim", b"x")


def test_a_connection_that_breaks_is_unavailable(store, bucket):
    bucket.faults[:] = ["hang up before"] * 10
    with pytest.raises(StoreUnavailable):
        store.put("a", b"x")
    bucket.faults.clear()
    store.put("a", b"x")
    bucket.faults[:] = ["hang up before"] * 10
    with pytest.raises(StoreUnavailable):
        store.get_range("a", 0, 1)


def test_nobody_listening_is_unavailable():
    class Nobody:
        server_address = ("127.0.0.1", 9)

    with pytest.raises(StoreUnavailable):
        connect(Nobody).get("a")


def test_a_missing_bucket_is_no_empty_store(bucket):
    store = connect(bucket, "nowhere")
    for run in (lambda: list(store.list()), lambda: store.get("a"), lambda: store.put("a", b"")):
        with pytest.raises(StoreError) as caught:
            run()
        assert caught.type not in (KeyNotFound, KeyExists)
