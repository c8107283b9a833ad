import uuid

import pytest

from resilient.storage.fsspec_store import FsspecStore
from resilient.testing.store_contract import StoreContract


class TestFsspecMemory(StoreContract):
    @pytest.fixture
    def store(self):
        return FsspecStore(f"memory://{uuid.uuid4().hex}/run")


class TestFsspecFile(StoreContract):
    """Any filesystem of fsspec, and the worst: it writes in place and knows no exclusive create."""

    atomic = False

    @pytest.fixture
    def store(self, tmp_path):
        store = FsspecStore(f"file://{tmp_path}/run")
        assert not store.exclusive
        return store
