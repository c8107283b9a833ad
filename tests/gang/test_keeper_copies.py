"""What the keeper copies beside the staged bytes counts against its bound."""

from __future__ import annotations

import pytest

from resilient.checkpoint.context import CheckpointContext, CheckpointOptions
from resilient.checkpoint.daemon import memory
from resilient.checkpoint.daemon.client import DaemonSaveExecutor
from resilient.checkpoint.daemon.memory import MemoryQuota, SharedMemoryPool
from resilient.checkpoint.daemon.messages import DaemonAddress
from resilient.checkpoint.daemon.server import SaverDaemon
from resilient.checkpoint.save.executor import ThreadSaveExecutor
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.checkpoint.verify import verify
from resilient.checkpoint_engine import CheckpointEngine
from resilient.clock import SystemClock
from resilient.distributed.coordination import ControlGroup
from resilient.distributed.kv_store import InMemoryKVStore, KVStoreServer
from resilient.distributed.launch_env import World
from resilient.events import Emitter
from resilient.format.keys import CheckpointId
from resilient.storage.open import open_store
from resilient.storage.shared_memory import SPARE_BYTES, SharedFolder
from tests.helpers.manifests import frozen_parts_of

SECOND = CheckpointId(1, 2)


def saved_twice(tmp_path, host_bytes_max) -> tuple[int, int]:
    """Save a model of which little changes under a bound; return bytes staged, and written last."""
    url, told = str(tmp_path / f"run-{host_bytes_max}"), []
    folder = SharedFolder(tmp_path)
    room = SharedMemoryPool(folder, MemoryQuota(host_bytes_max))
    path = tmp_path / f"keeper-{host_bytes_max}"
    keeper = SaverDaemon(path, room, KVStoreServer(), SystemClock())
    emit = Emitter(SystemClock(), (lambda _, event: told.append(type(event).__name__),))
    desk = CheckpointContext(
        open_store(url),
        ControlGroup(InMemoryKVStore(), World(), "s"),
        CheckpointOptions(),
        SystemClock(),
        emit,
    )
    address = DaemonAddress(str(path), url=url)
    checkpointer = CheckpointEngine(desk, DaemonSaveExecutor(address, ThreadSaveExecutor()))
    checkpointer.resume({})
    for number in (1, 2):
        checkpointer.save(number, frozen_parts_of(number), CheckpointInfo())
        checkpointer.wait()
    staged_bytes = room._used_bytes
    checkpointer.close()
    keeper.close()
    folder.close()
    assert "DaemonBypassed" not in told, "the keeper did it"
    assert verify(open_store(url), SECOND, "deep") == []
    return staged_bytes, open_store(url).stat(SECOND.key("model.r00000.safetensors")).size_bytes


def test_a_file_is_shortened_in_memory_that_the_bound_has_left_and_else_written_whole(tmp_path):
    staged_bytes, written_bytes = saved_twice(tmp_path, 0)
    assert written_bytes < 2000
    assert saved_twice(tmp_path, staged_bytes + 4096) == (staged_bytes, written_bytes)
    exact_bytes, whole_bytes = saved_twice(tmp_path, staged_bytes)
    assert exact_bytes == staged_bytes
    assert whole_bytes > 2 * 8192 * 4


@pytest.mark.parametrize(
    ("share", "used_bytes", "spare_bytes"),
    [
        (MemoryQuota(), 10**12, None),
        (MemoryQuota(1000, 2), 400, 100),
        (MemoryQuota(1000, 2), 600, 0),
        (MemoryQuota(1000, 2, is_auto=True), 600, (10_000 << 20) // 2),
        (MemoryQuota(10**12, 2, is_auto=True), 600, 10**12 // 2 - 600),
    ],
)
def test_what_is_spare_is_each_ranks_own_and_of_the_machine_if_that_set_the_bound(
    share, used_bytes, spare_bytes, monkeypatch
):
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: (10_000 << 20) + SPARE_BYTES)
    assert share.spare_bytes(used_bytes) == spare_bytes
