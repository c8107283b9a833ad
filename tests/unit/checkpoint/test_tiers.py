"""Two tiers: what is read from where, what goes on, what is refused, what is not believed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from resilient.checkpoint import events
from resilient.checkpoint.catalog import committed, read_manifest
from resilient.checkpoint.daemon.messages import DaemonAddress
from resilient.checkpoint.garbage_collection import apply_plan, scan_and_plan
from resilient.checkpoint.promotion import promote
from resilient.checkpoint.promotion_policy import TieringOptions
from resilient.checkpoint.restore.read import read
from resilient.checkpoint.retention import Retention
from resilient.checkpoint.tiers.tiered_store import TieredStore
from resilient.checkpoint.verify import verify
from resilient.checkpoint_engine import CheckpointEngine
from resilient.engine_factory import open_engine
from resilient.errors import ConfigError, Fenced, IntegrityError, KeyNotFound
from resilient.events import Emitter
from resilient.format.keys import CheckpointId, signature_name
from resilient.format.signature import SigningKey, SigningPolicy
from resilient.testing.memory_store import MemoryStore
from resilient.train.arguments import TrainingArguments
from tests.helpers.tiered import checkpointer_of, desk_over, save, train


@pytest.fixture
def near():
    return MemoryStore("test://near")


@pytest.fixture
def durable():
    return MemoryStore("test://durable")


def flip(store, key) -> None:
    data = bytearray(store.objects[key])
    data[len(data) // 2] ^= 1
    store.objects[key] = bytes(data)


def test_a_promoted_checkpoint_is_the_same_to_the_byte_and_whole(near, durable):
    train(near, durable)
    newest = committed(durable)[0]
    assert near.objects[newest.manifest_key] == durable.objects[newest.manifest_key]
    assert not verify(durable, newest, "full")
    assert not verify(near, newest, "full")


def test_what_a_promoted_checkpoint_refers_to_goes_with_it(near, durable):
    """The first was promoted, and its folder lost since: the next brings what it needs."""
    train(near, durable, until=1, every=1)
    first = CheckpointId(1, 1)
    for key in [key for key in durable.objects if key.startswith(first.folder)]:
        del durable.objects[key]
    train(near, durable, until=2, every=1)
    newest = committed(durable)[0]
    names = [one.name for one in read_manifest(durable, newest).files]
    assert any(name.startswith(first.folder) for name in names), "or nothing was tested"
    assert not verify(durable, newest, "full")


@pytest.mark.parametrize("name", ["manifest.json", "model.r00000.safetensors", "state.json"])
def test_a_near_copy_that_is_damaged_is_read_from_the_durable_tier_and_told(name, near, durable):
    expected, told = train(near, durable).final, []
    newest = committed(near)[0]
    key = newest.key(name)
    flip(near, key)
    life = train(near, durable, on_event=lambda _, event: told.append(event))
    assert (life.started_at, life.final) == (4, expected)
    doubted = [one for one in told if isinstance(one, events.NearCopyRejected)]
    assert [one.key for one in doubted] == [key]
    assert "test://near" in doubted[0].message()


def test_a_near_copy_that_is_short_or_gone_is_read_from_the_durable_tier(near, durable):
    train(near, durable)
    key = committed(near)[0].key("model.r00000.safetensors")
    whole = near.objects.pop(key)
    assert train(near, durable).started_at == 4
    near.objects[key] = whole[:-1]
    assert train(near, durable).started_at == 4


def test_a_damaged_near_copy_is_never_referred_to(near, durable):
    train(near, durable, until=2)
    first = CheckpointId(1, 1).key("model.r00000.safetensors")
    flip(near, first)
    train(near, durable, until=3)
    third = CheckpointId(2, 3)
    assert not verify(near, third, "full")
    assert first not in [one.name for one in read_manifest(near, third).files]


def test_what_was_read_from_another_host_is_not_proved_here(near, durable):
    train(near, durable)
    other = MemoryStore("test://other")
    other.objects = dict(near.objects)
    key = committed(near)[0].manifest_key
    whole = near.objects.pop(key)
    tiers = TieredStore(near, MemoryStore("test://none"), print)
    tiers.durable.objects = {one: durable.objects[one] for one in durable.objects if "gen" in one}
    tiers.peers = (other,)
    assert tiers.get(key) == whole
    assert tiers.unverified_keys == {key}


def test_damage_of_what_is_near_alone_costs_the_steps_since_the_one_before(near, durable):
    checkpointer = checkpointer_of(near, durable, every=9)
    save(checkpointer, 1, 2)
    checkpointer._persister.close()
    flip(near, CheckpointId(1, 2).manifest_key)
    again = CheckpointEngine(desk_over(near, durable))
    assert again.resume({}).step == 1
    again.close()
    checkpointer._context.close()


def test_damage_near_is_never_promoted(near, durable):
    train(near, durable)
    newest = committed(near)[0]
    other = MemoryStore("test://other")
    other.objects = {key: one for key, one in durable.objects.items() if "generations/" in key}
    flip(near, newest.key("model.r00000.safetensors"))
    with pytest.raises(IntegrityError, match="differs from what was saved"):
        promote(TieredStore(near, other, print), newest, 1)
    assert not committed(other)


def test_without_its_near_tier_a_run_goes_on_from_the_durable_one(near, durable):
    expected = train(near, durable).final
    checkpointer = checkpointer_of(MemoryStore("test://gone"), durable, every=9)
    checkpointer._context.close()
    checkpointer._persister.close()
    life = train(MemoryStore("test://new"), durable, until=6)
    assert life.started_at == 4
    assert train(MemoryStore(), MemoryStore("test://x"), until=6).final == life.final != expected


def test_a_near_tier_of_another_run_is_refused_before_a_life_is_claimed(near, durable):
    train(near, durable)
    other = MemoryStore("test://other")
    before = dict(near.objects)
    with pytest.raises(ConfigError, match="of a run that test://other does not know"):
        train(near, other)
    assert not other.objects
    assert near.objects == before


def test_what_an_older_life_left_near_does_not_outrank_a_newer_life_elsewhere(near, durable):
    """This host's life 1 got to step 4 near; life 2 ran on another host, from step 2."""
    checkpointer = checkpointer_of(near, durable, every=2)
    save(checkpointer, 1, 2, 3)
    checkpointer._context.promoter._settle()
    elsewhere = checkpointer_of(MemoryStore("test://elsewhere"), durable, every=1)
    save(elsewhere, 3)
    elsewhere.close()
    with pytest.raises(Fenced):
        save(checkpointer, 4)
    with pytest.raises(Fenced):
        checkpointer.close()
    again = CheckpointEngine(desk_over(near, durable))
    assert again.resume({}).checkpoint == CheckpointId(2, 3)
    again.close()


