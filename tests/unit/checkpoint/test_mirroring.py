"""A copy in another repository: whole or not there, whatever dies, and a run goes on from it."""

from __future__ import annotations

import pytest

from resilient.checkpoint.catalog import committed, lineage
from resilient.checkpoint.generations import claim
from resilient.checkpoint.ledger_audit import audit
from resilient.checkpoint.replicate import plan_copy, replicate
from resilient.checkpoint.save.dedup import DedupBase
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.checkpoint.verify import verify
from resilient.engine_factory import open_engine
from resilient.errors import ConfigError, Fenced, IntegrityError, StoreUnavailable
from resilient.format.keys import CheckpointId
from resilient.state_dict.snapshot import Part
from resilient.storage.local import LocalStore
from resilient.testing.memory_store import MemoryStore
from tests.helpers.cli_repositories import TickingClock, write_usual_run
from tests.helpers.ledgers import Run
from tests.helpers.manifests import Values
from tests.helpers.referring import put_step, step, value


def copy(source, target, checkpoint, told=lambda *_: None):
    shipment = plan_copy(source, target, checkpoint)
    replicate(source, target, shipment, TickingClock(), told)
    return shipment


class Dying(MemoryStore):
    """Takes so many objects, and no more."""

    def __init__(self, left) -> None:
        super().__init__("test://dying")
        self.left = left

    def _spend(self, key):
        if self.left == 0:
            raise StoreUnavailable("the line is cut", key=key)
        self.left -= 1

    def put(self, key, data):
        self._spend(key)
        super().put(key, data)

    def put_new(self, key, data):
        self._spend(key)
        super().put_new(key, data)


@pytest.fixture
def source():
    store = MemoryStore("test://source")
    claim(store, None, cause="start", clock=TickingClock())
    put_step(store, 1)
    put_step(store, 2, (DedupBase(step(1)),))
    return store


def check_whole(source, target, checkpoint):
    assert [one for one in verify(target, checkpoint, "deep") if one.severity == "damaged"] == []
    assert lineage(target).candidates[0] == checkpoint
    for entry in plan_copy(source, target, checkpoint).manifest.tensors:
        ours, theirs = (value(one, checkpoint.step, entry.name) for one in (target, source))
        assert ours.equal(theirs)


def test_what_it_refers_to_comes_along_and_is_not_put_twice(source):
    target, told = MemoryStore("test://target"), []
    first = copy(source, target, step(2), lambda *done: told.append(done))
    assert any(one.name.startswith("checkpoint-1-g1/") for one in first.missing)
    assert told[-1] == (first.size_bytes, first.size_bytes)
    check_whole(source, target, step(2))
    assert committed(target) == [step(2)]
    older = copy(source, target, step(1))
    assert 0 < older.size_bytes < sum(one.size_bytes for one in older.manifest.files)
    assert committed(target) == [step(2), step(1)]
    again = plan_copy(source, target, step(2))
    assert (again.is_there, again.missing) == (True, ())


def test_whenever_it_dies_the_copy_is_whole_or_not_there(source):
    for left in range(100):
        target = Dying(left)
        try:
            copy(source, target, step(2))
        except StoreUnavailable:
            pass
        else:
            break
        if committed(target):
            check_whole(source, target, step(2))
        target.left = -1
        copy(source, target, step(2))
        check_whole(source, target, step(2))
    assert left > 4


def test_a_run_goes_on_from_the_copy(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    live = {"model": Part(Values(a=[1, 2], b=3.5))}
    for _ in range(2):
        one = open_engine(str(here))
        one.resume(live)
        one.save(one_step := 10 + len(one.committed()), live, CheckpointInfo())
        one.close()
    newest = CheckpointId(2, one_step)
    copy(LocalStore(here), LocalStore(there), newest)
    back = {"model": Part(Values())}
    other = open_engine(str(there))
    resumed = other.resume(back)
    assert (resumed.checkpoint, resumed.step) == (newest, one_step)
    assert back["model"].stateful.state_dict() == live["model"].stateful.state_dict()
    other.save(one_step + 1, back, CheckpointInfo())
    other.close()
    assert committed(LocalStore(there))[0] == CheckpointId(3, one_step + 1)
    with pytest.raises(Fenced, match="generation 3 exists there, and the copy is of generation 2"):
        plan_copy(LocalStore(here), LocalStore(there), newest)


def test_a_ledger_comes_along_and_is_proved_there(tmp_path):
    run = Run(tmp_path / "here")
    run.begin()
    for _ in range(2):
        run.train(3)
        kept = run.save()
    target = LocalStore(tmp_path / "there")
    assert copy(run.store, target, kept).ledger_problem == ""
    found, before = (audit(one, lineage(one).candidates) for one in (target, run.store))
    assert found.flaws == before.flaws == []


def test_damage_is_not_carried_over(source):
    (key,) = (one.key for one in source.list("checkpoint-2-g1/") if "model" in one.key)
    data = bytearray(source.get(key))
    data[-1] ^= 1
    source.put(key, bytes(data))
    target = MemoryStore("test://target")
    with pytest.raises(
        IntegrityError, match="differs from what was saved; no copy was made"
    ) as caught:
        copy(source, target, step(2))
    assert caught.value.hint == "resilient ckpt repair checkpoint-2-g1 test://source"
    assert committed(target) == []


def test_another_run_is_left_alone(source, tmp_path):
    write_usual_run(tmp_path / "theirs")
    theirs = LocalStore(tmp_path / "theirs")
    with pytest.raises(ConfigError, match="holds another run"):
        plan_copy(source, theirs, step(2))
    with pytest.raises(ConfigError, match="is already at test://source"):
        plan_copy(source, source, step(2))
