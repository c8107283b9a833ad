"""What killed writers leave on S3 is found and aborted with either client; nothing else is."""

import json
import signal
import subprocess
import sys
import time

import pytest

from resilient.clock import SystemClock
from resilient.engine_factory import open_engine
from resilient.errors import ResilientError, StoreDenied, StoreUnavailable
from resilient.events import Emitter, UploadsAborted
from resilient.state_dict.snapshot import Part
from resilient.storage import s3_multipart
from resilient.storage.options import read_s3_options
from resilient.storage.s3_store import ObstoreStore
from tests.helpers.manifests import Values
from tests.services.faultproxy import Fault

WRITER = """
import json, sys, torch
from resilient import Checkpointer
url, options = sys.argv[1], json.loads(sys.argv[2])
layer = torch.nn.Linear(2048, 4096)
checkpointer = Checkpointer(url, model=layer, storage_options=options)
checkpointer.resume()
print("resumed", flush=True)
sys.stdin.readline()
checkpointer.save(1)
checkpointer.wait()
"""


def wait_for(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.smoke
@pytest.mark.timeout(90)
def test_the_next_life_aborts_what_a_killed_writer_left_and_nothing_of_a_younger_one(
    bucket, proxy, client
):
    options = bucket.options(client, proxy.endpoint, part_bytes=5 << 20)
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, bucket.url, json.dumps(options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as writer:
        assert writer.stdout.readline() == b"resumed\n"
        proxy.fault = Fault(latency_seconds=0.05)
        writer.stdin.write(b"\n")
        writer.stdin.flush()
        wait_for(bucket.uploads)
        writer.send_signal(signal.SIGKILL)
    proxy.fault = Fault()
    left = bucket.uploads()
    assert left
    assert all(key.startswith("run/checkpoint-1-g1/") for key in left)
    younger = [f"run/checkpoint-2-g{number}/model.r00000.safetensors" for number in (2, 9)]
    for key in younger:
        bucket.admin.create_multipart_upload(Bucket=bucket.name, Key=key)
    told = []
    with_ears = Emitter(SystemClock(), (lambda _record, event: told.append(event),))
    checkpointer = open_engine(bucket.url, emit=with_ears, storage_options=options)
    checkpointer.resume({"model": Part(Values(mark=b"x"))})
    checkpointer.close()
    assert sorted(bucket.uploads()) == younger
    assert [one.count for one in told if isinstance(one, UploadsAborted)] == [len(left)]


def test_uploads_are_found_on_every_page(bucket, monkeypatch):
    monkeypatch.setattr(s3_multipart, "_PAGE", 2)
    keys = [f"run/a@{number}+b=c/d" for number in range(5)]
    for key in (*keys, "run2/a"):
        bucket.admin.create_multipart_upload(Bucket=bucket.name, Key=key)
    store = bucket.open("obstore")
    gone = store.sweep(lambda _: True, 0, SystemClock())
    assert sorted(gone) == [key.removeprefix("run/") for key in keys]
    assert bucket.uploads() == ["run2/a"]


def test_with_obstore_alone_no_other_client_is_loaded(bucket):
    bucket.admin.create_multipart_upload(Bucket=bucket.name, Key="run/left")
    code = (
        "import json, sys\n"
        "for name in ('s3fs', 'botocore', 'aiobotocore'): sys.modules[name] = None\n"
        "from resilient.clock import SystemClock\n"
        "from resilient.storage.open import open_store\n"
        "store = open_store(sys.argv[1], storage_options=json.loads(sys.argv[2]))\n"
        "print(store.sweep(lambda key: True, 0, SystemClock()))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, bucket.url, json.dumps(bucket.options(""))],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.stdout == "('left',)\n", ended.stderr


FAILURES = {
    "wrong secret": ({"secret": "canary"}, Fault(), StoreDenied),
    "storm": ({}, Fault(status=503), StoreUnavailable),
    "stalled": ({"request_seconds": 0.5}, Fault(stalled=True), StoreUnavailable),
    "refused": ({}, Fault(refusing=True), StoreUnavailable),
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_the_server_says_of_a_sweep_is_an_error_of_a_store(bucket, proxy, client, name):
    given, fault, kind = FAILURES[name]
    store = bucket.open(client, proxy.endpoint, within_seconds=0, **given)
    proxy.fault = fault
    with pytest.raises(ResilientError) as caught:
        store.sweep(lambda _: True, 0, SystemClock())
    assert type(caught.value) is kind
    assert "canary" not in caught.value.message + caught.value.hint


def test_the_credentials_of_the_environment_are_enough_for_a_sweep(bucket, monkeypatch):
    given = bucket.options("obstore")
    bucket.admin.create_multipart_upload(Bucket=bucket.name, Key="run/left")
    for name, option in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "region",
        "AWS_ENDPOINT_URL": "endpoint",
    }.items():
        monkeypatch.setenv(name, given[option])
    store = ObstoreStore(bucket.url, read_s3_options({}))
    assert store.sweep(lambda _: True, 0, SystemClock()) == ("left",)
