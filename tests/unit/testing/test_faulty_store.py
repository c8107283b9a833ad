import pytest

from resilient.clock import SystemClock
from resilient.errors import KeyNotFound, StoreFull, StoreUnavailable
from resilient.testing.fault_store import (
    Crash,
    FaultPlan,
    FaultyStore,
    StoreFault,
    StoreFaultKind,
    every_crash,
)
from resilient.testing.memory_store import MemoryStore


def faulty(*faults, clock=None, seed=0):
    memory = MemoryStore()
    memory.put("old", b"old")
    return memory, FaultyStore(memory, FaultPlan(seed, faults), clock or SystemClock())


def test_a_plan_is_printed_as_the_call_that_makes_it():
    plan = FaultPlan(
        3, (StoreFault(17, StoreFaultKind.CRASH_AFTER), StoreFault(20, StoreFaultKind.DELAY, 0.5))
    )
    names = {"FaultPlan": FaultPlan, "StoreFault": StoreFault, "StoreFaultKind": StoreFaultKind}
    assert eval(repr(plan), names) == plan  # noqa: S307 - what a person would paste


def test_all_operations_are_counted_and_traced():
    _, store = faulty()
    store.put("a", b"x")
    store.put_new("b", b"x")
    store.get("a")
    store.get_range("a", 0, 1)
    list(store.list("p"))
    store.stat("a")
    store.delete("a")
    assert store.operations == 7
    assert store.trace == [
        ("put", "a"),
        ("put_new", "b"),
        ("get", "a"),
        ("get_range", "a"),
        ("list", "p"),
        ("stat", "a"),
        ("delete", "a"),
    ]


@pytest.mark.parametrize(
    ("kind", "stored"), [(StoreFaultKind.CRASH_BEFORE, False), (StoreFaultKind.CRASH_AFTER, True)]
)
def test_after_a_crash_the_process_is_dead(kind, stored):
    memory, store = faulty(StoreFault(1, kind))
    store.get("old")
    with pytest.raises(Crash):
        store.put("a", b"x")
    assert ("a" in memory.objects) is stored
    for run in (lambda: store.get("old"), lambda: store.put("b", b"x"), store.list):
        with pytest.raises(Crash):
            run()
    assert "b" not in memory.objects


def test_a_crash_is_not_an_exception_that_a_handler_could_swallow():
    assert not issubclass(Crash, Exception)


def test_a_read_can_crash_too():
    _, store = faulty(StoreFault(0, StoreFaultKind.CRASH_BEFORE))
    with pytest.raises(Crash):
        store.get("old")


@pytest.mark.parametrize(
    ("kind", "stored"), [(StoreFaultKind.ERROR_ONCE, False), (StoreFaultKind.ERROR_AFTER, True)]
)
def test_an_error_may_hide_an_effect(kind, stored):
    memory, store = faulty(StoreFault(0, kind))
    with pytest.raises(StoreUnavailable):
        store.put("a", b"x")
    assert ("a" in memory.objects) is stored
    store.put("a", b"x")


def test_a_full_store_refuses_writes_and_nothing_else():
    _, store = faulty(*(StoreFault(at, StoreFaultKind.FULL) for at in range(4)))
    assert store.get("old") == b"old"
    for write in (store.put, store.put_new):
        with pytest.raises(StoreFull):
            write("a", b"x")
    with pytest.raises(KeyNotFound):
        store.get("a")


def test_a_torn_put_stores_a_first_part_and_is_repeatable():
    parts = set()
    for _ in range(2):
        memory, store = faulty(StoreFault(0, StoreFaultKind.TORN), seed=5)
        with pytest.raises(Crash):
            store.put("a", b"0123456789")
        parts.add(memory.get("a"))
    (part,) = parts
    assert b"0123456789".startswith(part)
    assert part != b"0123456789"


def test_a_delay_takes_its_time_on_the_given_clock():
    slept = []

    class Clock(SystemClock):
        def sleep(self, seconds):
            slept.append(seconds)

    _, store = faulty(StoreFault(0, StoreFaultKind.DELAY, 9.0), clock=Clock())
    assert store.get("old") == b"old"
    assert slept == [9.0]


def test_a_drawn_plan_is_the_same_for_the_same_seed():
    kinds = list(StoreFaultKind)
    assert FaultPlan.drawn(1, 100, 10, kinds) == FaultPlan.drawn(1, 100, 10, kinds)
    assert FaultPlan.drawn(1, 100, 10, kinds) != FaultPlan.drawn(2, 100, 10, kinds)


def test_a_sweep_crashes_before_and_after_each_operation():
    assert len(list(every_crash(7))) == 14
