import pytest

from resilient.testing.memory import MemoryStore
from resilient.testing.store_contract import StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self):
        return MemoryStore()
