"""When persisting rests, for how long, and what ends it."""

from __future__ import annotations

import threading
import time

import pytest

from resilient.checkpoint.throttle import (
    FIRST_SECONDS,
    FULL_SPEED,
    IDLE_CORES_MIN,
    SMALL_BYTES,
    WORK_SHARE,
    CpuProbe,
    CpuQuota,
    CpuSample,
    ThrottleHistory,
    bound_seconds,
    due_pause_seconds,
    quota_cores,
)

MIB = 1 << 20
SAVE_BYTES = 100 * MIB


class Owned:
    """A machine whose time and use a test says; each piece of work takes a millisecond."""

    def __init__(self, left: float = 0.0) -> None:
        self.seconds, self.worked_seconds, self.left_cores = 100.0, 0.0, left
        self.ours = []

    def read(self):
        return CpuSample(self.seconds, 0.0, 0.0)

    def left(self, before, after, ours_seconds):
        self.ours.append(ours_seconds)
        return self.left_cores

    def pacing(self):
        return ThrottleHistory(CpuProbe(self, lambda: self.seconds, lambda: self.worked_seconds))

    def work(self, pace, pieces, size_bytes=MIB):
        """Work piece by piece; return how long each rest was to be."""
        rests = []
        pace._hurry.wait = rests.append
        for _ in range(pieces):
            self.worked_seconds += 0.001
            before = len(rests)
            pace.after_write(size_bytes)
            if len(rests) > before:
                self.seconds += rests[-1]
        return rests


def test_persisting_takes_its_share_of_a_core_while_training_uses_all():
    machine = Owned()
    pace = machine.pacing().begin(SAVE_BYTES, 100.0, 60.0)
    rests = machine.work(pace, 50)
    # The first piece of a thread only sets its watch.
    assert len(rests) == 49
    assert rests == pytest.approx([0.001 / WORK_SHARE - 0.001] * 49)


def test_a_save_does_not_rest_while_a_core_is_idle():
    machine = Owned(left=IDLE_CORES_MIN)
    pacing = machine.pacing()
    machine.seconds += 1.0
    assert machine.work(pacing.begin(SAVE_BYTES, 101.0, 60.0), 50) == []


def test_a_save_rests_as_soon_as_no_core_is_idle_any_more():
    machine = Owned(left=1.0)
    pacing = machine.pacing()
    machine.seconds += 1.0
    pace = pacing.begin(SAVE_BYTES, 101.0, 60.0)
    assert machine.work(pace, 5, 5 * MIB) == []
    machine.left_cores = 0.0
    machine.seconds += 1.0
    assert len(machine.work(pace, 5, 5 * MIB)) == 5


def test_what_persisting_itself_uses_is_not_held_against_training():
    machine = Owned()
    pace = machine.pacing().begin(SAVE_BYTES, 100.0, 60.0)
    machine.work(pace, 4)
    machine.seconds += 1.0
    machine.work(pace, 1)
    assert machine.ours == pytest.approx([0.004])


@pytest.mark.parametrize("interval", [1.0, 4.0])
def test_a_paced_save_ends_in_half_of_the_time_between_two(interval):
    machine = Owned()
    pacing = machine.pacing()
    pacing.begin(SAVE_BYTES, 100.0 - interval, 60.0)
    pace = pacing.begin(SAVE_BYTES, 100.0, 60.0)
    rests = machine.work(pace, 100)
    assert sum(rests) <= interval / 2
    assert sum(rests) > interval / 2 * 0.8


def test_a_save_that_is_behind_its_bound_rests_no_more():
    assert due_pause_seconds(1.0, 0.5, 5.1, 10.0) == 0.0
    assert due_pause_seconds(1.0, 0.5, 4.9, 10.0) == pytest.approx(0.1)
    assert due_pause_seconds(0.01, 0.5, 0.0, 10.0) == pytest.approx(0.01 / WORK_SHARE - 0.01)


def test_the_bound_is_half_of_the_interval_and_never_more_than_the_user_allows():
    assert bound_seconds(None, 60.0) == FIRST_SECONDS
    assert bound_seconds(None, 2.0) == 2.0
    assert bound_seconds(30.0, 60.0) == 15.0
    assert bound_seconds(3600.0, 60.0) == 60.0


