"""Several things at once: in order, all of it or the first error, and nothing goes on."""

from __future__ import annotations

import threading

import pytest

from resilient.storage.transfer import map_parallel
from resilient.testing.fault_store import Crash


@pytest.mark.parametrize("at_once", [1, 2, 7])
def test_results_come_in_the_order_of_the_items(at_once):
    assert map_parallel(lambda number: number * number, range(40), at_once) == tuple(
        number * number for number in range(40)
    )
    assert map_parallel(len, (), at_once) == ()


def test_one_at_a_time_needs_no_thread():
    assert set(map_parallel(lambda _: threading.current_thread(), range(5), 1)) == {
        threading.current_thread()
    }


def test_so_many_work_at_once_and_no_more():
    meeting, inside, most = threading.Barrier(3, timeout=10), set(), []

    def work(number):
        inside.add(number)
        most.append(len(inside))
        meeting.wait()
        inside.discard(number)

    map_parallel(work, range(9), 3)
    assert max(most) == 3


def test_the_first_error_in_the_order_of_items_is_raised_whole_after_all_have_ended():
    late, ended = threading.Event(), []

    def work(number):
        if number == 0:
            late.wait(10)
            ended.append(number)
            raise KeyError("of the first")
        if number == 1:
            late.set()
            raise Crash("of the second")
        ended.append(number)
        return number

    with pytest.raises(KeyError, match="of the first") as caught:
        map_parallel(work, range(100), 2)
    assert caught.traceback[-1].name == "work"
    assert ended == [0], "what had begun ended, and nothing else was begun"


def test_a_death_in_another_thread_is_a_death_here():
    meeting = threading.Barrier(2, timeout=10)

    def work(number):
        meeting.wait()
        if threading.current_thread() is not threading.main_thread():
            raise Crash("in a lane")
        return number

    with pytest.raises(Crash, match="in a lane"):
        map_parallel(work, range(2), 2)


def test_a_machine_without_more_threads_only_makes_it_slower(monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert map_parallel(str, range(5), 4) == ("0", "1", "2", "3", "4")
