"""What a server of S3 may answer over our own connections, word by word."""

import hashlib
import socket

import pytest

from resilient.clock import SystemClock
from resilient.errors import KeyNotFound, StoreDenied, StoreError, StoreUnavailable
from resilient.storage.options import read_s3_options
from resilient.storage.s3_client import connect_s3
from resilient.storage.s3_store import ObstoreStore
from resilient.storage.s3_transfer import Redirected
from resilient.storage.transfer import ScatterBuffer
from tests.helpers.s3answers import BEGUN, CLOSE, DONE, Server, refusal, reply, serving
from tests.helpers.seeds import drawn_bytes


def fill(transfers, size, start=0):
    memory = bytearray(size)
    told = []
    room = ScatterBuffer([memoryview(memory)[: size // 2], memoryview(memory)[size // 2 :]])
    came = transfers.fill("a b", start, room, lambda *span: told.append(span))
    return came, bytes(memory), told


def test_a_range_fills_its_room_and_the_connection_is_used_again():
    data = drawn_bytes(3 << 20)
    with serving(reply(206, data), reply(206, data[:5])) as (server, transfers):
        came, memory, told = fill(transfers, len(data), 7)
        assert (came, memory) == (len(data), data)
        assert [begin for begin, _ in told] == [0, *(stop for _, stop in told)][:-1]
        assert told[-1][1] == len(data)
        assert fill(transfers, 9)[0] == 5
        assert server.connections == 1
        assert "GET /bucket/run/a%20b HTTP/1.1" in server.heads[0]
        assert f"range: bytes=7-{6 + len(data)}\r\n" in server.heads[0]


def test_a_connection_that_the_server_ended_is_not_used_again():
    with serving(reply(206, b"1"), reply(206, b"2")) as (server, transfers):
        fill(transfers, 2)
        # The server ends what idles; here at once, after its first answer.
        idle = transfers._wire._idle[0]
        idle.sock.shutdown(socket.SHUT_RDWR)
        assert fill(transfers, 2)[0] == 1
        assert server.connections == 2


@pytest.mark.parametrize(
    ("answer", "raised"),
    [
        (reply(206, b"half", CLOSE, length=8), StoreUnavailable),
        (None, StoreUnavailable),
        (b"no HTTP\r\n" + CLOSE.encode(), StoreUnavailable),
        (reply(200, b"12345678"), StoreError),
        (refusal(404, "NoSuchKey"), KeyNotFound),
        (refusal(404, "NoSuchBucket"), StoreError),
        (refusal(403, "AccessDenied"), StoreDenied),
        (refusal(503, "SlowDown"), StoreUnavailable),
        (refusal(307, "TemporaryRedirect"), Redirected),
    ],
)
def test_what_is_no_range_is_told_by_kind(answer, raised):
    with serving(answer) as (_, transfers), pytest.raises(raised) as found:
        fill(transfers, 8, start=1)
    assert found.type is raised
    assert raised is Redirected or "s3://bucket/run" in str(found.value)


def test_behind_the_end_of_an_object_is_nothing():
    with serving(refusal(416, "InvalidRange"), reply(206, b"1")) as (server, transfers):
        assert fill(transfers, 8, start=99)[0] == 0
        fill(transfers, 2)
        assert server.connections == 1


def test_an_answer_that_drips_ends_with_the_time_of_a_request():
    drops = [reply(206, b"1", length=20), *[b"1"] * 19]
    with serving(drops, request_seconds=0.2) as (_, transfers), pytest.raises(StoreUnavailable):
        fill(transfers, 20)


def test_an_object_of_one_part_is_one_request_with_its_digest():
    data = drawn_bytes(2 << 20)
    with serving(reply(200)) as (server, transfers):
        transfers.put("a", memoryview(data), len(data), 4)
        assert server.bodies == [data]
        assert f"x-amz-content-sha256: {hashlib.sha256(data).hexdigest()}" in server.heads[0]


def test_parts_are_put_together_in_their_order():
    data = drawn_bytes(5000)
    answers = [reply(200, BEGUN), *(reply(200, b"", 'etag: "t&t"\r\n') for _ in range(3))]
    with serving(*answers, reply(200, DONE)) as (server, transfers):
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
        ([reply(200), reply(200), refusal(200, "InternalError")], StoreUnavailable),
        ([reply(200), reply(200), refusal(200, "EntityTooSmall")], StoreError),
        ([reply(200), reply(200), reply(200, b"")], StoreUnavailable),
        ([refusal(403, "AccessDenied")], StoreDenied),
        ([None], StoreUnavailable),
    ],
)
def test_parts_that_come_to_nothing_are_aborted(answers, raised):
    with serving(reply(200, BEGUN), *answers, reply(204)) as (server, transfers):
        with pytest.raises(raised) as found:
            transfers.put("a", memoryview(b"12"), 1, 1)
        assert found.type is raised
        assert server.heads[-1].startswith("DELETE /bucket/run/a?uploadId=u%2F1 ")


def test_a_server_that_sends_elsewhere_is_left_to_the_library(monkeypatch):
    data = drawn_bytes(1 << 20)
    server = Server(refusal(307, "TemporaryRedirect"), reply(200, b"", 'etag: "x"\r\n'))
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
    assert (
        bucket != "bucket" or options or connect_s3(bucket, read_s3_options(given), SystemClock())
    )
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert connect_s3(bucket, read_s3_options(given), SystemClock()) is None