def test_the_end_of_a_save_is_no_rest_behind_everything():
    """More bytes may be told of than the save has, and then the bound alone counts."""
    assert due_pause_seconds(1.0, 1.7, 9.0, 10.0) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("size_bytes", "seconds_max"), [(SMALL_BYTES, 60.0), (SAVE_BYTES, 0.0)], ids=["small", "asked"]
)
def test_small_saves_and_those_that_never_shall_do_not_rest(size_bytes, seconds_max):
    machine = Owned()
    pace = machine.pacing().begin(size_bytes, 100.0, seconds_max)
    assert machine.work(pace, 50) == []
    FULL_SPEED.after_write(1)


def test_whoever_waits_ends_a_rest_that_has_begun_and_all_to_come():
    machine = Owned()
    pace = machine.pacing().begin(SAVE_BYTES, 100.0, 60.0)
    pace.after_write(50 * MIB)
    machine.worked_seconds += 10.0
    began = time.monotonic()
    threading.Timer(0.05, pace.hurry).start()
    pace.after_write(MIB)
    assert 0.04 < time.monotonic() - began < 10.0
    pace.after_write(MIB)
    assert time.monotonic() - began < 10.0


def test_threads_of_one_save_rest_one_after_the_other():
    machine = Owned()
    pace = machine.pacing().begin(SAVE_BYTES, 100.0, 60.0)
    rests = []
    pace._hurry.wait = rests.append
    pace.after_write(10 * MIB)
    for _ in range(3):
        machine.worked_seconds += 0.001
        pace.after_write(MIB)
    one = 0.001 / WORK_SHARE - 0.001
    assert rests == pytest.approx([one, 2 * one, 3 * one])


def lines(idle: int) -> str:
    return f"cpu  9 9 9 {9 * idle} 9 0 0 0 0 0\ncpu0 5 0 5 {idle} 7 0 0 0 0 0\nintr 5\n"


def test_idle_time_is_what_the_machine_counts_of_the_cores_that_we_may_use(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text(lines(300))
    cores = CpuQuota(tmp_path)
    cores._names, cores._count = {"cpu0"}, 1.0
    before = cores.read()
    assert before.idle_seconds == 3.07
    after = CpuSample(before.at_seconds + 2.0, before.idle_seconds + 0.5, before.used_seconds)
    assert cores.left(before, after, 0.5) == pytest.approx(0.5)


def test_a_limit_of_the_control_group_counts_more_than_what_others_leave_idle(tmp_path):
    (tmp_path / "sys/fs/cgroup/job").mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    limit = tmp_path / "sys/fs/cgroup/job/cpu.max"
    limit.write_text("max 100000\n")
    assert quota_cores(tmp_path) is None
    limit.write_text("250000 100000\n")
    cores = CpuQuota(tmp_path)
    assert cores.left(CpuSample(0.0, 0.0, 0.0), CpuSample(1.0, 30.0, 2.4), 0.1) == pytest.approx(
        0.2
    )


def test_without_counters_of_the_machine_our_own_use_says_it(tmp_path):
    cores = CpuQuota(tmp_path)
    cores._count = 2.0
    assert cores.read().idle_seconds is None
    after = CpuSample(1.0, None, 1.5)
    assert cores.left(CpuSample(0.0, None, 0.0), after, 0.0) == pytest.approx(0.5)


def test_only_rests_that_were_taken_count():
    machine = Owned()
    pace = machine.pacing().begin(SAVE_BYTES, 100.0, 60.0)
    pace._hurry.wait = lambda _: None
    for _ in range(2):
        machine.worked_seconds += 1.0
        pace.after_write(50 * MIB)
    assert pace.rested_seconds == 0.0
    machine.seconds += 3.0
    assert pace.rested_seconds == 3.0
    machine.left_cores = 1.0
    pace.after_write(MIB)
    machine.seconds += 50.0
    assert pace.rested_seconds == 3.0
    pace.hurry()
    assert pace.rested_seconds == 3.0
