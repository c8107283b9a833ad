"""`resilient train` with its repository on S3: the same bits, and no credential anywhere."""

import json
import os
import signal
import subprocess
import sys

import pytest

from resilient.checkpoint.catalog import committed
from resilient.checkpoint.fencing import recorded
from resilient.checkpoint.verify import verify
from resilient.errors import ResilientError
from resilient.format.keys import ABILITIES
from resilient.storage.open import open_store
from tests.helpers.endings import differences, ending
from tests.process.jobs import Job, run
from tests.services.ceph import KEY, SECRET
from tests.services.faultproxy import Fault

PAUSE = ("--pause", "0.08")
STANDARD = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    code, said = run(folder)
    assert code == 0, said
    return ending(folder)


def everything_said(folder, *texts):
    """Return all that a job left on this machine, events included, as one text."""
    files = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    return b"\n".join([*files, *(text.encode() for text in texts)])


@pytest.mark.smoke
def test_a_rank_that_is_killed_ends_with_the_same_bits(
    bucket, proxy, tmp_path, unbroken, monkeypatch
):
    """And a tenth of all requests is reset meanwhile, and nobody reads the secret anywhere."""
    options = bucket.options("", proxy.endpoint)
    monkeypatch.setenv("RESILIENT_STORAGE_OPTIONS", json.dumps(options))
    proxy.fault = Fault(reset_share=0.1)
    events = tmp_path / "events"
    with Job(tmp_path, *PAUSE, launch=("--repo", bucket.url, "--events", str(events))) as job:
        os.kill(job.wait_for_step(10, rank=1), signal.SIGKILL)
        assert job.wait() == 0, job.said()
        said = job.said()
    assert said.count("resumed from checkpoint-") == 1
    assert proxy.broken > 0
    monkeypatch.delenv("RESILIENT_STORAGE_OPTIONS")
    for name, value in {**STANDARD, "AWS_ENDPOINT_URL": bucket.server.endpoint}.items():
        monkeypatch.setenv(name, value)
    assert differences(ending(bucket.url), unbroken) == []
    store = open_store(bucket.url)
    assert [verify(store, one, "deep") for one in committed(store)] == [[]] * 3
    assert recorded(store) is True
    stored = b"".join(store.get(entry.key) for entry in store.list())
    assert ABILITIES in {entry.key for entry in store.list()}
    for where in (everything_said(tmp_path, said), stored):
        assert SECRET.encode() not in where
        assert KEY.encode() not in where
        assert b"storage_options" not in where


CANARY = "canary-secret-value"
WRONG = {
    "denied": {"secret": CANARY},
    "misspelled": {"secret": CANARY, "secrt": CANARY},
    "nobody there": {"secret": CANARY, "endpoint": "http://127.0.0.1:9"},
    "odd region": {"secret": CANARY, "region": "no/region"},
}


@pytest.mark.parametrize("name", WRONG)
def test_no_error_shows_a_credential(bucket, client, name):
    options = {**bucket.options(client), **WRONG[name]}

    def write():
        open_store(bucket.url, within_seconds=0, storage_options=options).put("a", b"x")

    with pytest.raises(ResilientError) as caught:
        write()
    assert CANARY not in caught.value.message + caught.value.hint


@pytest.mark.parametrize("name", ["denied", "misspelled"])
@pytest.mark.parametrize(
    "command",
    [
        ("ckpt", "ls"),
        ("ckpt", "verify", "--json"),
        ("train", "--dry-run", "--repo"),
        ("train", "--help"),
    ],
    ids=" ".join,
)
def test_no_command_shows_a_credential(bucket, name, command):
    options = json.dumps({**bucket.options(""), **WRONG[name]})
    url = bucket.url.replace("s3://", f"s3://user:{CANARY}@")
    script = [__file__] if command[0] == "train" else []
    ended = subprocess.run(
        [sys.executable, "-m", "resilient_cli", *command, url, *script],
        env={**os.environ, "RESILIENT_STORAGE_OPTIONS": options},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert CANARY not in ended.stdout + ended.stderr
    assert ended.stdout + ended.stderr


def test_the_standard_variables_are_enough(bucket, client):
    code = (
        "import sys; from resilient.storage.open import open_store\n"
        "store = open_store(sys.argv[1], within_seconds=0,\n"
        "                   storage_options={'client': sys.argv[2]})\n"
        "store.put('a', b'x'); print(store.get('a'))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, bucket.url, client],
        env={**os.environ, **STANDARD, "AWS_ENDPOINT_URL": bucket.server.endpoint},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.stdout == "b'x'\n", ended.stderr


UNCLOSED = """
import sys
import torch
from resilient import Checkpointer

model = torch.nn.Linear(2048, 5000)
opened = Checkpointer(sys.argv[1], model=model)
opened.resume()
opened.save(1)
"""


def test_the_last_save_of_a_script_that_closes_nothing_is_there(bucket, client):
    """To find a host by its name s3fs needs a pool, which takes no work when Python ends."""
    options = bucket.options(client, bucket.server.endpoint.replace("127.0.0.1", "localhost"))
    ended = subprocess.run(
        [sys.executable, "-c", UNCLOSED, bucket.url],
        env={**os.environ, "RESILIENT_STORAGE_OPTIONS": json.dumps(options)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    store = bucket.open(client)
    assert [verify(store, one, "full") for one in committed(store)] == [[]], ended.stderr
