"""Heartbeat of a repository's writer: what is stored, and what another host concludes."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from resilient.checkpoint.context import CheckpointContext, CheckpointOptions
from resilient.checkpoint.events import HeartbeatFailed, WriterAwaited, WriterSilent
from resilient.checkpoint.garbage_collection import collect_garbage
from resilient.checkpoint.generations import claim, list_numbers, read_generation
from resilient.checkpoint.reflog import UNLOCK
from resilient.checkpoint.replicate import plan_copy, replicate
from resilient.checkpoint.resume_policy import Claimant, newest_of_run, refuse_live_writer
from resilient.checkpoint.retention import Retention
from resilient.checkpoint.verify import verify, verify_records
from resilient.checkpoint.writer_heartbeat import (
    Heartbeat,
    HeartbeatWatch,
    WriterHeartbeat,
    read_heartbeat,
)
from resilient.clock import SystemClock
from resilient.distributed.coordination import ControlGroup
from resilient.distributed.kv_store import InMemoryKVStore
from resilient.distributed.launch_env import HEARTBEAT_SECONDS, World, read_launch
from resilient.distributed.start_identity import StartIdentity
from resilient.errors import ConfigError, IntegrityError, StoreDenied, StoreUnavailable, WriterAlive
from resilient.format.document import seal
from resilient.format.keys import (
    GENERATIONS,
    HEARTBEATS,
    CheckpointId,
    generation_key,
    heartbeat_key,
    parse_generation,
    parse_heartbeat,
)
from resilient.processes import ProcessIdentity, identify_self
from resilient.testing.fault_store import FaultyStore
from resilient.testing.memory_store import MemoryStore
from tests.helpers.clocks import OwnClock
from tests.helpers.manifests import save

ELSEWHERE = ProcessIdentity("node-2", 71, "another-boot", 5)
JOB = StartIdentity("abc", "slurm//7")
PERIOD_SECONDS = 20.0


class Passing(OwnClock):
    """A clock under which things happen at their seconds, while somebody sleeps."""

    def __init__(self):
        super().__init__()
        self.plans = []

    def at(self, seconds, act):
        self.plans.append((self.seconds + seconds, act))

    def sleep(self, seconds):
        super().sleep(seconds)
        for plan in [one for one in self.plans if one[0] <= self.seconds]:
            self.plans.remove(plan)
            plan[1]()


class Told:
    """An emitter that keeps events."""

    def __init__(self):
        self.events = []

    def __call__(self, event):
        self.events.append(event)

    @property
    def kinds(self):
        return [type(event) for event in self.events]


@pytest.fixture
def clock():
    return Passing()


@pytest.fixture
def store():
    return MemoryStore()


def claimed(store, process=ELSEWHERE, start=JOB):
    return claim(store, None, cause="start", clock=SystemClock(), start=start, process=process)


def writer_of(store, record, emit=None, process=ELSEWHERE):
    """Return a heartbeat without a thread; ``beat`` stores one."""
    writer = WriterHeartbeat(store, OwnClock(), emit or Told(), PERIOD_SECONDS, process)
    writer._claim = record
    return writer


def start_by_hand(store, clock, *starts, takes_over=False):
    """Start on this host; return the events, or raise."""
    told = Told()
    comms = ControlGroup(InMemoryKVStore(), World(), "0")
    context = CheckpointContext(store, comms, CheckpointOptions(), clock, told)
    claimant = Claimant(identify_self(), takes_over=takes_over)
    refuse_live_writer(context, starts or [StartIdentity("mine")], claimant)
    return told


def test_beat_stores_the_writer_and_counts(store):
    record = claimed(store)
    writer = writer_of(store, record)
    writer.beat()
    first = read_heartbeat(store, 1, record.token)
    assert first == Heartbeat(
        1, record.token, 1, "2027-01-15T08:00:00.000Z", 20.0, False, ELSEWHERE, "slurm//7"
    )
    writer.beat()
    second = read_heartbeat(store, 1, record.token)
    assert second == replace(first, count=2)


def test_keys_are_of_no_other_kind(store):
    record = claimed(store)
    key = heartbeat_key(1, record.token)
    assert key == f"heartbeats/g000001-{record.token}.json"
    assert parse_heartbeat(key) == 1
    assert parse_generation(key) is None
    assert not key.startswith(GENERATIONS)
    assert heartbeat_key(1, "../secret") == ""
    assert read_heartbeat(store, 1, "../secret") is None
    for other in ("heartbeats/g1-a.json", "heartbeats/g0000001-a.json", "heartbeats/g000001.json"):
        assert parse_heartbeat(other) is None


def test_start_elsewhere_beside_a_beating_writer_is_refused(store, clock):
    writer = writer_of(store, claimed(store))
    writer.beat()
    clock.at(PERIOD_SECONDS - 1, writer.beat)
    before = clock.seconds
    with pytest.raises(WriterAlive, match=r"process 71 on .* is alive") as caught:
        start_by_hand(store, clock)
    assert "--take-over" in caught.value.hint
    assert clock.seconds - before <= PERIOD_SECONDS + 1, "the change was seen at once"


def test_start_elsewhere_after_silence_begins(store, clock):
    writer_of(store, claimed(store)).beat()
    before = clock.seconds
    told = start_by_hand(store, clock)
    assert PERIOD_SECONDS < clock.seconds - before <= 2 * PERIOD_SECONDS
    assert told.events == [
        WriterAwaited(71, "node-2", 30.0),
        WriterSilent(71, "node-2", clock.seconds - before),
    ]


def test_wait_is_told_after_two_seconds(store, clock):
    writer_of(store, claimed(store)).beat()
    told = []
    watch = HeartbeatWatch(store, clock, lambda _: told.append(clock.seconds))
    before = clock.seconds
    assert watch.wait(1, read_generation(store, 1).token) is False
    assert told == [before + 2]


@pytest.mark.parametrize("zone_hours", [-9, 0, 9])
def test_clock_of_the_writer_proves_nothing(store, clock, zone_hours):
    """A dead writer's last time may lie in this host's future, and a live one's in its past."""
    record = claimed(store)
    moment = f"2027-01-15T{12 + zone_hours:02d}:00:00.000Z"
    content = Heartbeat(1, record.token, 7, moment, PERIOD_SECONDS, process=ELSEWHERE)
    key = heartbeat_key(1, record.token)
    store.put(key, seal(content.to_json()))
    assert start_by_hand(store, clock).kinds == [WriterAwaited, WriterSilent]
    clock.at(5, lambda: store.put(key, seal(replace(content, count=8).to_json())))
    with pytest.raises(WriterAlive):
        start_by_hand(store, clock)


