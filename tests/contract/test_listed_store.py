import pytest

from resilient.testing.memory_store import MemoryStore
from resilient.testing.store_contract import StoreContract
from resilient_cli.store_wrappers import CachedListingStore


class TestListedStore(StoreContract):
    @pytest.fixture
    def store(self):
        return CachedListingStore(MemoryStore(), "")
