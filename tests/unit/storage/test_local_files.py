import errno
import os
import stat
import time
from pathlib import Path

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
from resilient.storage.local import LocalStore
from resilient.storage.posix import PosixFileSystem
from resilient.storage.retry import RetryingStore


def everything(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


class Failing(PosixFileSystem):
    """One operation raises."""

    def __init__(self, operation, error):
        def fail(*_):
            raise error

        setattr(self, operation, fail)


class Stingy(PosixFileSystem):
    """A file that takes a few bytes at a time, and at some point none, or an error."""

    def __init__(self, step=3, limit=1 << 40, error=None):
        self.step, self.limit, self.error = step, limit, error

    def create(self, path):
        handle = super().create(path)
        write, taken = handle.write, 0

        def stingy(data):
            nonlocal taken
            if taken >= self.limit:
                if self.error:
                    raise self.error
                return 0
            taken += self.step
            return write(data[: self.step])

        handle.write = stingy
        return handle


def test_short_writes_are_continued(tmp_path):
    store = LocalStore(tmp_path, Stingy(step=3))
    store.put("a", b"0123456789")
    assert store.get("a") == b"0123456789"


def test_a_file_that_takes_nothing_is_an_error_and_no_endless_loop(tmp_path):
    store = LocalStore(tmp_path, Stingy(limit=6))
    with pytest.raises(StoreError):
        store.put("a", b"0123456789")
    assert everything(tmp_path) == []


@pytest.mark.parametrize(
    ("operation", "step"),
    [
        ("put", "create"),
        ("put", "write"),
        ("put", "replace"),
        ("put_new", "create"),
        ("put_new", "write"),
        ("put_new", "link"),
    ],
)
def test_a_write_that_failed_leaves_the_old_object_and_no_temporary_file(tmp_path, operation, step):
    LocalStore(tmp_path).put("a/kept", b"old")
    error = OSError(errno.ENOSPC, "No space left on device")
    files = Stingy(limit=6, error=error) if step == "write" else Failing(step, error)
    with pytest.raises(StoreFull) as caught:
        getattr(LocalStore(tmp_path, files), operation)("a/new", b"0123456789")
    assert everything(tmp_path) == ["a/kept"]
    assert "a/new" in caught.value.message
    assert caught.value.key == "a/new"
    assert caught.value.hint.startswith("df -h")


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, StoreFull),
        (errno.EDQUOT, StoreFull),
        (errno.EACCES, StoreDenied),
        (errno.EPERM, StoreDenied),
        (errno.EROFS, StoreDenied),
        (errno.ESTALE, StoreUnavailable),
        (errno.ETIMEDOUT, StoreUnavailable),
        (errno.EIO, StoreError),
        (errno.ENAMETOOLONG, StoreError),
    ],
    ids=errno.errorcode.get,
)
def test_an_errno_becomes_the_error_that_says_what_to_do(tmp_path, number, expected):
    error = OSError(number, os.strerror(number))
    for step, run in {
        "create": lambda store: store.put("a", b"x"),
        "replace": lambda store: store.put("a", b"x"),
        "read": lambda store: store.get("a"),
        "size_bytes": lambda store: store.stat("a"),
        "items": lambda store: store.list(),
        "unlink": lambda store: store.delete("a"),
    }.items():
        with pytest.raises(StoreError) as caught:
            run(LocalStore(tmp_path, Failing(step, error)))
        assert caught.type is expected
        assert caught.value.__cause__ is error
        assert os.strerror(number) in caught.value.message


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_hard_links_is_not_exclusive(tmp_path, number):
    store = LocalStore(tmp_path, Failing("link", OSError(number, "no links here")))
    with pytest.raises(NotExclusive, match="no hard links"):
        store.put_new("a", b"x")
    assert everything(tmp_path) == []
    store.put("a", b"x")


def test_a_link_whose_answer_was_lost_is_believed_by_its_count(tmp_path, monkeypatch):
    """NFS: the client repeats the request and is told that the name is taken, by itself."""
    link = os.link

    def twice(source, target, **options):
        link(source, target, **options)
        link(source, target, **options)

    monkeypatch.setattr(os, "link", twice)
    LocalStore(tmp_path).put_new("a", b"mine")
    monkeypatch.undo()
    with pytest.raises(KeyExists):
        LocalStore(tmp_path).put_new("a", b"mine")


@pytest.mark.parametrize("operation", ["put", "put_new"])
@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077, 0o002])
def test_the_umask_decides_who_may_read(tmp_path, operation, umask):
    before = os.umask(umask)
    try:
        getattr(LocalStore(tmp_path), operation)("folder/a", b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "folder/a").stat().st_mode & 0o777 == 0o666 & ~umask
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o777 & ~umask


def test_a_segment_of_255_characters_is_a_name_like_any_other(tmp_path):
    key = "k" * 255
    store = LocalStore(tmp_path)
    store.put(key, b"x")
    store.put_new(f"other/{key}", b"y")
    assert [entry.key for entry in store.list()] == [key, f"other/{key}"]


def test_a_range_reads_only_the_range(tmp_path, monkeypatch):
    store = LocalStore(tmp_path)
    store.put("a", bytes(1 << 20))
    asked = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *args: asked.append(args[1:]) or pread(*args))
    assert len(store.get_range("a", 1000, 10)) == 10
    assert asked == [(10, 1000)]


