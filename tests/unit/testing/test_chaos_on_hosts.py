"""Several hosts of a chaos run: which codes are honest, what was told where, what is compared."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from resilient.clock import SystemClock
from resilient.format.keys import CheckpointId
from resilient.testing.chaos.job import Job, JobEnvironment, JobEvents
from resilient.testing.chaos.plan import FaultKind, Injection, PlannedFault, Target
from resilient.testing.chaos.runner import began_from, with_attempt_starts
from resilient.testing.chaos.verdict import (
    ExperimentResult,
    GuaranteeState,
    HostEnd,
    InjectionResult,
    RunResult,
    correct_codes,
    evaluate_guarantees,
)

if TYPE_CHECKING:
    from resilient.testing.chaos.netns import Network

CUT, LOST = (
    PlannedFault(FaultKind.CUT, seconds=30.0),
    PlannedFault(FaultKind.KILL, Target.HOST, seconds=10.0),
)
CALM = RunResult(0, step=40, steps=(10, 20, 30, 40), worlds=(2,))
WELL = RunResult(0, step=40, flaws=(), worlds=(2,))


def saved(step, generation=1):
    return CheckpointId(generation, step)


STRUCK = InjectionResult(
    Injection(CUT, 0.5, 0.5, 1),
    "host-1 cut off for 30 s",
    23,
    is_new_life=True,
    before=saved(20),
    after=saved(30, 2),
    due=saved(20),
    restored=saved(20),
    host=1,
    ends=(HostEnd(1, 69, (69,)),),
)


def states(struck=STRUCK, ended=WELL, calm=CALM):
    return {one.name: one for one in evaluate_guarantees(ExperimentResult(calm, ended, (struck,)))}


def broken(*given, **more):
    return {
        name for name, one in states(*given, **more).items() if one.state is GuaranteeState.BROKEN
    }


@pytest.mark.parametrize(
    ("fault", "struck", "codes"),
    [
        # Each with the codes that are right for hosts 0, 1, and 2.
        (CUT, 1, [(), (69,), ()]),
        (CUT, 0, [(69,), (69,), (69,)]),
        (LOST, 2, [(), (), (137,)]),
        (LOST, 0, [(137,), (69,), (69,)]),
        (PlannedFault(FaultKind.KILL, Target.AGENT), 1, [(), (137,), ()]),
        (PlannedFault(FaultKind.KILL, Target.JOB), None, [(137,)] * 3),
        (PlannedFault(FaultKind.KILL, Target.RANK), 1, [()] * 3),
        (PlannedFault(FaultKind.KILL, Target.RANK), 0, [()] * 3),
        (PlannedFault(FaultKind.STOP), 0, [()] * 3),
        (PlannedFault(FaultKind.PREEMPT), None, [(75,)] * 3),
        (PlannedFault(FaultKind.NOTICE), 1, [(75,)] * 3),
        (PlannedFault(FaultKind.CLOCK_SKEW), None, [()] * 3),
        (PlannedFault(FaultKind.DISK_FULL), None, [(69, 73)] * 3),
    ],
)
def test_a_code_is_right_for_whom_it_may_come_of_the_fault(fault, struck, codes):
    assert [correct_codes(fault, struck, host) for host in range(3)] == codes


def test_the_end_of_the_run_is_a_right_end_of_any_host():
    assert HostEnd(0, 0).is_right
    assert not HostEnd(0, 69).is_right
    assert not HostEnd(0, 1, (69,)).is_right


def test_hosts_that_tell_the_truth_break_nothing():
    assert not broken()
    assert states()["exit_codes"].state is GuaranteeState.KEPT


def test_each_host_is_judged_by_its_own_code():
    wrong = replace(STRUCK, ends=(HostEnd(0, 1), HostEnd(1, 69, (69,)), HostEnd(2, 0)))
    assert broken(wrong) == {"exit_codes"}
    said = states(wrong)["exit_codes"].why
    assert said == "host-1 cut off for 30 s: host-0 ended with 1 and not to continue"
    assert states(replace(STRUCK, ends=()))["exit_codes"].state is GuaranteeState.UNTESTED


def test_a_life_without_the_host_begins_from_what_there_was_then():
    # What the others have saved since the cut is newer, and none could begin from that.
    assert not broken(replace(STRUCK, after=saved(36, 2)))
    assert broken(replace(STRUCK, due=saved(22))) == {"available"}
    assert broken(replace(STRUCK, after=saved(10))) == {"durable"}


@pytest.mark.parametrize(
    ("worlds", "is_canonical", "state"),
    [
        ((2,), False, GuaranteeState.BROKEN),
        ((2, 1, 2), True, GuaranteeState.BROKEN),
        ((2, 1, 2), False, GuaranteeState.UNTESTED),
        ((1,), False, GuaranteeState.UNTESTED),
    ],
)
def test_bits_are_compared_only_where_they_are_promised(worlds, is_canonical, state):
    ended = replace(WELL, worlds=worlds, is_canonical=is_canonical, differences=("w: 1 and 2",))
    found = states(ended=ended, calm=replace(CALM, is_canonical=is_canonical))["exact"]
    assert found.state is state
    if state is GuaranteeState.UNTESTED:
        assert 'only reduction="canonical"' in found.why
        assert ", ".join(map(str, worlds)) in found.why


def test_each_life_is_held_against_what_was_committed_before_it():
    facts = [
        {"event": "CheckpointCommitted", "checkpoint": "checkpoint-12-g1"},
        {"event": "GenerationClaimed"},
        {"event": "CheckpointRestored", "checkpoint": "checkpoint-10-g1"},
        {"event": "CheckpointCommitted", "checkpoint": "checkpoint-14-g2"},
        {"event": "CheckpointRestored", "checkpoint": "checkpoint-14-g2"},
    ]
    assert began_from(facts, saved(10)) == [
        (saved(10), saved(12)),
        (saved(14, 2), saved(14, 2)),
    ]
    assert began_from(facts[2:3], None) == [(saved(10), None)]
    assert began_from(facts[:2], saved(10)) == []


RESTORED_10 = {"event": "CheckpointRestored", "checkpoint": "checkpoint-10-g1"}
RESTORED_20 = {"event": "CheckpointRestored", "checkpoint": "checkpoint-20-g1"}


def test_the_life_that_began_from_too_little_is_told():
    found = with_attempt_starts(STRUCK, [RESTORED_20, RESTORED_10], has_hosts=True)
    assert (found.restored, found.due) == (saved(10), saved(20))
    assert broken(found) == {"available"}
    found = with_attempt_starts(STRUCK, [RESTORED_20, RESTORED_20], has_hosts=True)
    assert not broken(found)
    assert with_attempt_starts(STRUCK, [RESTORED_20], has_hosts=False).due is None


def test_no_life_need_begin_from_what_was_damaged():
    flipped = replace(STRUCK, damaged=saved(20), after=saved(10), is_found=True)
    found = with_attempt_starts(flipped, [RESTORED_10], has_hosts=True)
    assert (found.restored, found.due) == (saved(10), saved(10))
    assert not broken(found)


def test_what_rank_0_told_on_any_host_is_heard_in_order_and_once(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    telling = JobEvents(folders)
    assert telling.facts() == []

    def tell(folder, at, text="", end="\n"):
        folder.mkdir(exist_ok=True)
        with (folder / "rank-0.jsonl").open("a") as file:
            file.write(json.dumps({"event": "X", "at": f"2026-01-01T00:00:0{at}"}) + text + end)

    tell(folders[1], 1)
    tell(folders[0], 2)
    tell(folders[0], 4, end="")
    assert [one["at"][-1] for one in telling.facts()] == ["1", "2"]
    with (folders[0] / "rank-0.jsonl").open("a") as file:
        file.write("\n")
    # A clock that went back moves nothing that was heard before.
    tell(folders[1], 0)
    assert [one["at"][-1] for one in telling.facts()] == ["1", "2", "0", "4"]
    assert telling.worlds() == ()
    for nth, folder in enumerate(folders):
        line = json.dumps({"event": "WorkerGroupStarted", "world_size": 2 + nth})
        (folder / "agent.jsonl").write_text(f'{{"event": "X"}}\n{line}\n{line}\n')
    assert telling.worlds() == (2, 3)


class FakeNamespace:
    inside = ("inside",)


class FakeNetwork:
    """Two hosts that nobody needs to reach."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: int) -> FakeNamespace:
        return FakeNamespace()

    @staticmethod
    def address(number: int) -> str:
        return f"10.0.0.{number + 1}"


