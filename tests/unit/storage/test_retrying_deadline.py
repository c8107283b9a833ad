from random import Random

import pytest

from resilient.clock import SystemClock
from resilient.errors import KeyExists, KeyNotFound, StoreDenied, StoreFull, StoreUnavailable
from resilient.storage.retry import (
    RetryingStore,
    StoreRecovered,
    StoreUnresponsive,
    with_retry_events,
)
from resilient.testing.fault_store import FaultPlan, FaultyStore, StoreFault, StoreFaultKind
from resilient.testing.memory_store import MemoryStore


class StillClock(SystemClock):
    def __init__(self):
        self.seconds, self.pauses = 0.0, []

    def monotonic_seconds(self):
        return self.seconds

    def sleep(self, seconds):
        self.seconds += seconds
        self.pauses.append(seconds)


def faulty(*faults, inner=None):
    return FaultyStore(inner or MemoryStore(), FaultPlan(0, faults))


def always(kind, count=10_000):
    return tuple(StoreFault(at, kind) for at in range(count))


def test_a_store_that_comes_back_is_asked_again():
    inner = faulty(
        StoreFault(0, StoreFaultKind.ERROR_ONCE), StoreFault(1, StoreFaultKind.ERROR_AFTER)
    )
    RetryingStore(inner, StillClock()).put("a", b"x")
    assert inner.get("a") == b"x"
    assert [name for name, _ in inner.trace] == ["put", "put", "put", "get"]


def test_every_operation_is_retried():
    for run in (
        lambda store: store.put("a", b"x"),
        lambda store: store.put_new("new", b"x"),
        lambda store: store.get("a"),
        lambda store: store.get_range("a", 0, 1),
        lambda store: list(store.list()),
        lambda store: store.delete("a"),
        lambda store: store.stat("a"),
    ):
        inner = MemoryStore()
        inner.put("a", b"x")
        run(
            RetryingStore(
                faulty(StoreFault(0, StoreFaultKind.ERROR_ONCE), inner=inner), StillClock()
            )
        )


def test_it_gives_up_at_the_deadline_and_says_how_often_it_tried():
    clock, inner = StillClock(), faulty(*always(StoreFaultKind.ERROR_ONCE))
    with pytest.raises(StoreUnavailable, match=r"tries in (5\d\.\d|60\.0) s") as caught:
        RetryingStore(inner, clock, within_seconds=60).get("a")
    assert 50 < clock.seconds <= 60
    assert f"after {inner.operations} tries" in caught.value.message
    assert caught.value.key == "a"


def test_no_time_means_one_try():
    inner = faulty(*always(StoreFaultKind.ERROR_ONCE))
    with pytest.raises(StoreUnavailable):
        RetryingStore(inner, StillClock(), within_seconds=0).get("a")
    assert inner.operations == 1


def test_the_pauses_grow_to_a_limit_and_differ_between_ranks():
    pauses = []
    for jitter in (Random(1), Random(2)):
        clock = StillClock()
        with pytest.raises(StoreUnavailable):
            RetryingStore(faulty(*always(StoreFaultKind.ERROR_ONCE)), clock, 60, jitter).get("a")
        pauses.append(clock.pauses)
    assert pauses[0] != pauses[1]
    for one in pauses:
        assert 0.05 <= one[0] <= 0.1
        assert 2.5 <= one[-1] <= 5
        assert all(0.05 * 2**n <= pause <= 0.1 * 2**n for n, pause in enumerate(one[:5]))


@pytest.mark.parametrize(
    ("kind", "error"), [(StoreFaultKind.FULL, StoreFull)], ids=["a full store stays full"]
)
def test_an_error_that_time_does_not_heal_passes_at_once(kind, error):
    inner, clock = faulty(StoreFault(0, kind)), StillClock()
    with pytest.raises(error):
        RetryingStore(inner, clock).put("a", b"x")
    assert (inner.operations, clock.pauses) == (1, [])


def test_a_missing_object_is_not_waited_for():
    clock = StillClock()
    with pytest.raises(KeyNotFound):
        RetryingStore(MemoryStore(), clock).get("a")
    assert clock.pauses == []


