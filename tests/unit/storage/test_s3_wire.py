"""What a server of S3 may answer over our own connections, word by word."""

import base64
import hashlib
import os
import socket
import threading
import time
from contextlib import contextmanager, suppress

import pytest
from crc32c import crc32c

from resilient.clock import SystemClock
from resilient.errors import KeyNotFound, StoreDenied, StoreError, StoreUnavailable
from resilient.storage import s3_wire
from resilient.storage.buffers import Room
from resilient.storage.obstore import ObstoreStore
from resilient.storage.s3_options import read_s3_options
from resilient.storage.s3_proofs import Sums
from resilient.storage.s3_transfers import Redirected, Transfers
from resilient.storage.s3_wire import wire_of

_DRIP_SECONDS = 0.03
KEEP, CLOSE = "", "connection: close\r\n"
DONE = b"<CompleteMultipartUploadResult><ETag></ETag></CompleteMultipartUploadResult>"
BEGUN = b"<InitiateMultipartUploadResult><UploadId>u/1</UploadId></InitiateMultipartUploadResult>"


def said(status, body=b"", headers=KEEP, length=None):
    length = len(body) if length is None else length
    return f"HTTP/1.1 {status} x\r\ncontent-length: {length}\r\n{headers}\r\n".encode() + body


def refused(status, code):
    text = f"<Error><Code>{code}</Code><Message>no &amp; no</Message></Error>"
    return said(status, text.encode())


class Server:
    """Gives its answers one by one, and remembers what was asked.

    An answer is what is sent after a whole request, a list of them drop by drop; None hangs up
    without one.
    """

    def __init__(self, *answers):
        self.answers = list(answers)
        self.heads, self.bodies, self.connections = [], [], 0
        self._lock = threading.Lock()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            self.connections += 1
            serving = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(serving)
            serving.start()

    def _serve(self, connection):
        connection.settimeout(5)
        with connection, connection.makefile("rb") as file:
            while True:
                head = b"".join(iter(lambda: _line(file), b""))
                if not head:
                    return
                lines = head.decode().lower().split("\r\n")
                sizes = [line.split(":")[1] for line in lines if line.startswith("content-length")]
                body = file.read(int(sizes[0])) if sizes else b""
                with self._lock:
                    self.heads.append(head.decode())
                    self.bodies.append(body)
                    answer = self.answers.pop(0)
                if answer is None:
                    return
                pieces = answer if isinstance(answer, list) else [answer]
                for piece in pieces:
                    with suppress(OSError):
                        connection.sendall(piece)
                    time.sleep(_DRIP_SECONDS if len(pieces) > 1 else 0)
                if CLOSE.encode() in pieces[0]:
                    return

    def end(self):
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for one in self._threads:
            one.join()


def _line(file):
    try:
        line = file.readline()
    except OSError:
        return b""
    return line if line.strip() else b""


@contextmanager
def serving(*answers, **options):
    server = Server(*answers)
    given = {"endpoint": f"http://127.0.0.1:{server.port}", "key": "k", "secret": "s", **options}
    wire = wire_of("bucket", read_s3_options(given), SystemClock())
    try:
        yield server, Transfers("s3://bucket/run", wire, "run")
    finally:
        s3_wire._close(wire._idle)
        server.end()