@pytest.mark.parametrize(
    "case", ["no heartbeat", "ended before", "same job", "same start", "take over", "tool", "here"]
)
def test_start_that_needs_no_proof_never_waits(case, store, clock):
    record = claimed(store, identify_self() if case == "here" else ELSEWHERE)
    writer = writer_of(store, record)
    if case != "no heartbeat":
        writer.beat()
    if case == "ended before":
        writer.remove()
    if case == "tool":
        claim(store, None, cause=UNLOCK, clock=SystemClock())
    if case == "here":
        # The process of this number and boot that claimed has ended.
        ended = replace(record, process=replace(identify_self(), start_ticks=1))
        store.put(generation_key(1), seal(ended.to_json()))
    starts = {"same job": StartIdentity("x", "slurm//7"), "same start": StartIdentity("abc")}
    before = clock.seconds
    told = start_by_hand(
        store, clock, starts.get(case, StartIdentity("mine")), takes_over=case == "take over"
    )
    assert (clock.seconds, told.events) == (before, [])


def test_process_of_this_host_name_and_another_boot_is_awaited(store, clock):
    """Containers of several machines may share a host name."""
    process = replace(identify_self(), boot="another-boot")
    writer = writer_of(store, claimed(store, process), process=process)
    writer.beat()
    clock.at(10, writer.beat)
    with pytest.raises(WriterAlive):
        start_by_hand(store, clock)


def test_writer_that_ends_during_the_wait_lets_the_start_begin(store, clock):
    writer = writer_of(store, claimed(store))
    writer.beat()
    clock.at(10, writer.remove)
    before = clock.seconds
    start_by_hand(store, clock)
    assert clock.seconds - before <= 12


def test_claim_during_the_wait_is_a_sign_of_life(store, clock):
    writer_of(store, claimed(store)).beat()
    clock.at(9, lambda: claimed(store))
    before = clock.seconds
    with pytest.raises(WriterAlive):
        start_by_hand(store, clock)
    assert clock.seconds - before <= 12


