"""The setting reaches the keeper: what it persists is protected, and what it holds stays right."""

from __future__ import annotations

import pytest
import torch

from resilient.checkpoint.catalog import read_manifest
from resilient.checkpoint.context import CheckpointContext, CheckpointOptions
from resilient.checkpoint.daemon.client import DaemonSaveExecutor
from resilient.checkpoint.daemon.memory import MemoryQuota, SharedMemoryPool
from resilient.checkpoint.daemon.messages import DaemonAddress
from resilient.checkpoint.daemon.server import SaverDaemon
from resilient.checkpoint.repair import apply_repair, plan_repair
from resilient.checkpoint.save.executor import ThreadSaveExecutor
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.checkpoint_engine import CheckpointEngine
from resilient.clock import SystemClock
from resilient.distributed.coordination import ControlGroup
from resilient.distributed.kv_store import InMemoryKVStore, KVStoreServer
from resilient.distributed.launch_env import World
from resilient.events import Emitter
from resilient.format.keys import CheckpointId
from resilient.state_dict.snapshot import Part
from resilient.storage.open import open_store
from resilient.storage.shared_memory import SharedFolder
from tests.helpers.manifests import Values

SAVED = CheckpointId(1, 1)


@pytest.fixture
def keeper(tmp_path):
    folder = SharedFolder(tmp_path)
    path = tmp_path / "keeper"
    one = SaverDaemon(path, SharedMemoryPool(folder, MemoryQuota()), KVStoreServer(), SystemClock())
    yield str(path)
    one.close()
    folder.close()


def opened(keeper, url, scope, told, parity=0):
    emit = Emitter(SystemClock(), (lambda record, event: told.append(type(event).__name__),))
    comms = ControlGroup(InMemoryKVStore(), World(), scope)
    desk = CheckpointContext(
        open_store(url), comms, CheckpointOptions(parity=parity), SystemClock(), emit
    )
    return CheckpointEngine(
        desk, DaemonSaveExecutor(DaemonAddress(keeper, url=url), ThreadSaveExecutor())
    )


def test_a_checkpoint_that_the_keeper_persisted_is_protected(keeper, tmp_path):
    url, told = str(tmp_path / "run"), []
    checkpointer = opened(keeper, url, "first", told, parity=1)
    checkpointer.resume({})
    checkpointer.save(1, {"model": Part(Values(weight=torch.arange(5000.0)))}, CheckpointInfo())
    checkpointer.close()
    assert "DaemonBypassed" not in told, "the keeper did it"
    store = open_store(url)
    (group,) = read_manifest(store, SAVED).parity
    assert group.parity == ("parity-0-0.r00000.parity",)
    assert store.stat(SAVED.copy_key).size_bytes == store.stat(SAVED.manifest_key).size_bytes
    key = SAVED.key("model.r00000.safetensors")
    whole = store.get(key)
    store.delete(key)
    apply_repair(store, plan_repair(store, SAVED))
    assert store.get(key) == whole
    target = Values()
    checkpointer = opened(keeper, url, "second", told)
    assert checkpointer.resume({"model": Part(target)}).checkpoint == SAVED
    checkpointer.close()
    assert torch.equal(target.state["weight"], torch.arange(5000.0))
