"""Digests of a file, its chunks and its regions, taken in one pass."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from pytest import MonkeyPatch  # noqa: PT013 - a fixture lives longer than one example

from resilient.format import digest
from resilient.format.digest import digest_bytes, digest_file, digest_with

CHUNK = 16


@given(st.binary(max_size=100), st.lists(st.integers(0, 100), max_size=12), st.randoms())
def test_one_pass_gives_what_two_would(data, cuts, random):
    edges = sorted(min(cut, len(data)) for cut in cuts)
    ranges = list(zip(edges[::2], edges[1::2], strict=False))
    random.shuffle(ranges)
    with MonkeyPatch.context() as patched:
        patched.setattr(digest, "CHUNK_BYTES", CHUNK)
        proof, found = digest_with(data, ranges)
        assert proof == digest_file(data)
    assert len(proof.chunks) == -(-len(data) // CHUNK)
    assert list(found) == [digest_bytes(data[start:stop]) for start, stop in ranges]


def test_a_range_over_many_chunks_and_one_inside_a_chunk():
    data = bytes(range(256)) * (5 * digest.CHUNK_BYTES // 256) + b"the rest"
    ranges = [(7, 4 * digest.CHUNK_BYTES + 1), (4 * digest.CHUNK_BYTES + 1, len(data))]
    proof, found = digest_with(memoryview(data), ranges)
    assert proof == digest_file(data)
    assert list(found) == [digest_bytes(data[start:stop]) for start, stop in ranges]
