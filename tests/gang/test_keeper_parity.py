"""The setting reaches the keeper: what it persists is protected, and what it holds stays right."""

from __future__ import annotations

import pytest
import torch
from manifests import Values

from resilient.checkpointer import About, Checkpointer
from resilient.clock import SystemClock
from resilient.events import Emitter
from resilient.format.names import CheckpointId
from resilient.state.capture import Part
from resilient.storage.open import open_store
from resilient.storage.shared import SharedFolder
from resilient.vault.desk import Desk, Limits
from resilient.vault.health.repair import carry_out_repair, plan_repair
from resilient.vault.keeper.guest import KeeperAddress
from resilient.vault.keeper.keeper import Keeper
from resilient.vault.keeper.leased import Share
from resilient.vault.keeper.link import KeeperPersister
from resilient.vault.keeper.room import Room
from resilient.vault.registry.catalog import read_manifest
from resilient.vault.saving.persister import ThreadPersister
from resilient.world.comms import Comms
from resilient.world.memory import MemoryBoard
from resilient.world.sockets import BoardServer
from resilient.world.world import World

SAVED = CheckpointId(1, 1)


@pytest.fixture
def keeper(tmp_path):
    folder = SharedFolder(tmp_path)
    path = tmp_path / "keeper"
    one = Keeper(path, Room(folder, Share()), BoardServer(), SystemClock())
    yield str(path)
    one.close()
    folder.close()


def opened(keeper, url, scope, told, parity=0):
    emit = Emitter(SystemClock(), (lambda record, event: told.append(type(event).__name__),))
    comms = Comms(MemoryBoard(), World(), scope)
    desk = Desk(open_store(url), comms, Limits(parity=parity), SystemClock(), emit)
    return Checkpointer(desk, KeeperPersister(KeeperAddress(keeper, url=url), ThreadPersister()))


def test_a_checkpoint_that_the_keeper_persisted_is_protected(keeper, tmp_path):
    url, told = str(tmp_path / "run"), []
    checkpointer = opened(keeper, url, "first", told, parity=1)
    checkpointer.resume({})
    checkpointer.save(1, {"model": Part(Values(weight=torch.arange(5000.0)))}, About())
    checkpointer.close()
    assert "KeeperBypassed" not in told, "the keeper did it"
    store = open_store(url)
    (group,) = read_manifest(store, SAVED).parity
    assert group.parity == ("parity-0-0.r00000.parity",)
    assert store.stat(SAVED.copy_key).size_bytes == store.stat(SAVED.manifest_key).size_bytes
    key = SAVED.key("model.r00000.safetensors")
    whole = store.get(key)
    store.delete(key)
    carry_out_repair(store, plan_repair(store, SAVED))
    assert store.get(key) == whole
    target = Values()
    checkpointer = opened(keeper, url, "second", told)
    assert checkpointer.resume({"model": Part(target)}).checkpoint == SAVED
    checkpointer.close()
    assert torch.equal(target.state["weight"], torch.arange(5000.0))