def test_signed_checkpoints_stay_signed(near, durable):
    signing = SigningPolicy(SigningKey(bytes(range(32))), is_required=True)
    checkpointer = CheckpointEngine(replace(desk_over(near, durable), signing=signing))
    checkpointer.resume({})
    save(checkpointer, 1)
    checkpointer.close()
    newest = committed(durable)[0]
    assert newest.key(signature_name(read_manifest(durable, newest).root)) in durable.objects
    assert read(durable, newest, signing=signing).manifest.checkpoint == newest


class Pruned(MemoryStore):
    """Is pruned by somebody else once it took the files of the second, before its manifest."""

    def __init__(self) -> None:
        super().__init__("test://pruned")
        self.swept = []

    def put_new(self, key, data) -> None:
        if key == CheckpointId(1, 2).manifest_key:
            found = scan_and_plan(self, Retention(5), None, in_full=True)
            self.swept = [one.key(name) for one, name in found.unneeded()]
            apply_plan(self, found, 1)
        super().put_new(key, data)


def test_what_a_prune_took_for_leftovers_of_an_older_one_is_brought_again(near):
    """The second becomes the best when a newer one is durable already, so it goes on late."""
    durable, signing = Pruned(), SigningPolicy(SigningKey(bytes(range(32))), is_required=True)
    desk = desk_over(near, durable, tiering=TieringOptions(99, 9), retention=Retention(9))
    checkpointer = CheckpointEngine(replace(desk, signing=signing))
    checkpointer.resume({})
    second = CheckpointId(1, 2)
    for step, keep in ((1, ()), (2, ()), (3, [CheckpointId(1, 3)]), (4, [second])):
        save(checkpointer, step, keep=keep)
        checkpointer._context.promoter._settle()
    manifest = read_manifest(durable, second)
    names = {one.name for one in manifest.files if not one.origin}
    names.add(signature_name(manifest.root))
    assert set(durable.swept) == {second.key(one) for one in names}, "or nothing was tested"
    assert not verify(durable, second, "full")
    assert read(durable, second, signing=signing).manifest.checkpoint == second
    checkpointer.close()


