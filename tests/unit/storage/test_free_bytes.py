"""How much room a store has, where it can tell."""

from __future__ import annotations

import os
import shutil

from resilient.clock import SystemClock
from resilient.storage.local import LocalStore
from resilient.storage.open import open_store
from resilient.storage.retry import RetryingStore
from resilient.storage.store import free_bytes, free_bytes_at
from resilient.testing.memory_store import MemoryStore


def test_a_folder_has_what_its_disk_has_also_before_it_is_made(tmp_path):
    told = free_bytes(LocalStore(tmp_path / "not" / "yet"))
    assert abs(told - shutil.disk_usage(tmp_path).free) < 1 << 30
    assert not (tmp_path / "not").exists(), "asking makes nothing"


def test_a_wrapped_store_is_asked_through_its_wrapper(tmp_path):
    assert free_bytes(open_store(str(tmp_path))) is not None


def test_a_store_that_cannot_tell_says_nothing():
    assert free_bytes(MemoryStore()) is None
    assert free_bytes(RetryingStore(MemoryStore(), SystemClock())) is None
    assert free_bytes(open_store("memory://somewhere")) is None


def test_a_file_system_without_a_size_does_not_know(tmp_path):
    """/proc reports no blocks at all, as some network file systems do."""
    assert os.statvfs("/proc").f_blocks == 0
    from pathlib import Path

    assert free_bytes_at(Path("/proc/self")) is None
