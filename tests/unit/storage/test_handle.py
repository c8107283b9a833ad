"""Writes past the page cache: the same file, whatever the memory and the file system allow."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

import pytest

from resilient.storage.local import LocalStore
from resilient.storage.posix import PosixWritableFile
from tests.helpers.seeds import drawn_bytes

SIZE_BYTES = (20 << 20) + 12345
PIECES = (0, 1, 4095, 4096, 4097, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, SIZE_BYTES)


@pytest.fixture(scope="module")
def content():
    return drawn_bytes(SIZE_BYTES)


@pytest.fixture(scope="module")
def memory(content):
    """Content at the beginning of a page, as staged state is."""
    mapped = mmap.mmap(-1, SIZE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped[:] = content
    return memoryview(mapped)


@pytest.fixture
def writes(monkeypatch):
    """What was written: (bytes, past the page cache)."""
    seen, write = [], os.write

    def watched(descriptor, data):
        written = write(descriptor, data)
        direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        seen.append((written, direct))
        return written

    monkeypatch.setattr(os, "write", watched)
    return seen


def has_direct_writes(folder, memory):
    path = folder / "probe"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        os.write(descriptor, memory[:4096])
    except OSError:
        return False
    os.close(descriptor)
    path.unlink()
    return True


def test_large_memory_goes_past_the_page_cache_and_the_rest_through_it(
    tmp_path, memory, content, writes
):
    if not has_direct_writes(tmp_path, memory):
        pytest.skip("this file system has no direct writes")
    writes.clear()
    LocalStore(tmp_path).put("object", memory)
    assert [written for written, direct in writes if not direct] == [SIZE_BYTES % 4096]
    assert (tmp_path / "object").read_bytes() == content


@pytest.mark.parametrize("size_bytes", PIECES)
@pytest.mark.parametrize("offset", [0, 8, 4096])
def test_any_length_from_any_place_in_memory_is_written_whole(
    tmp_path, memory, content, size_bytes, offset
):
    stop = min(offset + size_bytes, SIZE_BYTES)
    store = LocalStore(tmp_path)
    store.put("object", memory[offset:stop])
    assert store.get("object") == content[offset:stop]
    assert (tmp_path / "object").stat().st_size == stop - offset


def test_a_small_object_needs_no_switch(tmp_path, writes):
    LocalStore(tmp_path).put("object", b"small")
    assert writes == [(5, False)]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_without_direct_writes_is_written_through_the_cache(
    tmp_path, memory, content, monkeypatch, code
):
    control = fcntl.fcntl

    def refusing(descriptor, command, argument=0):
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(code, "not here")
        return control(descriptor, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refusing)
    LocalStore(tmp_path).put("object", memory)
    assert (tmp_path / "object").read_bytes() == content


def test_an_error_of_the_disk_is_no_reason_to_try_another_way(tmp_path, memory, monkeypatch):
    descriptor = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    asked = []

    def failing(_, data):
        asked.append(len(data))
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "write", failing)
    handle = PosixWritableFile(descriptor)
    with pytest.raises(OSError, match="Input/output error"):
        handle.write(memory)
    handle.close()
    assert len(asked) == 1


def test_what_follows_a_short_write_is_written_where_that_ended(
    tmp_path, memory, content, monkeypatch
):
    write, short = os.write, [1 << 20, 1000, 5000]

    def stingy(descriptor, data):
        # A disk that is nearly full takes what it can.
        through_cache = not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        length = short.pop() if through_cache and short else len(data)
        return write(descriptor, data[:length])

    monkeypatch.setattr(os, "write", stingy)
    handle = PosixWritableFile(os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT))
    rest = memory[: 5 << 20]
    handle.write(memoryview(b"x" * 10))
    while rest.nbytes:
        rest = rest[handle.write(rest) :]
    handle.sync()
    handle.close()
    assert (tmp_path / "file").read_bytes() == b"x" * 10 + content[: 5 << 20]