def test_a_list_does_not_walk_where_the_prefix_cannot_be(tmp_path):
    store = LocalStore(tmp_path)
    for key in ("run-1/a/x", "run-1/b/x", "run-2/x", "other/deep/x"):
        store.put(key, b"x")
    walked = []

    class Watched(PosixFileSystem):
        def items(self, path):
            walked.append(path)
            return super().items(path)

    keys = [entry.key for entry in LocalStore(tmp_path, Watched()).list("run-1/a")]
    assert keys == ["run-1/a/x"]
    assert walked == [tmp_path, tmp_path / "run-1", tmp_path / "run-1/a"]


def test_what_others_left_in_the_folder_is_invisible_and_untouched(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    root = tmp_path / "root"
    store = LocalStore(root)
    store.put("mine/a", b"x")
    (root / "link").symlink_to(outside / "secret")
    (root / "folder-link").symlink_to(outside)
    (root / "loop").symlink_to(root)
    (root / "with space").write_bytes(b"")
    (root / ".hidden").write_bytes(b"")
    os.mkfifo(root / "pipe")
    assert [entry.key for entry in store.list()] == ["mine/a"]
    for key in ("link", "pipe"):
        with pytest.raises(KeyNotFound):
            store.get(key)
        with pytest.raises(KeyNotFound):
            store.stat(key)
    for run in (store.get, store.stat, store.delete, lambda key: store.put(key, b"x")):
        with pytest.raises(StoreDenied, match="symbolic link"):
            run("folder-link/secret")
    assert (outside / "secret").read_bytes() == b"secret"


def test_a_put_on_a_link_replaces_the_link_and_not_what_it_points_to(tmp_path):
    (tmp_path / "elsewhere").write_bytes(b"theirs")
    store = LocalStore(tmp_path / "root")
    store.put("other", b"x")
    (tmp_path / "root" / "a").symlink_to(tmp_path / "elsewhere")
    store.put("a", b"ours")
    assert store.get("a") == b"ours"
    assert (tmp_path / "elsewhere").read_bytes() == b"theirs"


def test_a_delete_removes_the_folders_that_it_empties_and_never_the_root(tmp_path):
    store = LocalStore(tmp_path / "root")
    store.put("a/b/c", b"x")
    store.put("a/d", b"x")
    store.delete("a/b/c")
    assert not (tmp_path / "root/a/b").exists()
    assert store.get("a/d") == b"x"
    store.delete("a/d")
    assert list((tmp_path / "root").iterdir()) == []


def test_a_folder_that_a_delete_takes_away_is_made_again(tmp_path):
    class Undermined(PosixFileSystem):
        left = 5

        def make_folder(self, path):
            super().make_folder(path)
            if self.left:
                self.left -= 1
                path.rmdir()

    LocalStore(tmp_path, Undermined()).put("a/b", b"x")
    assert LocalStore(tmp_path).get("a/b") == b"x"


def test_a_folder_that_never_stays_is_unavailable_and_not_an_endless_loop(tmp_path):
    class Undermined(PosixFileSystem):
        def make_folder(self, path):
            super().make_folder(path)
            path.rmdir()

    with pytest.raises(StoreUnavailable):
        LocalStore(tmp_path, Undermined()).put("a/b", b"x")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="no file system that takes no folders")
@pytest.mark.parametrize("method", ["put", "put_new"])
def test_a_folder_that_can_never_be_made_is_refused_at_once(method):
    """What /proc answers is that of a folder that was removed, and would be tried for a minute."""
    store = RetryingStore(LocalStore(Path("/proc/self/nothing/here")), SystemClock(), 60.0)
    began = time.monotonic()
    with pytest.raises(
        StoreDenied, match=r"does not accept the folder `/proc/[0-9]+/nothing`"
    ) as caught:
        getattr(store, method)("a/b", b"x")
    assert time.monotonic() - began < 5
    assert "another folder" in caught.value.hint


def test_the_url_is_absolute_and_survives_odd_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert LocalStore(tmp_path / "runs").url == f"file://{tmp_path}/runs"
    assert LocalStore(tmp_path / "a b").url == f"file://{tmp_path}/a%20b"


def test_opening_creates_nothing(tmp_path):
    store = LocalStore(tmp_path / "root")
    assert list(store.list()) == []
    store.delete("a")
    assert not (tmp_path / "root").exists()


def test_a_file_system_that_cannot_sync_folders_is_used_as_it_is(tmp_path, monkeypatch):
    fsync, folders = os.fsync, []

    def no_folders(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            folders.append(descriptor)
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", no_folders)
    LocalStore(tmp_path).put("a/b", b"x")
    assert folders
    monkeypatch.undo()
    assert LocalStore(tmp_path).get("a/b") == b"x"


def test_a_put_syncs_its_content_and_every_folder_up_to_the_root(tmp_path, monkeypatch):
    fsync, synced = os.fsync, []

    def watched(descriptor):
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    store = LocalStore(tmp_path / "root")
    store.put("a/b/first", b"x")
    monkeypatch.setattr(os, "fsync", watched)
    store.put("a/b/c", b"x")
    root = str(tmp_path / "root")
    assert synced[0].startswith(f"{root}/a/b/.tmp-")
    assert synced[1:] == [f"{root}/a/b", f"{root}/a", root]


def test_no_file_descriptor_is_left_open(tmp_path):
    store = LocalStore(tmp_path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(20):
        store.put("a/b", b"x" * number)
        store.get("a/b")
        list(store.list())
        with pytest.raises(KeyNotFound):
            store.get("a")
        with pytest.raises(KeyExists):
            store.put_new("a/b", b"")
    assert len(list(Path("/proc/self/fd").iterdir())) == before
