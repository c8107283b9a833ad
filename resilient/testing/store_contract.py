"""Conformance tests for a Store: subclass StoreContract and define a ``store`` fixture."""

# ruff: noqa: S101, PLR2004 - these are tests, shipped for those who write a Store

from __future__ import annotations

from array import array
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TYPE_CHECKING

import pytest

from resilient.errors import KeyExists, KeyNotFound, NotExclusive, StoreError
from resilient.storage.store import ObjectInfo
from resilient.storage.transfer import ScatterBuffer, read_into

if TYPE_CHECKING:
    from resilient.storage.store import Data, Store

_RACERS = 8
_ROUNDS = 20
_BAD_KEYS = (
    "",
    "/",
    "/absolute",
    "ends/",
    "two//slashes",
    "..",
    "../up",
    "a/../b",
    ".hidden",
    "a/.hidden",
    "with space",
    "new\nline",
    "nul\0",
    "back\\slash",
    "q?x=1",
    "a/" * 500 + "long",
)


class StoreContract:
    """Tests of every promise of a Store.

    Attributes:
        atomic: Whether the store has atomic puts; False skips the tests that need them.
    """

    atomic = True

    @pytest.fixture
    def store(self) -> Store:
        """Return an empty store; override this fixture."""
        raise NotImplementedError

    def test_what_was_put_is_what_is_got(self, store: Store) -> None:
        """Read back arbitrary bytes unchanged."""
        content = bytes(range(256)) * 300
        store.put("folder/object.bin", content)
        assert store.get("folder/object.bin") == content
        assert isinstance(store.get("folder/object.bin"), bytes)

    def test_an_empty_object_is_an_object(self, store: Store) -> None:
        """Distinguish an empty object from a missing one."""
        store.put("empty", b"")
        assert store.get("empty") == b""
        assert store.stat("empty") == ObjectInfo("empty", 0)
        assert list(store.list()) == [ObjectInfo("empty", 0)]

    def test_a_put_replaces_all_of_the_old_object(self, store: Store) -> None:
        """Read no bytes of a longer old object behind the new one."""
        store.put("a", b"a long first version")
        store.put("a", b"second")
        assert store.get("a") == b"second"
        assert store.stat("a").size_bytes == 6

    @pytest.mark.parametrize(
        ("start", "length", "expected"),
        [
            (0, 10, b"0123456789"),
            (0, 1, b"0"),
            (3, 4, b"3456"),
            (9, 1, b"9"),
            (8, 100, b"89"),
            (10, 5, b""),
            (50, 5, b""),
            (4, 0, b""),
        ],
    )
    def test_a_range_is_what_it_covers_of_the_object(
        self, store: Store, start: int, length: int, expected: bytes
    ) -> None:
        """Return fewer bytes than requested only at the end."""
        store.put("a/b", b"0123456789")
        assert store.get_range("a/b", start, length) == expected
        memory = bytearray(b"." * length)
        pieces: list[tuple[int, int]] = []
        # In two pieces, like the memory of two tensors. The second one is empty for a short range.
        room = ScatterBuffer([memoryview(memory)[:3], memoryview(memory)[3:]])
        received_bytes = read_into(store, "a/b", start, room, lambda *piece: pieces.append(piece))
        assert received_bytes == len(expected)
        assert [stop for _, stop in pieces][-1:] in ([received_bytes], [])
        assert memory == expected + b"." * (length - len(expected))

    @pytest.mark.parametrize(("start", "length"), [(-1, 5), (0, -1)])
    def test_a_negative_range_is_refused(self, store: Store, start: int, length: int) -> None:
        """Reject negative offsets and lengths instead of applying Python's negative indices."""
        store.put("a", b"0123456789")
        with pytest.raises(StoreError):
            store.get_range("a", start, length)
        with pytest.raises(StoreError):
            read_into(store, "a", -1, ScatterBuffer([memoryview(bytearray(5))]), lambda *_: None)

    def test_a_missing_object_is_not_found(self, store: Store) -> None:
        """Raise KeyNotFound in an empty store, beside other objects, and for a folder."""
        store.put("there/object", b"x")
        for key in ("missing", "there/missing", "there", "missing/deep/er"):
            with pytest.raises(KeyNotFound):
                store.get(key)
            with pytest.raises(KeyNotFound):
                store.get_range(key, 0, 1)
            with pytest.raises(KeyNotFound):
                store.get_range(key, 0, 0)
            with pytest.raises(KeyNotFound):
                read_into(store, key, 0, ScatterBuffer([memoryview(bytearray(1))]), lambda *_: None)
            with pytest.raises(KeyNotFound):
                store.stat(key)

    @pytest.mark.parametrize("key", _BAD_KEYS)
    def test_a_name_outside_the_grammar_is_refused(self, store: Store, key: str) -> None:
        """Reject the key in every operation."""
        for operation in (store.get, store.stat, store.delete):
            with pytest.raises(StoreError):
                operation(key)
        for write in (store.put, store.put_new):
            with pytest.raises(StoreError):
                write(key, b"x")
        with pytest.raises(StoreError):
            store.get_range(key, 0, 1)
        assert list(store.list()) == []

    def test_a_list_is_in_the_order_of_keys(self, store: Store) -> None:
        """List in the order of characters, in which ``-`` and ``.`` come before ``/``."""
        keys = ["a/b/c", "a/b", "a-b/c", "a.b", "Z", "b", "a/a", "a0"]
        keys.remove("a/b")  # The contract does not promise an object in the place of a folder.
        for key in keys:
            store.put(key, key.encode())
        assert list(store.list()) == [ObjectInfo(key, len(key)) for key in sorted(keys)]

    def test_a_list_holds_the_keys_that_begin_with_the_prefix(self, store: Store) -> None:
        """Treat a prefix as characters, not as a folder."""
        keys = ["run-1/a", "run-1/b/c", "run-10/a", "run-2/a", "run"]
        for key in keys:
            store.put(key, b"x")

        def listed(prefix: str) -> list[str]:
            return [entry.key for entry in store.list(prefix)]

        assert listed("run-1") == ["run-1/a", "run-1/b/c", "run-10/a"]
        assert listed("run-1/") == ["run-1/a", "run-1/b/c"]
        assert listed("run-1/b/c") == ["run-1/b/c"]
        assert listed("run-1/b/cc") == []
        assert listed("run-1/a/") == []
        assert listed("nothing/here") == []
        assert listed("") == sorted(keys)

    @pytest.mark.parametrize("prefix", ["/", "../", "..", ".", "a//", "*", "[a]"])
    def test_a_prefix_that_no_key_has_lists_nothing(self, store: Store, prefix: str) -> None:
        """List nothing, without an error and without leaving the store."""
        store.put("a/b", b"x")
        assert list(store.list(prefix)) == []

    def test_an_empty_store_lists_nothing(self, store: Store) -> None:
        """List nothing before the first object exists."""
        assert list(store.list()) == []
        assert list(store.list("any/")) == []

    def test_a_delete_of_a_missing_object_is_no_error(self, store: Store) -> None:
        """Delete a missing object without an error, before and after it existed."""
        store.delete("never/was")
        store.put("a/b", b"x")
        store.delete("a/b")
        store.delete("a/b")
        assert list(store.list()) == []

    def test_a_delete_takes_one_object(self, store: Store) -> None:
        """Keep the neighbours of a deleted object, and objects below its name."""
        for key in ("a/b", "a/c", "a/bb", "d/e"):
            store.put(key, b"x")
        store.delete("a/b")
        store.delete("d")
        assert [entry.key for entry in store.list()] == ["a/bb", "a/c", "d/e"]

    def test_a_deleted_key_can_be_put_again(self, store: Store) -> None:
        """Put an object again after its folder was emptied."""
        store.put("a/b", b"first")
        store.delete("a/b")
        store.put("a/b", b"second")
        assert store.get("a/b") == b"second"

    def test_a_second_exclusive_create_is_refused(self, store: Store) -> None:
        """Reject the second create without an effect, and free the key after a delete.

        The contents differ, because a retry may take an equal object for the result of its own
        create.
        """
        if not store.exclusive:
            with pytest.raises(NotExclusive):
                store.put_new("claim", b"mine")
            assert list(store.list()) == []
            return
        store.put_new("claim", b"mine")
        for content in (b"yours", b""):
            with pytest.raises(KeyExists):
                store.put_new("claim", content)
        assert store.get("claim") == b"mine"
        store.delete("claim")
        store.put_new("claim", b"yours")
        assert store.get("claim") == b"yours"

    def test_an_exclusive_create_sees_a_plain_put(self, store: Store) -> None:
        """Reject an exclusive create of a key taken by a plain put."""
        if not store.exclusive:
            pytest.skip("this store has no exclusive create")
        store.put("claim", b"mine")
        with pytest.raises(KeyExists):
            store.put_new("claim", b"yours")

    def test_of_many_exclusive_creates_exactly_one_returns(self, store: Store) -> None:
        """Let one of several concurrent creates succeed, and store the winner's content."""
        if not store.exclusive:
            pytest.skip("this store has no exclusive create")
        with ThreadPoolExecutor(_RACERS) as pool:
            for number in range(_ROUNDS):
                key, start = f"claims/{number}", Barrier(_RACERS)

                def claim(racer: int, key: str = key, start: Barrier = start) -> bool:
                    start.wait(30)
                    try:
                        store.put_new(key, f"racer {racer}".encode() * 100)
                    except KeyExists:
                        return False
                    return True

                results = list(pool.map(claim, range(_RACERS)))
                assert results.count(True) == 1, f"{results.count(True)} racers won `{key}`"
                assert store.get(key) == f"racer {results.index(True)}".encode() * 100

    def test_every_write_that_returned_is_seen(self, store: Store) -> None:
        """Show a write at once in get, stat and list, also after an earlier read."""
        for size in range(1, 6):
            store.put("seen/now", b"x" * size)
            assert store.get("seen/now") == b"x" * size
            assert store.stat("seen/now").size_bytes == size
            assert list(store.list("seen/")) == [ObjectInfo("seen/now", size)]
            store.delete("seen/now")
            assert list(store.list("seen/")) == []
            with pytest.raises(KeyNotFound):
                store.stat("seen/now")

    @pytest.mark.parametrize(
        "data",
        [
            bytearray(b"12345678"),
            memoryview(b"12345678"),
            memoryview(b"xx12345678xx")[2:-2],
            memoryview(array("f", [1.0, 2.0])),
            memoryview(bytearray(8)).cast("B", (2, 2, 2)),
        ],
        ids=["bytearray", "memoryview", "slice", "floats", "three dimensions"],
    )
    def test_any_contiguous_buffer_can_be_put(self, store: Store, data: Data) -> None:
        """Store a copy of the buffer's bytes."""
        expected = bytes(data)
        store.put("a", data)
        assert store.get("a") == expected
        assert store.stat("a").size_bytes == 8

    def test_a_buffer_may_change_after_the_put(self, store: Store) -> None:
        """Keep the stored content when the buffer changes later."""
        data = bytearray(b"before")
        store.put("a", data)
        data[:] = b"after!"
        assert store.get("a") == b"before"

    def test_a_buffer_with_gaps_is_refused(self, store: Store) -> None:
        """Reject a buffer that is not contiguous, because its bytes are ambiguous."""
        with pytest.raises(StoreError):
            store.put("a", memoryview(b"123456")[::2])
        with pytest.raises(KeyNotFound):
            store.get("a")

    def test_concurrent_puts_leave_one_of_them_whole(self, store: Store) -> None:
        """Show only complete contents to readers, during and after concurrent puts."""
        if not self.atomic:
            pytest.skip("this store's put is not atomic, and it does not claim to be")
        contents = [bytes([number]) * (5000 + number) for number in range(1, _RACERS)]
        store.put("contested", contents[0])

        def put(content: bytes) -> set[bytes]:
            read_contents = set()
            for _ in range(5):
                store.put("contested", content)
                read_contents.add(store.get("contested"))
            return read_contents

        with ThreadPoolExecutor(len(contents)) as pool:
            observed_contents = set().union(*pool.map(put, contents), [store.get("contested")])
        assert observed_contents <= set(contents)
        assert [entry.key for entry in store.list()] == ["contested"]

    def test_concurrent_puts_and_deletes_in_one_folder_all_succeed(self, store: Store) -> None:
        """Keep a folder usable for one writer while another writer empties it."""

        def work(number: int) -> None:
            for _ in range(15):
                store.put(f"busy/deep/{number}", b"x")
                assert store.get(f"busy/deep/{number}") == b"x"
                store.delete(f"busy/deep/{number}")

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        assert list(store.list()) == []

    def test_an_object_in_the_place_of_a_folder_works_or_is_a_store_error(
        self, store: Store
    ) -> None:
        """Accept the object, as object stores do, or raise StoreError, as file systems do."""
        store.put("a", b"object")
        store.put("c/d", b"object")
        for key in ("a/b", "c"):
            try:
                store.put(key, b"x")
            except StoreError:
                with pytest.raises(KeyNotFound):
                    store.get(key)
        assert store.get("a") == b"object"
        assert store.get("c/d") == b"object"

    def test_a_store_says_where_it_is(self, store: Store) -> None:
        """Return a URL that is safe in a log."""
        assert store.url
        assert "@" not in store.url
        assert "?" not in store.url
