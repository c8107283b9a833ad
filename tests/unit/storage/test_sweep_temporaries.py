import os

from resilient.checkpoint.context import CheckpointContext, CheckpointOptions
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.checkpoint_engine import CheckpointEngine
from resilient.clock import SystemClock
from resilient.distributed.coordination import ControlGroup
from resilient.distributed.kv_store import InMemoryKVStore
from resilient.distributed.launch_env import World
from resilient.events import Emitter
from resilient.state_dict.snapshot import Part
from resilient.storage.local import LocalStore, sweep_temporaries
from tests.helpers.manifests import Values


def test_only_old_temporary_files_are_swept(tmp_path):
    store = LocalStore(tmp_path)
    store.put("a/object", b"x")
    paths = [tmp_path / "a" / name for name in (".tmp-1-old", ".tmp-2-new", ".foreign")]
    for path in paths:
        path.write_bytes(b"half")
    for path in (paths[0], paths[2], tmp_path / "a/object"):
        os.utime(path, (1, 1))
    (tmp_path / "a/.tmp-link").symlink_to(tmp_path / "a/object")
    assert sweep_temporaries(tmp_path, 3600, SystemClock()) == [paths[0]]
    assert not paths[0].exists()
    assert paths[1].exists()
    assert paths[2].exists()
    assert store.get("a/object") == b"x"


def test_a_missing_store_has_nothing_to_sweep(tmp_path):
    assert sweep_temporaries(tmp_path / "none", 0, SystemClock()) == []


def live(store, steps):
    """Live one life; return what it resumed from and its number."""
    desk = CheckpointContext(
        store,
        ControlGroup(InMemoryKVStore(), World(), "life"),
        CheckpointOptions(),
        CLOCK,
        Emitter(CLOCK),
    )
    checkpointer = CheckpointEngine(desk)
    parts = {"model": Part(Values(word="x"))}
    resumed = checkpointer.resume(parts)
    for step in steps:
        checkpointer.save(step, parts, CheckpointInfo())
    checkpointer.close()
    return resumed, checkpointer.generation


CLOCK = SystemClock()


def test_a_life_sweeps_what_killed_writers_of_older_lives_left_and_nothing_else(tmp_path):
    store = LocalStore(tmp_path)
    assert live(store, (1,)) == (None, 1)
    left = [
        tmp_path / "checkpoint-2-g1/.tmp-77-0123456789abcdef",
        tmp_path / "checkpoint-1-g1/.tmp-77-0123456789abcdef",
    ]
    kept = [
        # Of a life to come, of nobody's, of a record that may be being written now, foreign.
        tmp_path / "checkpoint-2-g9/.tmp-78-0123456789abcdef",
        tmp_path / "mine/.tmp-78-0123456789abcdef",
        tmp_path / "generations/.tmp-78-0123456789abcdef",
        tmp_path / "checkpoint-1-g1/.foreign",
    ]
    for path in (*left, *kept):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"half")
    resumed, number = live(store, (2,))
    assert (resumed.step, number) == (1, 2)
    assert [path for path in left if path.exists()] == []
    assert not left[0].parent.exists(), "the folder that it leaves empty goes too"
    assert [path for path in kept if not path.exists()] == []


def test_temporaries_that_may_not_be_removed_stop_nobody(tmp_path, monkeypatch):
    store = LocalStore(tmp_path)
    live(store, (1,))
    path = tmp_path / "checkpoint-2-g1/.tmp-77-0123456789abcdef"
    path.parent.mkdir()
    path.write_bytes(b"half")

    def refuse(self, missing_ok=False):
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr("pathlib.Path.unlink", refuse)
    resumed, _ = live(store, ())
    assert resumed.step == 1
