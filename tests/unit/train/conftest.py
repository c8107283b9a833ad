from __future__ import annotations

import pytest

from resilient.train import session
from tests.unit.train.fakes import MemoryRepository


@pytest.fixture
def repository(monkeypatch):
    """Let every trainer of a test save to the same memory."""
    made = MemoryRepository()
    monkeypatch.setattr(session, "open_engine", made.open)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "RESILIENT_RESUME"):
        monkeypatch.delenv(name, raising=False)
    return made
