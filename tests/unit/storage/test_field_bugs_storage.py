"""Pains of the field with storage, each by its report; 40 of group E.

PT is pytorch/pytorch, TF huggingface/transformers. Hangs and signals need ranks or processes:
``tests/gang/test_field_bugs_elastic.py``, ``tests/process/test_stop_signals.py``.
"""

from __future__ import annotations

import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from resilient.checkpoint.catalog import committed
from resilient.checkpoint.verify import verify
from resilient.errors import KeyNotFound
from resilient.format.keys import CheckpointId
from resilient.storage.fsspec_store import FsspecStore
from resilient.storage.local import LocalStore
from resilient.storage.open import open_store
from tests.helpers.manifests import begin, save


def test_pt_142396_a_remote_file_needs_no_descriptor_to_be_durable(monkeypatch):
    """Also PT#144752: ``os.fsync`` of a remote file has nothing to sync and crashed."""

    def refuse(*_):
        raise AssertionError("a remote file has no descriptor")

    monkeypatch.setattr("os.fsync", refuse)
    monkeypatch.setattr("os.sync", refuse)
    store = FsspecStore(f"memory://{uuid.uuid4().hex}")
    begin(store)
    save(store, CheckpointId(1, 1))
    assert verify(store, CheckpointId(1, 1), "deep") == []


def test_pt_183878_everything_put_is_closed_and_flushed_before_put_returns():
    name = uuid.uuid4().hex
    store = FsspecStore(f"memory://{name}")
    for size_bytes in (0, 1, 65_537, 3 << 20):
        store.put("a/object", b"x" * size_bytes)
        assert MemoryFileSystem().cat_file(f"/{name}/a/object") == b"x" * size_bytes


def test_pt_116198_an_object_store_is_spoken_to_by_urls_and_no_path_is_made_here(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    store = open_store(f"memory://{uuid.uuid4().hex}/run")
    begin(store)
    save(store, CheckpointId(1, 1))
    assert committed(store) == [CheckpointId(1, 1)]
    assert list(tmp_path.iterdir()) == []


class Asked(BaseHTTPRequestHandler):
    """Answers that nothing is there, and keeps what was asked for and of which host."""

    def answer(self):
        self.server.asked.append((self.headers["Host"], self.path))
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD = answer  # noqa: N815 - the field's names

    def log_message(self, *_):
        pass


@pytest.fixture
def asked():
    with ThreadingHTTPServer(("127.0.0.1", 0), Asked) as server:
        server.asked = []
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
def test_s3_connector_295_a_bucket_with_dots_is_a_bucket(asked, client):
    """With a name of the host's form, TLS would not match; so the name goes into the path."""
    pytest.importorskip(client)
    host = f"localhost:{asked.server_port}"
    store = open_store(
        "s3://my.bucket.name/runs/gpt2",
        within_seconds=0,
        storage_options={
            "client": client,
            "endpoint": f"http://{host}",
            "key": "a",
            "secret": "b",
            "region": "us-east-1",
        },
    )
    with pytest.raises(KeyNotFound):
        store.get("tags/a.json")
    assert (host, "/my.bucket.name/runs/gpt2/tags/a.json") in asked.asked
    # One of the clients looks for a folder of that name as well.
    hosts, paths = zip(*asked.asked, strict=True)
    assert set(hosts) == {host}
    assert all(path.partition("?")[0].split("/")[1] == "my.bucket.name" for path in paths)


def test_olmo_894_nodes_that_make_the_same_folders_at_once_do_not_hurt_each_other(tmp_path):
    """Also TF#27925, and Automodel PR#3686: no folder is renamed, and one that exists is fine."""
    gate, failed = threading.Barrier(8), []

    def work(rank):
        store = LocalStore(tmp_path)
        try:
            for step in range(1, 21):
                gate.wait(20)
                store.put(f"checkpoint-{step}-g1/model.r{rank:05d}.safetensors", b"x" * 100)
        except Exception as error:  # noqa: BLE001 - whatever it is, the test must show it
            failed.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert len(list(LocalStore(tmp_path).list("checkpoint-"))) == 160


def test_tf_27925_what_is_visible_is_whole_though_a_folder_is_not_renamed(tmp_path):
    """There is no temporary folder that all nodes must have left before one may rename it."""
    store = LocalStore(tmp_path)
    begin(store)
    save(store, CheckpointId(1, 1))
    seen = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert sorted(path.name for path in seen) == ["checkpoint-1-g1", "generations"]
