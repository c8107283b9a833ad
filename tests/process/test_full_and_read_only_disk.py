"""A real small file system that is full, and one that is mounted read-only."""

import subprocess

import pytest

from resilient.errors import StoreDenied, StoreFull
from resilient.storage.local import LocalStore

SIZE = 1 << 20


@pytest.fixture
def mounted(small_disk):
    return small_disk(SIZE)


@pytest.mark.smoke
@pytest.mark.parametrize("operation", ["put", "put_new"])
def test_a_full_disk_keeps_the_old_object_and_gets_its_space_back(mounted, operation):
    store = LocalStore(mounted)
    store.put("a/old", b"o" * (SIZE // 2))
    for _ in range(3):
        with pytest.raises(StoreFull) as caught:
            getattr(store, operation)("a/new", b"n" * SIZE)
        assert "No space left" in caught.value.message
        assert [entry.key for entry in store.list()] == ["a/old"]
        assert [path.name for path in (mounted / "a").iterdir()] == ["old"]
    store.put("a/small", b"s" * (SIZE // 4))
    assert store.get("a/old") == b"o" * (SIZE // 2)


def test_a_replacement_that_does_not_fit_leaves_the_old_object(mounted):
    store = LocalStore(mounted)
    store.put("a", b"o" * (SIZE // 2))
    with pytest.raises(StoreFull):
        store.put("a", b"n" * (SIZE * 3 // 4))
    assert store.get("a") == b"o" * (SIZE // 2)


def test_a_read_only_disk_denies_writes_and_serves_reads(mounted):
    store = LocalStore(mounted)
    store.put("a/b", b"x")
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    for run in (
        lambda: store.put("a/b", b"y"),
        lambda: store.put_new("a/c", b"y"),
        lambda: store.put("new/folder", b"y"),
        lambda: store.delete("a/b"),
    ):
        with pytest.raises(StoreDenied):
            run()
    assert store.get("a/b") == b"x"