def test_an_exclusive_create_without_an_answer_is_recognised_as_our_own():
    inner = faulty(StoreFault(0, StoreFaultKind.ERROR_AFTER))
    RetryingStore(inner, StillClock()).put_new("a", b"ours")
    assert [name for name, _ in inner.trace] == ["put_new", "put_new", "get"]


def test_an_exclusive_create_is_recognised_in_any_form_of_the_data():
    inner = faulty(StoreFault(0, StoreFaultKind.ERROR_AFTER))
    RetryingStore(inner, StillClock()).put_new("a", memoryview(bytearray(b"ours")))
    assert inner.get("a") == b"ours"


def test_an_exclusive_create_that_another_won_meanwhile_is_lost():
    memory = MemoryStore()

    class Raced(FaultyStore):
        def put_new(self, key, data):
            if self.operations == 0:
                memory.put_new(key, b"theirs")
            super().put_new(key, data)

    raced = Raced(memory, FaultPlan(0, (StoreFault(0, StoreFaultKind.ERROR_ONCE),)))
    with pytest.raises(KeyExists):
        RetryingStore(raced, StillClock()).put_new("a", b"ours")
    assert memory.get("a") == b"theirs"


def test_a_taken_key_is_lost_even_to_equal_content_if_every_try_was_answered():
    memory = MemoryStore()
    memory.put_new("a", b"same")
    with pytest.raises(KeyExists):
        RetryingStore(memory, StillClock()).put_new("a", b"same")


def test_a_taken_key_that_vanished_before_it_could_be_read_is_lost():
    memory = MemoryStore()

    class Vanishing(FaultyStore):
        def get(self, key):
            memory.delete(key)
            return super().get(key)

    vanishing = Vanishing(memory, FaultPlan(0, (StoreFault(0, StoreFaultKind.ERROR_AFTER),)))
    with pytest.raises(KeyExists):
        RetryingStore(vanishing, StillClock()).put_new("a", b"ours")


def test_the_reading_back_is_retried_too():
    inner = faulty(
        StoreFault(0, StoreFaultKind.ERROR_AFTER), StoreFault(2, StoreFaultKind.ERROR_ONCE)
    )
    RetryingStore(inner, StillClock()).put_new("a", b"ours")
    assert inner.get("a") == b"ours"


def test_a_list_that_fails_in_its_middle_is_retried():
    memory = MemoryStore()
    memory.put("a", b"")
    memory.put("b", b"")
    failures = [StoreUnavailable("page two")]

    class Paged(MemoryStore):
        def list(self, prefix=""):
            for entry in memory.list(prefix):
                yield entry
                if failures:
                    raise failures.pop()

    assert [entry.key for entry in RetryingStore(Paged(), StillClock()).list()] == ["a", "b"]


def test_denied_is_final():
    class Denying(MemoryStore):
        def get(self, key):
            raise StoreDenied("no", key=key)

    with pytest.raises(StoreDenied):
        RetryingStore(Denying(), StillClock()).get("a")


def test_a_store_that_is_silent_is_told_of_once_and_that_it_answers_again():
    told = []
    silent = faulty(*always(StoreFaultKind.ERROR_ONCE, 12))
    store = with_retry_events(RetryingStore(silent, StillClock()), told.append)
    store.put("a", b"x")
    store.put("b", b"x")
    began, ended = told
    assert type(began) is StoreUnresponsive
    assert 5.0 <= began.waited_seconds < 10.0 < ended.waited_seconds < 60.0
    assert (began.within_seconds, type(ended)) == (60.0, StoreRecovered)
    assert began.message().startswith(f"{store.url} has not answered for ")


def test_an_answer_that_comes_a_little_late_is_told_to_nobody():
    told = []
    store = with_retry_events(
        RetryingStore(faulty(*always(StoreFaultKind.ERROR_ONCE, 4)), StillClock()), told.append
    )
    store.put("a", b"x")
    assert told == []
    assert isinstance(with_retry_events(MemoryStore(), told.append), MemoryStore)
