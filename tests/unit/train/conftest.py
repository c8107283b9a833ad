from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fakes import MemoryRepository

from resilient.train import session


@pytest.fixture
def repository(monkeypatch):
    """Let every trainer of a test save to the same memory."""
    made = MemoryRepository()
    monkeypatch.setattr(session, "open_engine", made.open)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "RESILIENT_RESUME"):
        monkeypatch.delenv(name, raising=False)
    return made
