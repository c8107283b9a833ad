"""A checksum in place of a signature: what a server may answer to it, word by word."""

import base64
from contextlib import contextmanager

import pytest
from crc32c import crc32c

from resilient.errors import StoreError, StoreUnavailable
from resilient.storage.s3_client import ChecksumSupport
from tests.helpers.s3answers import BEGUN, DONE, refusal, reply, serving
from tests.helpers.seeds import drawn_bytes

SUMMED = "x-amz-content-sha256: UNSIGNED-PAYLOAD"


@contextmanager
def summing(*answers, **options):
    """Serve as over https, where a checksum may stand for a signature."""
    with serving(*answers, **options) as (server, transfers):
        transfers._sums = ChecksumSupport(is_asked=True)
        yield server, transfers


def held(body):
    value = base64.b64encode(crc32c(body).to_bytes(4)).decode()
    return reply(200, b"", f"etag: x\r\nx-amz-checksum-crc32c: {value}\r\n")


def summed_of(server):
    return [SUMMED in head for head in server.heads]


def test_a_checksum_that_the_server_says_again_stands_for_a_signature():
    data = drawn_bytes(2 << 20)
    with summing(held(data), held(data)) as (server, transfers):
        for _ in range(2):
            transfers.put("a", memoryview(data), len(data), 1)
        assert summed_of(server) == [True, True]
        named = [line for line in server.heads[0].lower().splitlines() if "signedheaders" in line]
        assert "x-amz-checksum-crc32c" in named[0]
        value = base64.b64encode(crc32c(data).to_bytes(4)).decode()
        assert f"x-amz-checksum-crc32c: {value}" in server.heads[0]


@pytest.mark.parametrize("answer", [reply(200), refusal(501, "NotImplemented"), refusal(403, "No")])
def test_a_server_that_holds_no_checksum_gets_the_same_body_signed_and_every_later_one(answer):
    with summing(answer, reply(200), reply(200)) as (server, transfers):
        for _ in range(2):
            transfers.put("a", memoryview(b"12"), 2, 1)
        assert summed_of(server) == [True, False, False]
        assert server.bodies == [b"12"] * 3


def test_one_body_finds_out_while_others_are_signed():
    with summing(reply(200), reply(200)) as (server, transfers):
        assert transfers._sums.begin()
        transfers.put("a", memoryview(b"12"), 2, 1)
        transfers._sums.end(holds=None)
        assert summed_of(server) == [False]
        assert [transfers._sums.begin() for _ in range(2)] == [False, True]


@pytest.mark.parametrize("answers", [[refusal(503, "SlowDown")], [None], [refusal(403, "No")] * 2])
def test_an_outage_and_a_refusal_of_both_say_nothing_about_checksums(answers):
    with summing(*answers, reply(200), held(b"12"), held(b"12")) as (server, transfers):
        with pytest.raises(StoreError):
            transfers.put("a", memoryview(b"12"), 2, 1)
        for _ in range(3):
            transfers.put("a", memoryview(b"12"), 2, 1)
        # What failed may have failed of its checksum: the next is signed, then it is tried again.
        assert summed_of(server)[-3:] == [False, True, True]


def test_what_answers_no_checksum_three_times_gets_signatures():
    busy = refusal(503, "SlowDown")
    answers = [one for _ in range(3) for one in (busy, reply(200))]
    with summing(*answers, reply(200), reply(200)) as (server, transfers):
        for _ in range(3):
            with pytest.raises(StoreUnavailable):
                transfers.put("a", memoryview(b"12"), 2, 1)
            transfers.put("a", memoryview(b"12"), 2, 1)
        for _ in range(2):
            transfers.put("a", memoryview(b"12"), 2, 1)
        assert summed_of(server) == [True, False] * 3 + [False, False]


@pytest.mark.parametrize("known", [False, True])
def test_a_checksum_of_what_arrived_is_no_proof_of_what_was_meant(known):
    first = [held(b"12")] if known else []
    with summing(*first, held(b"13")) as (_, transfers):
        for _ in first:
            transfers.put("a", memoryview(b"12"), 2, 1)
        with pytest.raises(StoreUnavailable, match="another checksum"):
            transfers.put("a", memoryview(b"12"), 2, 1)


def test_one_server_of_several_that_holds_no_checksum_decides_for_all():
    sums = ChecksumSupport(is_asked=True)
    for holds in (True, False, True):
        sums.end(holds=holds)
    assert not sums.begin()


def test_parts_are_joined_with_their_checksums():
    begun = reply(200, BEGUN, "x-amz-checksum-algorithm: CRC32C\r\n")
    with summing(begun, held(b"12"), held(b"3"), reply(200, DONE)) as (server, transfers):
        transfers.put("a", memoryview(b"123"), 2, 1)
        assert "x-amz-checksum-algorithm: CRC32C" in server.heads[0]
        assert summed_of(server) == [False, True, True, False]
        assert server.bodies[3].count(b"<ChecksumCRC32C>") == 2


@pytest.mark.parametrize("parts", [[reply(200), held(b"3")], [held(b"12"), reply(200)]])
def test_an_upload_of_which_one_part_was_not_held_against_its_checksum_is_begun_anew(parts):
    begun = reply(200, BEGUN, "x-amz-checksum-algorithm: CRC32C\r\n")
    again = [reply(200, BEGUN), reply(200), reply(200), reply(200, DONE)]
    with summing(begun, *parts, reply(204), *again) as (server, transfers):
        transfers.put("a", memoryview(b"123"), 2, 1)
        asked = [head.split()[0] for head in server.heads]
        assert asked == ["POST", "PUT", "PUT", "DELETE", "POST", "PUT", "PUT", "POST"]
        assert summed_of(server)[4:] == [False] * 4
