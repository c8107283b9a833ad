"""A keeper commits in the name of its rank, so it signs with the key of its rank."""

from __future__ import annotations

from resilient.checkpoint.context import CheckpointContext, CheckpointOptions
from resilient.checkpoint.daemon.client import DaemonSaveExecutor
from resilient.checkpoint.daemon.messages import DaemonAddress
from resilient.checkpoint.save.executor import ThreadSaveExecutor
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.checkpoint_engine import CheckpointEngine
from resilient.clock import SystemClock
from resilient.distributed.coordination import ControlGroup
from resilient.distributed.kv_store import InMemoryKVStore
from resilient.distributed.launch_env import World
from resilient.events import Emitter
from resilient.format.keys import CheckpointId
from resilient.format.signature import SigningPolicy
from resilient.state_dict.snapshot import Part
from resilient.storage.open import open_store
from tests.helpers.keepers import Keeper
from tests.helpers.manifests import Values

SIGNING = SigningPolicy.of_secret("0123456789abcdef0123456789abcdef", is_required=True)


def test_what_the_keeper_commits_is_signed_and_resumed_from_its_memory(tmp_path):
    keeper, url, said = Keeper(tmp_path / "keeper"), str(tmp_path / "run"), []
    clock = SystemClock()
    emit = Emitter(clock, (lambda record, event: said.append(type(event).__name__),))
    resumed = []
    for life in ("1", "2"):
        comms = ControlGroup(InMemoryKVStore(), World(), life)
        desk = CheckpointContext(open_store(url), comms, CheckpointOptions(), clock, emit, SIGNING)
        address = DaemonAddress(str(keeper.path), url=url)
        checkpointer = CheckpointEngine(desk, DaemonSaveExecutor(address, ThreadSaveExecutor()))
        resumed.append(checkpointer.resume({"model": Part(Values(word="x"))}))
        checkpointer.save(1, {"model": Part(Values(word="x"))}, CheckpointInfo())
        checkpointer.close()
    assert keeper.close() == 0
    assert resumed[0] is None
    assert resumed[1].checkpoint == CheckpointId(1, 1)
    assert len(list((tmp_path / "run").glob("checkpoint-*/signature-*.json"))) == 2
    assert "DaemonBypassed" not in said
