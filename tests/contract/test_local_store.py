import pytest

from resilient.storage.local import LocalStore
from resilient.testing.power_loss import PowerLossFileSystem
from resilient.testing.store_contract import StoreContract


class TestLocalStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path):
        return LocalStore(tmp_path / "made" / "by" / "the" / "first" / "put")


class TestLocalStoreOverPowerLossFiles(StoreContract):
    """The model has to be a file system, too, or what it proves is worth nothing."""

    @pytest.fixture
    def store(self, tmp_path):
        return LocalStore(tmp_path / "nowhere", PowerLossFileSystem())
