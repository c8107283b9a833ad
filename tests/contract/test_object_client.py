import pytest

from resilient.testing.object_server import ObjectClient, ObjectServer
from resilient.testing.store_contract import StoreContract


class TestObjectClient(StoreContract):
    @pytest.fixture
    def store(self):
        return ObjectClient(ObjectServer(), part_bytes=300, page=3)