@pytest.fixture
def job(tmp_path):
    network: Network = FakeNetwork()
    words = ("--nnodes", "2", "train.py", "{folder}/{host}")
    options = ("--notice", "file:notice-{host}")
    around = JobEnvironment(network=network)
    return Job(tmp_path, tmp_path / "repository", options, words, SystemClock(), around)


def test_hosts_meet_at_the_first_and_have_files_of_their_own(job, tmp_path):
    first, second = (one._command for one in job.hosts)
    assert first[0] == second[0] == "inside"
    for command in (first, second):
        assert command[command.index("--rdzv-endpoint") + 1] == "10.0.0.1:29400"
        # The user's comes later and wins.
        assert command.index("1:2") < command.index("2")
    assert [one[one.index("--local-addr") + 1] for one in (first, second)] == [
        "10.0.0.1",
        "10.0.0.2",
    ]
    assert second[second.index("--events") + 1] == str(tmp_path / "events" / "host-1")
    assert second[second.index("--notice") + 1] == "file:notice-host-1"
    assert first[-1] == f"{tmp_path}/host-0"
    assert job.hosts[1].output_path == tmp_path / "said-host-1.txt"


class FakeHost:
    """A host whose last start has ended with a code, or runs (None)."""

    def __init__(self, number, code):
        self.number, self.ended, self.started = number, code, 0

    def code(self):
        return None if self.started else self.ended

    def start(self):
        self.started += 1


@pytest.mark.parametrize(
    ("codes", "started"),
    [
        ((None, 69), [0, 1]),
        ((137, 69), [1, 1]),
        ((None, 78), [0, 0]),
        # The run is over: whoever came now would find nothing to do, or nobody.
        ((0, 69), [0, 0]),
        ((None, None), [0, 0]),
    ],
)
def test_hosts_are_started_again_while_the_run_lasts(job, codes, started):
    job.hosts = [FakeHost(number, code) for number, code in enumerate(codes)]
    job.revive()
    assert [one.started for one in job.hosts] == started


@pytest.mark.parametrize(
    ("codes", "excused", "code"),
    [
        ((0, 0), set(), 0),
        ((0, None), set(), None),
        ((0, 69), set(), 69),
        ((0, 69), {1}, 0),
        ((70, 69), {1}, 70),
    ],
)
def test_a_job_has_ended_well_if_every_host_has_that_should(job, codes, excused, code):
    job.hosts = [FakeHost(number, code) for number, code in enumerate(codes)]
    job.excused = excused
    assert job.code() == code