def test_what_the_durable_tier_lacks_of_one_that_it_has_is_brought(near, durable):
    """A crash came between the manifest and the look for what was swept meanwhile."""
    train(near, durable)
    newest = committed(durable)[0]
    whole = dict(durable.objects)
    del durable.objects[newest.key("model.r00000.safetensors")]
    tiers = TieredStore(near, durable, print)
    assert promote(tiers, newest, 1) == len(whole[newest.key("model.r00000.safetensors")])
    assert durable.objects == whole
    assert promote(tiers, newest, 1) == 0


def test_lives_and_tags_lie_in_the_durable_tier_alone(near, durable):
    tiers = TieredStore(near, durable, print)
    tiers.put_new("generations/g000001.json", b"one")
    tiers.put("tags/a.json", b"two")
    assert set(durable.objects) == {"generations/g000001.json", "tags/a.json"}
    assert not near.objects


def test_near_files_of_a_life_that_the_durable_tier_does_not_know_are_not_seen(near, durable):
    near.objects = {
        "generations/g000001.json": b"a life",
        "checkpoint-1-g1/manifest.json": b"of another run",
    }
    durable.objects = {"generations/g000001.json": b"another life"}
    tiers = TieredStore(near, durable, print)
    assert not list(tiers.list("checkpoint-"))
    with pytest.raises(KeyNotFound):
        tiers.get("checkpoint-1-g1/manifest.json")


def test_a_url_opens_both_without_a_keeper_and_a_wrong_number_is_refused(tmp_path):
    url, near_url = str(tmp_path / "durable"), str(tmp_path / "near")
    emit = Emitter(desk_over(MemoryStore("a:"), MemoryStore("b:")).clock, ())
    keeper = DaemonAddress("no such socket")
    checkpointer = open_engine(url, emit=emit, near_url=near_url, keeper=keeper)
    checkpointer.resume({})
    save(checkpointer, 1)
    checkpointer.close()
    for folder in ("durable", "near"):
        assert (tmp_path / folder / "checkpoint-1-g1" / "manifest.json").exists()
    with pytest.raises(ConfigError, match="itself"):
        open_engine(url, emit=emit, near_url=url)
    with pytest.raises(ConfigError, match="durable_every"):
        TieringOptions(durable_every=0)
    with pytest.raises(ConfigError, match="near_total_limit"):
        TrainingArguments(str(tmp_path), near_repo=near_url, near_total_limit=0)


def test_what_nobody_knows_any_more_near_is_in_the_way_of_no_save(near, durable):
    """Both tiers lost the records of their lives, as on a disk that lies about its syncs."""
    train(near, durable)
    for store in (near, durable):
        for key in [one.key for one in store.list("generations/")]:
            store.delete(key)
    for one in durable.list("checkpoint-"):
        durable.delete(one.key)
    life = train(near, durable)
    assert life.acknowledged == [CheckpointId(2, step) for step in range(1, 5)]