def fill(transfers, size, start=0):
    memory = bytearray(size)
    told = []
    room = Room([memoryview(memory)[: size // 2], memoryview(memory)[size // 2 :]])
    came = transfers.fill("a b", start, room, lambda *span: told.append(span))
    return came, bytes(memory), told


def test_a_range_fills_its_room_and_the_connection_is_used_again():
    data = os.urandom(3 << 20)
    with serving(said(206, data), said(206, data[:5])) as (server, transfers):
        came, memory, told = fill(transfers, len(data), 7)
        assert (came, memory) == (len(data), data)
        assert [begin for begin, _ in told] == [0, *(stop for _, stop in told)][:-1]
        assert told[-1][1] == len(data)
        assert fill(transfers, 9)[0] == 5
        assert server.connections == 1
        assert "GET /bucket/run/a%20b HTTP/1.1" in server.heads[0]
        assert f"range: bytes=7-{6 + len(data)}\r\n" in server.heads[0]


def test_a_connection_that_the_server_ended_is_not_used_again():
    with serving(said(206, b"1"), said(206, b"2")) as (server, transfers):
        fill(transfers, 2)
        # The server ends what idles; here at once, after its first answer.
        idle = transfers._wire._idle[0]
        idle.sock.shutdown(socket.SHUT_RDWR)
        assert fill(transfers, 2)[0] == 1
        assert server.connections == 2


@pytest.mark.parametrize(
    ("answer", "raised"),
    [
        (said(206, b"half", CLOSE, length=8), StoreUnavailable),
        (None, StoreUnavailable),
        (b"no HTTP\r\n" + CLOSE.encode(), StoreUnavailable),
        (said(200, b"12345678"), StoreError),
        (refused(404, "NoSuchKey"), KeyNotFound),
        (refused(404, "NoSuchBucket"), StoreError),
        (refused(403, "AccessDenied"), StoreDenied),
        (refused(503, "SlowDown"), StoreUnavailable),
        (refused(307, "TemporaryRedirect"), Redirected),
    ],
)
def test_what_is_no_range_is_told_by_kind(answer, raised):
    with serving(answer) as (_, transfers), pytest.raises(raised) as found:
        fill(transfers, 8, start=1)
    assert found.type is raised
    assert raised is Redirected or "s3://bucket/run" in str(found.value)


def test_behind_the_end_of_an_object_is_nothing():
    with serving(refused(416, "InvalidRange"), said(206, b"1")) as (server, transfers):
        assert fill(transfers, 8, start=99)[0] == 0
        fill(transfers, 2)
        assert server.connections == 1


def test_an_answer_that_drips_ends_with_the_time_of_a_request():
    drops = [said(206, b"1", length=20), *[b"1"] * 19]
    with serving(drops, request_seconds=0.2) as (_, transfers), pytest.raises(StoreUnavailable):
        fill(transfers, 20)


def test_an_object_of_one_part_is_one_request_with_its_digest():
    data = os.urandom(2 << 20)
    with serving(said(200)) as (server, transfers):
        transfers.put("a", memoryview(data), len(data), 4)
        assert server.bodies == [data]
        assert f"x-amz-content-sha256: {hashlib.sha256(data).hexdigest()}" in server.heads[0]


def test_parts_are_put_together_in_their_order():
    data = os.urandom(5000)
    answers = [said(200, BEGUN), *(said(200, b"", 'etag: "t&t"\r\n') for _ in range(3))]
    with serving(*answers, said(200, DONE)) as (server, transfers):
        transfers.put("a", memoryview(data), 2000, 1)
        assert b"".join(server.bodies[1:4]) == data
        asked = [head.split(" HTTP")[0] for head in server.heads]
        number = "uploadId=u%2F1"
        assert asked[0] == "POST /bucket/run/a?uploads="
        assert asked[1:4] == [f"PUT /bucket/run/a?partNumber={one}&{number}" for one in (1, 2, 3)]
        assert asked[4] == f"POST /bucket/run/a?{number}"
        assert server.bodies[4].count(b'<ETag>"t&amp;t"</ETag>') == 3


@pytest.mark.parametrize(
    ("answers", "raised"),
    [
        # As Amazon does when it fails after its first word.
        ([said(200), said(200), refused(200, "InternalError")], StoreUnavailable),
        ([said(200), said(200), refused(200, "EntityTooSmall")], StoreError),
        ([said(200), said(200), said(200, b"")], StoreUnavailable),
        ([refused(403, "AccessDenied")], StoreDenied),
        ([None], StoreUnavailable),
    ],
)
def test_parts_that_come_to_nothing_are_aborted(answers, raised):
    with serving(said(200, BEGUN), *answers, said(204)) as (server, transfers):
        with pytest.raises(raised) as found:
            transfers.put("a", memoryview(b"12"), 1, 1)
        assert found.type is raised
        assert server.heads[-1].startswith("DELETE /bucket/run/a?uploadId=u%2F1 ")


def test_a_server_that_sends_elsewhere_is_left_to_the_library(monkeypatch):
    data = os.urandom(1 << 20)
    server = Server(refused(307, "TemporaryRedirect"), said(200, b"", 'etag: "x"\r\n'))
    try:
        given = {"endpoint": f"http://127.0.0.1:{server.port}", "key": "k", "secret": "s"}
        store = ObstoreStore("s3://bucket/run", read_s3_options(given))
        store.put("a", data)
        assert server.bodies == [data, data]
        assert store._transfers is None
        del store
    finally:
        server.end()


@pytest.mark.parametrize(
    ("bucket", "options", "variables"),
    [
        ("bucket", {"key": "", "secret": ""}, {}),
        ("bucket", {"anon": True}, {}),
        ("bucket--usw2-az1--x-s3", {}, {}),
        ("bucket", {}, {"http_proxy": "http://127.0.0.1:9", "no_proxy": ""}),
        ("bucket", {}, {"AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true"}),
    ],
)
def test_what_only_the_library_knows_is_left_to_it(monkeypatch, bucket, options, variables):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    given = {"endpoint": "http://10.0.0.1:9", "key": "k", "secret": "s", **options}
    assert bucket != "bucket" or options or wire_of(bucket, read_s3_options(given), SystemClock())
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert wire_of(bucket, read_s3_options(given), SystemClock()) is None


SUMMED = "x-amz-content-sha256: UNSIGNED-PAYLOAD"


@contextmanager
def summing(*answers, **options):
    """Serve as over https, where a checksum may stand for a signature."""
    with serving(*answers, **options) as (server, transfers):
        transfers._sums = Sums(is_asked=True)
        yield server, transfers


def held(body):
    value = base64.b64encode(crc32c(body).to_bytes(4)).decode()
    return said(200, b"", f"etag: x\r\nx-amz-checksum-crc32c: {value}\r\n")


def summed_of(server):
    return [SUMMED in head for head in server.heads]


def test_a_checksum_that_the_server_says_again_stands_for_a_signature():
    data = os.urandom(2 << 20)
    with summing(held(data), held(data)) as (server, transfers):
        for _ in range(2):
            transfers.put("a", memoryview(data), len(data), 1)
        assert summed_of(server) == [True, True]
        named = [line for line in server.heads[0].lower().splitlines() if "signedheaders" in line]
        assert "x-amz-checksum-crc32c" in named[0]
        value = base64.b64encode(crc32c(data).to_bytes(4)).decode()
        assert f"x-amz-checksum-crc32c: {value}" in server.heads[0]


@pytest.mark.parametrize("answer", [said(200), refused(501, "NotImplemented"), refused(403, "No")])
def test_a_server_that_holds_no_checksum_gets_the_same_body_signed_and_every_later_one(answer):
    with summing(answer, said(200), said(200)) as (server, transfers):
        for _ in range(2):
            transfers.put("a", memoryview(b"12"), 2, 1)
        assert summed_of(server) == [True, False, False]
        assert server.bodies == [b"12"] * 3


def test_one_body_finds_out_while_others_are_signed():
    with summing(said(200), said(200)) as (server, transfers):
        assert transfers._sums.begin()
        transfers.put("a", memoryview(b"12"), 2, 1)
        transfers._sums.end(holds=None)
        assert summed_of(server) == [False]
        assert transfers._sums.begin()


@pytest.mark.parametrize("answers", [[refused(503, "SlowDown")], [None], [refused(403, "No")] * 2])
def test_an_outage_and_a_refusal_of_both_say_nothing_about_checksums(answers):
    with summing(*answers, held(b"12")) as (server, transfers):
        with pytest.raises(StoreError):
            transfers.put("a", memoryview(b"12"), 2, 1)
        transfers.put("a", memoryview(b"12"), 2, 1)
        assert summed_of(server)[-1]


def test_parts_are_joined_with_their_checksums():
    begun = said(200, BEGUN, "x-amz-checksum-algorithm: CRC32C\r\n")
    with summing(begun, held(b"12"), held(b"3"), said(200, DONE)) as (server, transfers):
        transfers.put("a", memoryview(b"123"), 2, 1)
        assert "x-amz-checksum-algorithm: CRC32C" in server.heads[0]
        assert summed_of(server) == [False, True, True, False]
        assert server.bodies[3].count(b"<ChecksumCRC32C>") == 2


@pytest.mark.parametrize("parts", [[said(200), held(b"3")], [held(b"12"), said(200)]])
def test_an_upload_of_which_one_part_was_not_held_against_its_checksum_is_begun_anew(parts):
    begun = said(200, BEGUN, "x-amz-checksum-algorithm: CRC32C\r\n")
    again = [said(200, BEGUN), said(200), said(200), said(200, DONE)]
    with summing(begun, *parts, said(204), *again) as (server, transfers):
        transfers.put("a", memoryview(b"123"), 2, 1)
        asked = [head.split()[0] for head in server.heads]
        assert asked == ["POST", "PUT", "PUT", "DELETE", "POST", "PUT", "PUT", "POST"]
        assert summed_of(server)[4:] == [False] * 4
