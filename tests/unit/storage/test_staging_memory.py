"""Memory that saves are staged in: warm, and of no concern to forked children."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from resilient.storage.shared_memory import map_file, private

SIZE_BYTES = 4 << 20


def shared(folder):
    """Return shared memory that this process may write to, as a keeper lends it."""
    path = folder / "segment"
    path.write_bytes(bytes(SIZE_BYTES))
    return map_file(path, SIZE_BYTES, writable=True)


def is_mapped(address):
    """Say whether this process has memory at ``address``."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = (line.split(" ", 1)[0].split("-") for line in lines)
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in spans)


def child_has(address):
    """Say whether a child that is forked now has memory at ``address``."""
    child = os.fork()
    if not child:
        os._exit(is_mapped(address))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


@pytest.mark.parametrize("make", [lambda _: private(SIZE_BYTES), shared], ids=["private", "shared"])
def test_a_forked_child_shares_no_page_of_it(tmp_path, make):
    memory = make(tmp_path)
    memory[:] = b"\1" * SIZE_BYTES
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    assert is_mapped(address)
    assert not child_has(address)
    assert memory[-1] == 1, "the parent's memory is as it was"


def test_a_forked_child_has_other_memory():
    """So that the test above can fail."""
    other = ctypes.create_string_buffer(SIZE_BYTES)

    assert child_has(ctypes.addressof(other))
