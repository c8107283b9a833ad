"""A line between hosts is cut while a save is committed: who does not know deletes nothing."""

from __future__ import annotations

import threading

import pytest

from resilient.checkpoint.catalog import read_manifest
from resilient.checkpoint.promotion_policy import TieringOptions
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.checkpoint_engine import CheckpointEngine
from resilient.distributed.kv_store import InMemoryKVStore
from resilient.errors import PeerFailed, SaveFailed
from resilient.format.keys import CheckpointId
from resilient.state_dict.snapshot import Part
from resilient.testing.memory_store import MemoryStore, run_ranks
from tests.crash.lives import Folded
from tests.helpers.hosts import host
from tests.helpers.tiered import desk_over

SECOND = CheckpointId(1, 2)
PATIENCE_SECONDS = 60


class Cut(InMemoryKVStore):
    """Loses the ruling over the second save, while the coordinator still commits it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_committing, self.is_given_up = threading.Event(), threading.Event()

    def wait(self, keys, within_seconds):
        if keys[0].endswith("save/2/ruling"):
            assert self.is_committing.wait(PATIENCE_SECONDS)
            raise PeerFailed("the line is cut")
        return super().wait(keys, within_seconds)


class Slow(MemoryStore):
    """The coordinator's disk: the second manifest gets there after the other host gave up."""

    def __init__(self, board) -> None:
        super().__init__("test://near")
        self.board = board

    def put_new(self, key, data) -> None:
        if key == SECOND.manifest_key:
            self.board.is_committing.set()
            assert self.board.is_given_up.wait(PATIENCE_SECONDS)
        super().put_new(key, data)


def test_a_host_whose_line_is_cut_keeps_the_files_of_what_may_be_committed():
    board, durable = Cut(), MemoryStore("test://durable")
    nears = [Slow(board), host("b")]

    def rank_main(world, _):
        near = nears[world.rank]
        desk = desk_over(
            near, durable, tiering=TieringOptions(durable_every=99), kv_store=board, world=world
        )
        checkpointer, state = CheckpointEngine(desk), Folded(0, is_large=True)
        parts = {"model": Part(state), "rng_state": Part(Folded(world.rank), "rank")}
        checkpointer.resume(parts)
        for step in (1, 2):
            state.step()
            checkpointer.save(step, parts, CheckpointInfo())
            if (world.rank, step) == (1, 2):
                with pytest.raises(SaveFailed, match="the line is cut"):
                    checkpointer.wait()
                board.is_given_up.set()
            else:
                checkpointer.wait()
        checkpointer._overlap.close()
        checkpointer._persister.close()
        checkpointer._context.close()

    run_ranks(2, rank_main)
    manifest = read_manifest(nears[0], SECOND)
    theirs = {manifest.key(one.name) for one in manifest.files if one.rank == 1}
    assert theirs
    assert theirs <= nears[1].objects.keys()
