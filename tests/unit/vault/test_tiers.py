"""Two tiers: what is read from where, what goes on, what is refused, what is not believed."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from tiered import desk_over, train

from resilient.checkpointer import About, Checkpointer
from resilient.errors import (
    ConfigError,
    Fenced,
    IntegrityError,
    KeyNotFound,
    SaveFailed,
    StoreUnavailable,
)
from resilient.events import Emitter
from resilient.format.names import CheckpointId, signature_name
from resilient.format.signature import Signing, SigningKey
from resilient.opening import open_checkpointer
from resilient.testing.memory import MemoryStore
from resilient.train.arguments import TrainingArguments
from resilient.vault import facts
from resilient.vault.health.verify import verify
from resilient.vault.keeper.guest import KeeperAddress
from resilient.vault.reading.read import read
from resilient.vault.registry.catalog import committed, read_manifest
from resilient.vault.registry.generations import claim
from resilient.vault.registry.retention import Retention
from resilient.vault.saving.promoter import Tiering
from resilient.vault.tiers.promote import promote
from resilient.vault.tiers.tiers import TieredStore


class Failing(MemoryStore):
    """Refuses to put files of checkpoints while it is told to."""

    def __init__(self, url="test://failing") -> None:
        super().__init__(url)
        self.is_down = False

    def put(self, key, data) -> None:
        if self.is_down and key.startswith("checkpoint-"):
            raise StoreUnavailable("the line is cut", key=key)
        super().put(key, data)


class Held(MemoryStore):
    """Holds puts of checkpoints' files back until they are let go."""

    def __init__(self) -> None:
        super().__init__("test://held")
        self.reached, self.go_on = threading.Event(), threading.Event()

    def put(self, key, data) -> None:
        if key.startswith("checkpoint-"):
            self.reached.set()
            assert self.go_on.wait(20)
        super().put(key, data)


@pytest.fixture
def near():
    return MemoryStore("test://near")


@pytest.fixture
def durable():
    return MemoryStore("test://durable")


def steps(store) -> list[int]:
    return [one.step for one in committed(store)]


def checkpointer_of(near, durable, every=1, **limits) -> Checkpointer:
    checkpointer = Checkpointer(desk_over(near, durable, every, **limits))
    checkpointer.resume({})
    return checkpointer


def save(checkpointer, *at, keep=()) -> None:
    for step in at:
        checkpointer.save(step, {}, About(), keep=keep)
        checkpointer.wait()


