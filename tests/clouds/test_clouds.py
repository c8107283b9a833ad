"""``gs://`` and ``az://`` keep the promises of a Store, on emulators: ``make clouds``."""

import json
import os
import subprocess
import sys
import uuid

import pytest

from resilient.checkpoint.fencing import check_store_capabilities, recorded
from resilient.clock import SystemClock
from resilient.errors import KeyExists, StoreError
from resilient.storage.open import open_store
from resilient.testing.store_contract import StoreContract
from tests.services.clouds import azure_program, azurite, fake_gcs, gcs_program


@pytest.fixture(scope="session")
def gcs():
    # Its class for zonal buckets asks over gRPC, which the emulator does not speak.
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
    pytest.importorskip("gcsfs", reason="not installed: make clouds")
    program = gcs_program()
    if program is None:
        pytest.skip("fake-gcs-server is not installed: make clouds")
    with fake_gcs(program) as endpoint:
        yield {"endpoint": endpoint, "token": "anon", "project": "test"}


@pytest.fixture(scope="session")
def azure(tmp_path_factory):
    pytest.importorskip("adlfs", reason="not installed: make clouds")
    program = azure_program()
    if program is None:
        pytest.skip("Azurite is not installed: make clouds")
    with azurite(program, tmp_path_factory.mktemp("azurite")) as connection:
        yield {"connection_string": connection}


def made(protocol, options):
    """Make a bucket and return the URL of a repository in it."""
    import fsspec

    from resilient.storage.options import for_cloud

    name = f"test-{uuid.uuid4().hex[:12]}"
    fsspec.filesystem(protocol, **for_cloud(protocol, options)).mkdir(name)
    return f"{protocol}://{name}/run"


class Cloud(StoreContract):
    @pytest.fixture
    def store(self, place):
        url, options = place
        store = open_store(url, within_seconds=20, storage_options=options)
        assert store.exclusive
        return store

    def test_a_repository_there_is_raced_for_once_and_the_verdict_recorded(self, store):
        check_store_capabilities(store, SystemClock())
        assert recorded(store) is True

    def test_a_key_that_is_taken_is_kept_whatever_comes(self, store):
        store.put_new("a", b"first")
        with pytest.raises(KeyExists):
            store.put_new("a", b"first")
        assert store.get("a") == b"first"

    def test_a_checkpoint_is_saved_and_resumed_from(self, place):
        url, options = place
        for life in (1, 2):
            ended = subprocess.run(
                [sys.executable, "-c", TRAINING, url, json.dumps(options)],
                capture_output=True,
                text=True,
                check=False,
                timeout=90,
            )
            assert ended.returncode == 0, ended.stderr
            assert ended.stdout == f"{life - 1 or None}\n"

    def test_what_no_server_answers_is_an_error_of_a_store(self, place):
        url, options = place
        store = open_store(url.replace("test-", "none-"), within_seconds=0, storage_options=options)
        with pytest.raises(StoreError):
            store.put("a", b"x")


TRAINING = """
import json, sys, torch
from resilient import Checkpointer
layer = torch.nn.Linear(3000, 1000)
checkpointer = Checkpointer(sys.argv[1], model=layer, storage_options=json.loads(sys.argv[2]))
step = checkpointer.resume()
print(step)
checkpointer.save((step or 0) + 1)
checkpointer.close()
"""


class TestGoogle(Cloud):
    @pytest.fixture
    def place(self, gcs):
        return made("gs", gcs), gcs


class TestAzure(Cloud):
    @pytest.fixture
    def place(self, azure):
        return made("az", azure), azure