def test_claim_of_the_same_job_during_the_wait_begins(store, clock):
    writer_of(store, claimed(store)).beat()
    clock.at(9, lambda: claimed(store, start=StartIdentity("x", "slurm//8")))
    start_by_hand(store, clock, StartIdentity("y", "slurm//8"))


def test_claim_of_a_command_during_the_wait_begins(store, clock):
    writer_of(store, claimed(store)).beat()
    clock.at(9, lambda: claim(store, None, cause=UNLOCK, clock=SystemClock()))
    assert start_by_hand(store, clock).kinds == [WriterAwaited]


def test_restored_backup_heartbeat_of_another_claim_proves_nothing(store, clock):
    """The old process of generation 2 is alive, and the repository was restored before it."""
    claimed(store)
    backup = dict(store.objects)
    old = writer_of(store, claimed(store))
    store.objects = backup
    mine = claimed(store)
    assert mine.number == 2
    writer = writer_of(store, mine)
    writer.beat()
    old.beat()
    clock.at(5, old.beat)
    assert start_by_hand(store, clock).kinds == [WriterAwaited, WriterSilent]
    writer.remove()
    old.beat()
    assert start_by_hand(store, clock).kinds == [], "the old one is no writer here"


def test_restored_backup_with_a_heartbeat_is_awaited_once(store, clock):
    """The object in the backup stands still, unless its process is the writer again."""
    record = claimed(store)
    writer = writer_of(store, record)
    writer.beat()
    backup = dict(store.objects)
    writer.beat()
    store.objects = dict(backup)
    start_by_hand(store, clock)
    clock.at(5, writer.beat)
    with pytest.raises(WriterAlive):
        start_by_hand(store, clock)


def test_damaged_heartbeat_is_awaited_and_replaced(store, clock):
    record = claimed(store)
    key = heartbeat_key(1, record.token)
    store.put(key, b"{}")
    with pytest.raises(IntegrityError):
        read_heartbeat(store, 1, record.token)
    start_by_hand(store, clock)
    writer = writer_of(store, record)
    clock.at(5, writer.beat)
    with pytest.raises(WriterAlive):
        start_by_hand(store, clock)


@pytest.mark.parametrize(
    "change",
    [
        {"token": "f" * 32},
        {"number": 2},
        {"count": -1},
        {"period_seconds": 0},
        {"period_seconds": True},
        {"period_seconds": 1e9},
        {"ended": 1},
        {"stored_at": 5},
        {"job": "a\n"},
        {"format": "resilient-tag"},
        {"version": 2},
        {"process": 7},
    ],
)
def test_heartbeat_with_a_malformed_field_is_damaged(change, store):
    record = claimed(store)
    content = Heartbeat(1, record.token, 1, "2027-01-15T08:00:00.000Z", PERIOD_SECONDS)
    key = heartbeat_key(1, record.token)
    store.put(key, seal(content.to_json()))
    assert read_heartbeat(store, 1, record.token) == content
    store.put(key, seal({**content.to_json(), **change}))
    with pytest.raises(IntegrityError):
        read_heartbeat(store, 1, record.token)


def test_beat_of_a_new_claim_removes_older_ones(store):
    for _ in range(2):
        writer_of(store, claimed(store)).beat()
    twin = heartbeat_key(3, "0" * 32)
    store.put(twin, b"of another claim of the number")
    store.put(f"{HEARTBEATS}notes.txt", b"a person's")
    later = heartbeat_key(4, "1" * 32)
    store.put(later, b"of a newer claim")
    record = claimed(store)
    writer_of(store, record).beat()
    left = {key for key in store.objects if key.startswith(HEARTBEATS)}
    assert left == {heartbeat_key(3, record.token), twin, later, f"{HEARTBEATS}notes.txt"}


def test_beat_of_a_fenced_claim_removes_none(store):
    old = writer_of(store, claimed(store))
    new = claimed(store)
    writer_of(store, new).beat()
    assert new.number == 2
    old._claim = replace(old._claim, number=3)
    old.beat()
    assert read_heartbeat(store, 2, new.token) is not None


def test_store_that_refuses_is_told_once(store):
    class Refusing(FaultyStore):
        def put(self, key, data):
            raise StoreUnavailable("no answer", key=key)

    told = Told()
    writer = writer_of(Refusing(store), claimed(store), told)
    writer.beat()
    writer.beat()
    assert told.events == [HeartbeatFailed("no answer")]