def flip(store, key) -> None:
    data = bytearray(store.objects[key])
    data[len(data) // 2] ^= 1
    store.objects[key] = bytes(data)


def test_the_first_every_nth_and_the_last_save_are_durable(near, durable):
    checkpointer = checkpointer_of(near, durable, every=3, retention=Retention())
    save(checkpointer, 1, 2, 3, 4, 5)
    checkpointer._desk.promoter._settle()
    assert steps(durable) == [3, 1]
    checkpointer.close()
    assert steps(durable) == [5, 3, 1]
    assert steps(near) == [5, 4]


def test_what_the_run_protects_is_durable(near, durable):
    checkpointer = checkpointer_of(near, durable, every=9, retention=Retention())
    save(checkpointer, 1, 2)
    save(checkpointer, 3, keep=[CheckpointId(1, 2)])
    checkpointer._desk.promoter._settle()
    assert steps(durable) == [2, 1]
    checkpointer.close()


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
    life = train(near, durable, told=lambda _, event: told.append(event))
    assert (life.started_at, life.final) == (4, expected)
    doubted = [one for one in told if isinstance(one, facts.NearCopyDoubted)]
    assert [one.key for one in doubted] == [key]
    assert "test://near" in doubted[0].line()


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
    assert tiers.recalled == {key}


def test_damage_of_what_is_near_alone_costs_the_steps_since_the_one_before(near, durable):
    checkpointer = checkpointer_of(near, durable, every=9)
    save(checkpointer, 1, 2)
    checkpointer._persister.close()
    flip(near, CheckpointId(1, 2).manifest_key)
    again = Checkpointer(desk_over(near, durable))
    assert again.resume({}).step == 1
    again.close()
    checkpointer._desk.close()


def test_damage_near_is_never_promoted(near, durable):
    train(near, durable)
    newest = committed(near)[0]
    other = MemoryStore("test://other")
    other.objects = {key: one for key, one in durable.objects.items() if "generations/" in key}
    flip(near, newest.key("model.r00000.safetensors"))
    with pytest.raises(IntegrityError, match="not what was saved"):
        promote(TieredStore(near, other, print), newest, 1)
    assert not committed(other)


def test_without_its_near_tier_a_run_goes_on_from_the_durable_one(near, durable):
    expected = train(near, durable).final
    checkpointer = checkpointer_of(MemoryStore("test://gone"), durable, every=9)
    checkpointer._desk.close()
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
    checkpointer._desk.promoter._settle()
    elsewhere = checkpointer_of(MemoryStore("test://elsewhere"), durable, every=1)
    save(elsewhere, 3)
    elsewhere.close()
    with pytest.raises(Fenced):
        save(checkpointer, 4)
    with pytest.raises(Fenced):
        checkpointer.close()
    again = Checkpointer(desk_over(near, durable))
    assert again.resume({}).checkpoint == CheckpointId(2, 3)
    again.close()


def test_an_older_life_cannot_promote(near, durable):
    checkpointer = checkpointer_of(near, durable, every=9)
    save(checkpointer, 1, 2)
    checkpointer._desk.promoter._settle()
    claim(durable, None, cause="test", clock=checkpointer._desk.clock)
    with pytest.raises(Fenced):
        checkpointer.close()
    assert steps(durable) == [1]


def test_a_failed_promotion_fails_no_save_and_is_owed_by_the_next(near):
    durable, told = Failing(), []
    checkpointer = Checkpointer(
        desk_over(near, durable, 9, told=lambda _, event: told.append(event))
    )
    checkpointer.resume({})
    durable.is_down = True
    save(checkpointer, 1)
    checkpointer._desk.promoter._settle()
    failed = [one for one in told if isinstance(one, facts.PromotionFailed)]
    assert [one.checkpoint for one in failed] == ["checkpoint-1-g1"]
    assert "near tier alone" in failed[0].line()
    durable.is_down = False
    save(checkpointer, 2)
    checkpointer._desk.promoter._settle()
    assert steps(durable) == [2]
    checkpointer.close()


def test_a_run_whose_last_save_is_near_alone_does_not_end_well(near):
    durable = Failing()
    checkpointer = checkpointer_of(near, durable, every=1)
    durable.is_down = True
    save(checkpointer, 1)
    with pytest.raises(SaveFailed, match="near tier"):
        checkpointer.close()
    durable.is_down = False
    again = Checkpointer(desk_over(near, durable))
    assert again.resume({}).step == 1
    again.close()
    assert steps(durable) == [1], "the life that began from it owed it"


def test_what_is_on_its_way_stays_near_and_the_next_that_is_due_waits(near):
    durable = Held()
    checkpointer = checkpointer_of(near, durable, every=4)
    save(checkpointer, 1)
    assert durable.reached.wait(10)
    save(checkpointer, 2, 3)
    assert steps(near) == [3, 1], "the first is on its way, and takes a place"
    checkpointer.save(4, {}, About())
    waiter = threading.Thread(target=checkpointer.wait)
    waiter.start()
    waiter.join(0.3)
    assert waiter.is_alive(), "a save that is due waits for the promotion before it"
    durable.go_on.set()
    waiter.join(20)
    checkpointer.close()
    assert steps(durable) == [4, 1]


def test_signed_checkpoints_stay_signed(near, durable):
    signing = Signing(SigningKey(bytes(range(32))), is_required=True)
    checkpointer = Checkpointer(replace(desk_over(near, durable), signing=signing))
    checkpointer.resume({})
    save(checkpointer, 1)
    checkpointer.close()
    newest = committed(durable)[0]
    assert newest.key(signature_name(read_manifest(durable, newest).root)) in durable.objects
    assert read(durable, newest, signing=signing).manifest.checkpoint == newest


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
    keeper = KeeperAddress("no such socket")
    checkpointer = open_checkpointer(url, emit=emit, near_url=near_url, keeper=keeper)
    checkpointer.resume({})
    save(checkpointer, 1)
    checkpointer.close()
    for folder in ("durable", "near"):
        assert (tmp_path / folder / "checkpoint-1-g1" / "manifest.json").exists()
    with pytest.raises(ConfigError, match="itself"):
        open_checkpointer(url, emit=emit, near_url=url)
    with pytest.raises(ConfigError, match="durable_every"):
        Tiering(durable_every=0)
    with pytest.raises(ConfigError, match="near_total_limit"):
        TrainingArguments(str(tmp_path), near_repo=near_url, near_total_limit=0)


class Hours:
    """A clock that the test moves on."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def monotonic_seconds(self) -> float:
        return self.seconds

    def now_iso(self) -> str:
        return "2026-08-22T12:00:00Z"

    def sleep(self, seconds) -> None:
        self.seconds += seconds


@pytest.mark.parametrize(
    ("tiering", "at"),
    [
        (Tiering(durable_every_seconds=60), [1, 4, 6]),
        (Tiering(durable_every_seconds=1e9), [1]),
        (Tiering(2, durable_every_seconds=60), [1, 2, 4, 6]),
        (Tiering(5, durable_every_seconds=1e9), [1, 5]),
        (Tiering(), [1, 2, 3, 4, 5, 6]),
    ],
    ids=["time", "rarely", "count or time", "count", "all"],
)
def test_time_and_count_each_ask_for_what_is_durable(tiering, at, near, durable):
    clock = Hours()
    desk = desk_over(near, durable, tiering=tiering, clock=clock, retention=Retention())
    checkpointer = Checkpointer(desk)
    checkpointer.resume({})
    for step in range(1, 7):
        save(checkpointer, step)
        checkpointer._desk.promoter._settle()
        clock.sleep(29 if step < 4 else 31)
    checkpointer._persister.close()
    checkpointer._desk.close()
    assert steps(durable) == at[::-1]


def test_a_cadence_that_cannot_be_kept_is_refused(tmp_path):
    for seconds in (0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="durable_every_seconds"):
            Tiering(durable_every_seconds=seconds)
    with pytest.raises(ConfigError, match="durable_every_seconds"):
        TrainingArguments(str(tmp_path), durable_every_seconds=0.0)


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
