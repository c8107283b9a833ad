import pytest

from resilient.testing.memory_store import MemoryStore
from resilient.testing.store_contract import StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self):
        return MemoryStore()