def test_end_without_the_right_to_delete_marks_it(store, clock):
    class Kept(FaultyStore):
        def delete(self, key):
            raise StoreDenied("no right", key=key)

    told = Told()
    record = claimed(store)
    writer = writer_of(Kept(store), record, told)
    writer.beat()
    writer.remove()
    assert heartbeat_key(1, record.token) in store.objects
    assert read_heartbeat(store, 1, record.token) is None
    assert not told.events
    assert not start_by_hand(store, clock).events


def test_restart_keeps_the_heartbeat_of_the_earlier_attempt(store):
    first = claimed(store)
    starts = [StartIdentity("abc")]
    writer = WriterHeartbeat(store, OwnClock(), Told(), PERIOD_SECONDS, ELSEWHERE)
    writer._find = lambda: newest_of_run(store, starts)
    writer.beat()
    assert read_heartbeat(store, 1, first.token).count == 1
    second = claimed(store)
    writer._claim = second
    writer.beat()
    assert read_heartbeat(store, 1, first.token) is None
    assert read_heartbeat(store, 2, second.token).count == 2


def test_restart_after_another_writer_keeps_no_heartbeat(store):
    claimed(store)
    other = claimed(store, start=StartIdentity("other", "slurm//9"))
    assert newest_of_run(store, [JOB]) is None
    assert newest_of_run(store, [StartIdentity("other")]) == other
    assert newest_of_run(MemoryStore(), [JOB]) is None


def test_thread_beats_until_the_end(store):
    enough = threading.Event()

    class Counting(FaultyStore):
        def put(self, key, data):
            super().put(key, data)
            if len(self.trace) > 3:
                enough.set()

    record = claimed(store)
    writer = WriterHeartbeat(Counting(store), SystemClock(), Told(), 0.01, ELSEWHERE)
    writer.begin(record)
    assert enough.wait(30)
    writer.end()
    assert not [one for one in threading.enumerate() if one.name == "resilient-heartbeat"]
    assert not [key for key in store.objects if key.startswith(HEARTBEATS)]


def test_thread_of_a_fenced_claim_ends(store):
    old = claimed(store)
    writer = WriterHeartbeat(store, SystemClock(), Told(), 0.001, ELSEWHERE)
    writer.begin(old)
    new = claimed(store)
    writer_of(store, new).beat()
    writer._thread.join(30)
    assert not writer._thread.is_alive()
    left = [key for key in store.objects if key.startswith(HEARTBEATS)]
    assert left == [heartbeat_key(2, new.token)]


def test_beat_checks_the_fence_at_a_low_rate(store):
    counting = FaultyStore(store)
    writer = writer_of(counting, claimed(store))
    for _ in range(30):
        writer.beat()
    verbs = [verb for verb, _ in counting.trace]
    assert {verb: verbs.count(verb) for verb in set(verbs)} == {
        "put": 30, "list": 2 + 1, "stat": 2, "get": 2,
    }  # fmt: skip


def test_launch_reads_the_time_between_heartbeats():
    name = "RESILIENT_HEARTBEAT_SECONDS"
    assert read_launch({}).heartbeat_seconds == HEARTBEAT_SECONDS
    assert read_launch({name: " "}).heartbeat_seconds == HEARTBEAT_SECONDS
    assert read_launch({name: "0"}).heartbeat_seconds == 0
    assert read_launch({name: "7.5"}).heartbeat_seconds == 7.5
    for wrong in ("0.5", "61", "soon", "-1", "nan"):
        with pytest.raises(ConfigError, match=name):
            read_launch({name: wrong})


def test_retention_verify_and_copy_leave_heartbeats_alone(store):
    record = claimed(store)
    save(store, CheckpointId(1, 1))
    newest = save(store, CheckpointId(1, 2))
    writer_of(store, record).beat()
    key = heartbeat_key(1, record.token)
    collect_garbage(store, Retention(1), 1, sweeps=True, token=record.token)
    assert verify(store, newest) == []
    assert verify_records(store) == []
    target = MemoryStore("test://copy")
    replicate(store, target, plan_copy(store, target, newest), SystemClock(), lambda *_: None)
    assert key in store.objects
    assert key not in target.objects
    assert list_numbers(store) == [1]
