"""A keeper commits in the name of its rank, so it signs with the key of its rank."""

from __future__ import annotations

from keepers import Keeper
from manifests import Values

from resilient.checkpointer import About, Checkpointer
from resilient.clock import SystemClock
from resilient.events import Emitter
from resilient.format.names import CheckpointId
from resilient.format.signature import Signing
from resilient.state.capture import Part
from resilient.storage.open import open_store
from resilient.vault.desk import Desk, Limits
from resilient.vault.keeper.guest import KeeperAddress
from resilient.vault.keeper.link import KeeperPersister
from resilient.vault.saving.persister import ThreadPersister
from resilient.world.comms import Comms
from resilient.world.memory import MemoryBoard
from resilient.world.world import World

SIGNING = Signing.of_secret("0123456789abcdef0123456789abcdef", is_required=True)


def test_what_the_keeper_commits_is_signed_and_resumed_from_its_memory(tmp_path):
    keeper, url, said = Keeper(tmp_path / "keeper"), str(tmp_path / "run"), []
    clock = SystemClock()
    emit = Emitter(clock, (lambda record, event: said.append(type(event).__name__),))
    resumed = []
    for life in ("1", "2"):
        comms = Comms(MemoryBoard(), World(), life)
        desk = Desk(open_store(url), comms, Limits(), clock, emit, SIGNING)
        address = KeeperAddress(str(keeper.path), url=url)
        checkpointer = Checkpointer(desk, KeeperPersister(address, ThreadPersister()))
        resumed.append(checkpointer.resume({"model": Part(Values(word="x"))}))
        checkpointer.save(1, {"model": Part(Values(word="x"))}, About())
        checkpointer.close()
    assert keeper.close() == 0
    assert resumed[0] is None
    assert resumed[1].checkpoint == CheckpointId(1, 1)
    assert len(list((tmp_path / "run").glob("checkpoint-*/signature-*.json"))) == 2
    assert "KeeperBypassed" not in said
