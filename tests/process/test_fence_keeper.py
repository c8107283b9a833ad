"""The daemon's saves at a fence, after the repository was restored from a backup."""

from __future__ import annotations

import shutil

import pytest

from resilient.checkpoint.catalog import committed
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.errors import Fenced
from resilient.format.keys import CheckpointId
from resilient.in_memory_steps import start_step_cache
from resilient.storage.open import open_store
from tests.helpers.keepers import begin, weight

SIZE = 300_000


def content(folder):
    return {str(one): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


def save(checkpointer, step, value):
    checkpointer.save(step, weight(value, SIZE), CheckpointInfo())
    checkpointer.wait()


@pytest.fixture
def run(start, tmp_path):
    """Return a repository with one checkpoint, its folder, and what restores it."""
    folder, backup = tmp_path / "run", tmp_path / "backup"
    first = begin(start(folder="first"), folder)
    save(first, 1, 1)
    first.close()
    shutil.copytree(folder, backup)

    def restore():
        shutil.rmtree(folder)
        shutil.copytree(backup, folder)

    return folder, restore


def claim_again(start, run):
    """Let a process claim generation 2, restore, and let another claim it and save step 2."""
    folder, restore = run
    old = begin(start(folder="old"), folder, scope="old")
    restore()
    new = begin(start(folder="new"), folder, scope="new")
    assert old.generation == new.generation == 2
    return old, new


@pytest.mark.smoke
@pytest.mark.parametrize("step", [2, 3])
def test_fence_save_handed_over_changes_no_file(start, run, step):
    old, new = claim_again(start, run)
    save(new, 2, 5)
    before = content(run[0])
    with pytest.raises(Fenced, match="belongs to another process"):
        save(old, step, 9)
    after = content(run[0])
    assert {name: after[name] for name in before} == before
    assert committed(open_store(str(run[0])))[0] == CheckpointId(2, 2)
    old.close()
    new.close()


def test_fence_cached_step_of_dead_rank_is_not_committed(start, run):
    old, new = claim_again(start, run)
    holding = start_step_cache(old)
    holding.hold(7, weight(9, SIZE), CheckpointInfo(), overlap=False)
    save(new, 2, 5)
    before = content(run[0])
    # As the kernel closes the connections of a rank that is killed.
    holding._client.close()
    old._persister._connection.close()
    old._persister._fallback.close()
    next_one = begin(old._persister.address, run[0], scope="next")
    assert {name: content(run[0])[name] for name in before} == before
    assert CheckpointId(2, 7) not in committed(open_store(str(run[0])))
    next_one.close()
    new.close()
