"""What a failed save, or a failed step after a commit, leaves to the saves that follow it."""

from __future__ import annotations

import pytest
from one_rank import open_one
from tiered import checkpointer_of, save

from resilient.errors import StoreUnavailable
from resilient.testing.memory import MemoryStore
from resilient.vault.registry.generations import check_mark


class Unmarkable(MemoryStore):
    """Refuses to put the first mark of a life."""

    def __init__(self, url="test://unmarkable") -> None:
        super().__init__(url)
        self.refused = 0

    def put(self, key, data) -> None:
        if key.endswith(".committed.json") and not self.refused:
            self.refused += 1
            raise StoreUnavailable("the line is cut", key=key)
        super().put(key, data)


def test_a_mark_that_failed_is_put_after_the_next_save():
    store = Unmarkable()
    checkpointer = open_one(store)
    checkpointer.resume({})
    save(checkpointer, 1, 2)
    checkpointer.close()
    assert store.refused == 1
    check_mark(store, 1)


@pytest.mark.parametrize("unmarkable", ["near", "durable"])
def test_a_mark_that_failed_in_a_tier_is_put_after_the_next_that_it_takes(unmarkable):
    stores = {name: MemoryStore(f"test://{name}") for name in ("near", "durable")}
    stores[unmarkable] = Unmarkable()
    checkpointer = checkpointer_of(stores["near"], stores["durable"])
    save(checkpointer, 1, 2)
    checkpointer.close()
    assert stores[unmarkable].refused == 1
    check_mark(stores["near"], 1)
    check_mark(stores["durable"], 1)
