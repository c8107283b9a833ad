import socket
import sys
import threading
import uuid

import pytest

from resilient.errors import (
    KeyExists,
    KeyNotFound,
    NotExclusive,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from resilient.storage.errors import code_of, is_missing, status_of
from resilient.storage.folder import open_folder
from resilient.storage.fsspec_store import FsspecStore


@pytest.fixture
def store():
    return FsspecStore(f"memory://{uuid.uuid4().hex}")


class Recorder:
    """Stands in for a filesystem: answers from a table, or raises."""

    def __init__(self, **answers):
        self.answers, self.calls = answers, []

    def __getattr__(self, name):
        def call(*args, **options):
            self.calls.append((name, args, options))
            answer = self.answers.get(name)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


def with_filesystem(store, **answers):
    store._filesystem = Recorder(**answers)
    return store


def test_an_object_is_put_by_one_call(store):
    with_filesystem(store).put("a/b", memoryview(b"content"))
    ((name, args, _),) = store._filesystem.calls
    assert name == "pipe_file"
    assert args[1] == b"content"
    assert type(args[1]) is bytes


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (PermissionError("no"), StoreDenied),
        (TimeoutError("slow"), StoreUnavailable),
        (ConnectionResetError("gone"), StoreUnavailable),
        (OSError(28, "No space left on device"), StoreFull),
        (OSError(5, "Input/output error"), StoreError),
        (OSError(16, "slow down"), StoreUnavailable),
        (ValueError("what"), StoreError),
        (EOFError("cut"), StoreUnavailable),
        (NotImplementedError("never"), StoreError),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_a_library_raises_becomes_an_error_of_ours(store, error, expected):
    with_filesystem(store, pipe_file=error, cat_file=error, find=error, rm_file=error, info=error)
    for run in (
        lambda: store.put("a", b"x"),
        lambda: store.get("a"),
        lambda: store.get_range("a", 0, 1),
        lambda: list(store.list()),
        lambda: store.delete("a"),
        lambda: store.stat("a"),
    ):
        with pytest.raises(StoreError) as caught:
            run()
        assert caught.type is expected
        assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [FileNotFoundError("x"), IsADirectoryError("x")])
def test_a_missing_file_is_a_missing_key(store, error):
    with_filesystem(store, cat_file=error, info=error, find=error, rm_file=error)
    with pytest.raises(KeyNotFound):
        store.get("a")
    with pytest.raises(KeyNotFound):
        store.stat("a")
    assert list(store.list()) == []
    store.delete("a")


def test_a_listing_cache_is_dropped_before_each_look(store):
    with_filesystem(store, find={}, info={"type": "file", "size": 1})
    list(store.list())
    store.stat("a")
    names = [name for name, _, _ in store._filesystem.calls]
    assert names == ["invalidate_cache", "find", "invalidate_cache", "info"]


def test_a_cached_listing_is_switched_off_where_there_is_one():
    pytest.importorskip("s3fs")
    store = FsspecStore("s3://bucket/run", anon=True, config_kwargs={"connect_timeout": 1})
    assert store._filesystem.dircache.use_listings_cache is False
    assert store._filesystem.config_kwargs["connect_timeout"] == 1
    assert store._filesystem.config_kwargs["read_timeout"] == 60
    assert store._filesystem.retries == 1


def test_an_old_client_that_would_ignore_the_condition_is_not_exclusive(monkeypatch):
    pytest.importorskip("s3fs")
    from resilient.storage import fsspec_store

    assert FsspecStore("s3://bucket/run", anon=True).exclusive
    monkeypatch.setattr(fsspec_store, "version", lambda _: "1.35.19")
    store = FsspecStore("s3://bucket/run", anon=True)
    assert not store.exclusive
    with pytest.raises(NotExclusive):
        store.put_new("a", b"x")
    monkeypatch.undo()
    monkeypatch.setattr(type(store._filesystem), "_pipe_file", lambda self, path, data, **kw: None)
    assert not FsspecStore("s3://bucket/run", anon=True).exclusive


@pytest.mark.parametrize("url", ["file:///nowhere", "local:///nowhere"])
def test_look_then_write_is_never_called_exclusive(url):
    store = FsspecStore(url)
    assert not store.exclusive
    with pytest.raises(NotExclusive):
        store.put_new("a", b"x")


def test_memory_is_exclusive_even_when_the_look_is_slow(store, monkeypatch):
    """The filesystem itself looks and then writes; a pause between the two shows it."""
    isfile, pause = type(store._filesystem).isfile, threading.Event()

    def slow(self, path):
        found = isfile(self, path)
        pause.wait(0.01)
        return found

    monkeypatch.setattr(type(store._filesystem), "isfile", slow)
    won = []

    def claim(number):
        try:
            store.put_new("claim", f"{number}".encode())
            won.append(number)
        except KeyExists:
            pass

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert store.get("claim") == f"{won[0]}".encode()


def test_a_status_is_found_in_the_cause_of_the_error():
    inner = Exception("inner")
    inner.response = {
        "ResponseMetadata": {"HTTPStatusCode": 412},
        "Error": {"Code": "PreconditionFailed"},
    }
    outer = OSError(22, "outer")
    outer.__cause__ = inner
    assert (status_of(outer), code_of(outer)) == (412, "PreconditionFailed")
    assert (status_of(OSError(5, "x")), code_of(OSError(5, "x"))) == (0, "")


def test_a_secret_in_anothers_message_is_not_passed_on(store):
    canary = "canary-secret"
    error = OSError(5, f"PUT https://user:{canary}@host/key?X-Amz-Signature={canary} failed")
    with_filesystem(store, cat_file=error)
    with pytest.raises(StoreError) as caught:
        store.get("a")
    assert canary not in caught.value.message + caught.value.hint


def test_the_url_of_a_store_is_fit_for_a_log():
    pytest.importorskip("s3fs")
    assert "s3fs" in sys.modules
    assert FsspecStore("s3://bucket/run", anon=True).url == "s3://bucket/run"


def test_a_host_that_nobody_reaches_is_away_and_nothing_is_said_of_the_file():
    lost = FileNotFoundError("http://127.0.0.1:1/a")
    assert is_missing(lost)
    for cause, missing in ((ConnectionRefusedError(111, "refused"), False), (KeyError(), True)):
        lost.__cause__ = cause
        assert is_missing(lost) is missing


def test_a_port_where_nobody_listens_is_no_answer():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        folder = open_folder(f"http://127.0.0.1:{taken.getsockname()[1]}/model.safetensors")
        with pytest.raises(StoreUnavailable, match="Cannot connect to host"):
            folder.list()


def test_a_hub_that_nobody_answers_for_is_unavailable(monkeypatch):
    hub = pytest.importorskip("huggingface_hub.constants")
    # The address is read when the filesystem is made.
    monkeypatch.setattr(hub, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(StoreUnavailable):
        list(FsspecStore("hf://gpt2/nobody").list())
