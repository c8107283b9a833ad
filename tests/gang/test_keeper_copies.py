"""What the keeper copies beside the staged bytes counts against its bound."""

from __future__ import annotations

import pytest
from manifests import frozen_parts_of

from resilient.checkpointer import About, Checkpointer
from resilient.clock import SystemClock
from resilient.events import Emitter
from resilient.format.names import CheckpointId
from resilient.storage.open import open_store
from resilient.storage.shared import SPARE_BYTES, SharedFolder
from resilient.vault.desk import Desk, Limits
from resilient.vault.health.verify import verify
from resilient.vault.keeper import leased
from resilient.vault.keeper.guest import KeeperAddress
from resilient.vault.keeper.keeper import Keeper
from resilient.vault.keeper.leased import Share
from resilient.vault.keeper.link import KeeperPersister
from resilient.vault.keeper.room import Room
from resilient.vault.saving.persister import ThreadPersister
from resilient.world.comms import Comms
from resilient.world.memory import MemoryBoard
from resilient.world.sockets import BoardServer
from resilient.world.world import World

SECOND = CheckpointId(1, 2)


def saved_twice(tmp_path, host_bytes_max) -> tuple[int, int]:
    """Save a model of which little changes under a bound; return bytes staged, and written last."""
    url, told = str(tmp_path / f"run-{host_bytes_max}"), []
    folder = SharedFolder(tmp_path)
    room = Room(folder, Share(host_bytes_max))
    path = tmp_path / f"keeper-{host_bytes_max}"
    keeper = Keeper(path, room, BoardServer(), SystemClock())
    emit = Emitter(SystemClock(), (lambda _, event: told.append(type(event).__name__),))
    desk = Desk(open_store(url), Comms(MemoryBoard(), World(), "s"), Limits(), SystemClock(), emit)
    address = KeeperAddress(str(path), url=url)
    checkpointer = Checkpointer(desk, KeeperPersister(address, ThreadPersister()))
    checkpointer.resume({})
    for number in (1, 2):
        checkpointer.save(number, frozen_parts_of(number), About())
        checkpointer.wait()
    staged_bytes = room._used_bytes
    checkpointer.close()
    keeper.close()
    folder.close()
    assert "KeeperBypassed" not in told, "the keeper did it"
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
        (Share(), 10**12, None),
        (Share(1000, 2), 400, 100),
        (Share(1000, 2), 600, 0),
        (Share(1000, 2, is_auto=True), 600, (10_000 << 20) // 2),
        (Share(10**12, 2, is_auto=True), 600, 10**12 // 2 - 600),
    ],
)
def test_what_is_spare_is_each_ranks_own_and_of_the_machine_if_that_set_the_bound(
    share, used_bytes, spare_bytes, monkeypatch
):
    monkeypatch.setattr(leased, "memory_left_bytes", lambda: (10_000 << 20) + SPARE_BYTES)
    assert share.spare_bytes(used_bytes) == spare_bytes
