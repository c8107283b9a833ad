import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from resilient.errors import ConfigError, StoreUnavailable
from resilient.storage.fsspec_store import FsspecStore
from resilient.storage.local import LocalStore
from resilient.storage.open import local_path, open_store
from resilient.storage.urls import redacted, redacted_text


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("/abs/run", "/abs/run"),
        ("rel/run", "rel/run"),
        ("file:///abs/run", "/abs/run"),
        ("file:/abs/run", "/abs/run"),
        ("file://localhost/abs/run", "/abs/run"),
        ("FILE:///abs/run", "/abs/run"),
        ("file:///with%20space", "/with space"),
        ("/with%20percent", "/with%20percent"),
        ("a:b", "a:b"),
    ],
)
def test_a_path_or_a_file_url_names_a_folder(url, path):
    assert local_path(url) == Path(path)


def test_the_home_folder_is_known(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert local_path("~/runs") == Path("/home/someone/runs")


def test_a_local_store_can_be_opened_by_its_own_url(tmp_path):
    store = open_store(str(tmp_path / "a b"))
    store.put("a", b"x")
    assert open_store(store.url).get("a") == b"x"
    assert isinstance(open_store(store.url)._store, LocalStore)


def test_anything_else_is_given_to_fsspec():
    assert isinstance(open_store("memory://somewhere")._store, FsspecStore)


@pytest.mark.parametrize("url", ["", "  ", "file://machine/run", "nonsense://bucket/run"])
def test_a_url_that_cannot_be_meant_is_refused_with_a_way_on(url):
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("url", "extra"), [("gs://bucket/run", "gcs"), ("abfs://box/run", "azure")]
)
def test_a_missing_package_is_named_with_the_extra_that_installs_it(url, extra, monkeypatch):
    for name in ("gcsfs", "adlfs"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert caught.value.hint == f"pip install 'resilient-train[{extra}]'"


def test_a_chained_url_is_refused_because_a_cache_lies():
    with pytest.raises(ConfigError, match="chained"):
        open_store("simplecache::memory://run")


def test_a_server_that_is_not_there_is_an_error_of_ours():
    with socket.socket() as taken:
        # Bound and not listening: nobody else answers there.
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(StoreUnavailable, match=r"cannot open ftp://.*refused") as raised:
            open_store(f"ftp://somebody:secret@127.0.0.1:{port}/run")
    assert "secret" not in f"{raised.value} {raised.value.hint}"


def test_a_server_that_closes_the_door_is_one_too():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            with server.accept()[0] as talk:
                talk.sendall(b"421 Too many users\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(StoreUnavailable, match="421"):
            open_store(f"ftp://127.0.0.1:{server.getsockname()[1]}/run")
        thread.join()


def test_a_local_path_does_not_load_fsspec():
    code = (
        "import sys; from resilient.storage.open import open_store; open_store('/nowhere');"
        "sys.exit(any(name in sys.modules for name in ('fsspec', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_secret_in_a_url_is_never_shown():
    canary = "canary-secret"
    url = f"s3://user:{canary}@bucket/run?signature={canary}#{canary}"
    assert redacted(url) == "s3://bucket/run"
    assert canary not in redacted(f"s3://[{canary}@:{canary}/x?{canary}")
    text = redacted_text(f"GET https://user:{canary}@host/x?X-Amz-Signature={canary}&a=b: refused")
    assert canary not in text
    assert text.endswith("refused")
    with pytest.raises(ConfigError) as caught:
        open_store(f"nonsense://user:{canary}@bucket?key={canary}")
    assert canary not in caught.value.message + caught.value.hint
