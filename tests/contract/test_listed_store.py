import pytest

from resilient.testing.memory import MemoryStore
from resilient.testing.store_contract import StoreContract
from resilient_cli.listed import ListedStore


class TestListedStore(StoreContract):
    @pytest.fixture
    def store(self):
        return ListedStore(MemoryStore(), "")
