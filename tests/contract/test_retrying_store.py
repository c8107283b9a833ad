import uuid

import pytest

from resilient.clock import SystemClock
from resilient.storage.local import LocalStore
from resilient.storage.open import open_store
from resilient.storage.retry import RetryingStore
from resilient.testing.fault_store import FaultPlan, FaultyStore, StoreFaultKind
from resilient.testing.memory_store import MemoryStore
from resilient.testing.store_contract import StoreContract


class StillClock(SystemClock):
    """Time that passes only when someone sleeps."""

    def __init__(self):
        self.seconds = 0.0

    def monotonic_seconds(self):
        return self.seconds

    def sleep(self, seconds):
        self.seconds += seconds


class TestRetryingMemory(StoreContract):
    @pytest.fixture
    def store(self):
        return RetryingStore(MemoryStore(), StillClock())


class TestRetryingOverAnUnreliableStore(StoreContract):
    """Every third operation gets no answer, half of them although they happened."""

    @pytest.fixture
    def store(self):
        plan = FaultPlan.drawn(
            7, 3000, 1000, (StoreFaultKind.ERROR_ONCE, StoreFaultKind.ERROR_AFTER)
        )
        return RetryingStore(FaultyStore(MemoryStore(), plan), StillClock(), 600)


class TestOpenedFolder(StoreContract):
    @pytest.fixture
    def store(self, tmp_path):
        store = open_store(str(tmp_path / "run"))
        assert isinstance(store._store, LocalStore)
        return store


class TestOpenedMemory(StoreContract):
    @pytest.fixture
    def store(self):
        return open_store(f"memory://{uuid.uuid4().hex}")
