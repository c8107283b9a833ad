"""Where the time of a run went: of one that is known to the millisecond, and of wild ones."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resilient.errors import RepositoryNotFound
from resilient.goodput.event_log import WANTED, parse_line, read_records
from resilient.goodput.report import SILENT_MS, build_report
from resilient.goodput.timeline import TimeClass
from tests.helpers.told import BEGAN, killed_run, line, record, records_of


@pytest.fixture
def found():
    return build_report(records_of(killed_run()))


def test_every_second_of_a_known_run_has_its_class(found):
    assert found.spent_ms == {
        TimeClass.TRAINING: 18_000,
        TimeClass.LOST: 3_500,
        TimeClass.EVALUATION: 1_000,
        TimeClass.SAVE_STALL: 500,
        TimeClass.RESTORE: 1_000,
        TimeClass.START: 1_250 + 4_250 + 2_000 + 1_000 + 3_000,
        TimeClass.RENDEZVOUS: 500,
        TimeClass.DETECT: 0,
        TimeClass.TEARDOWN: 1_000,
        TimeClass.WAIT: 1_000,
        TimeClass.FINISH: 1_000 + 1_000 + 1_000 + 1_000,
        TimeClass.DOWN: 7_000,
    }
    assert found.wall_ms == 49_000
    assert found.goodput == pytest.approx(18 / 49)


def test_faults_have_their_cause_their_cost_and_their_repair(found):
    killed, taken = found.faults
    assert (killed.cause, killed.detail, killed.rank) == ("signal", "signal 9", 1)
    assert (killed.lost_steps, killed.down_ms) == (4, 6_000)
    assert (taken.cause, taken.detail) == ("preemption", "aws: spot terminate")
    assert (taken.lost_steps, taken.lost_ms, taken.down_ms) == (0, 0, 14_000)
    assert found.repairs["signal"].mttr_ms == 6_000
    assert found.lost_steps == 4


def test_what_was_rolled_back_is_marked_in_the_losses(found):
    assert [(one.life, one.step, one.is_lost) for one in found.losses] == [
        (1, 6, True),
        (1, 8, True),
        (2, 8, False),
    ]


def test_where_the_run_is(found):
    assert (found.now.step, found.now.max_steps, found.now.exit_code) == (15, 15, 0)
    assert found.now.is_done
    assert [(one.checkpoint, one.step, one.written_bytes) for one in found.saved] == [
        ("checkpoint-5-g1", 5, 600)
    ]
    assert found.risk_steps == 10


def test_a_hang_is_detected_from_its_last_sign_on():
    lines = [
        *killed_run()[:8],
        line(13.5, "HangFound", agent="a:1", rank=1, waited_seconds=1.5),
        line(
            15, "AttemptEnded", agent="a:1", attempt="x", ended="failed", step=6, stop_seconds=1.0
        ),
        line(15.2, "WorkerFailed", agent="a:1", cause="hang", status=-9, rank=1, host="a"),
    ]
    found = build_report(records_of(lines))
    assert found.spent_ms[TimeClass.DETECT] == 2_000
    assert found.spent_ms[TimeClass.TEARDOWN] == 1_000
    assert found.faults[0].cause == "hang"


def test_a_life_that_went_back_by_itself_has_lost_what_it_gave_up():
    back = {"checkpoint": "checkpoint-5-g1", "times": 1, "reason": "loss is nan"}
    begun = {"attempt": "x", "cause": "start", "world_size": 2}
    lines = [
        line(0, "WorkerGroupStarted", agent="a:1", **begun),
        line(1, "TrainingStarted", global_step=0, max_steps=20),
        line(2, "FirstStepEnded", global_step=1),
        line(6, "MetricsLogged", step=5, metrics={"loss": 3.0}),
        line(9, "MetricsLogged", step=8, metrics={"loss": 2.0}),
        line(11, "TrainingRolledBack", rank=0, global_step=10, **back),
        line(11, "TrainingRolledBack", rank=1, global_step=10, **back),
        line(12, "MetricsLogged", step=6, metrics={"loss": 2.9}),
        line(14, "MetricsLogged", step=8, metrics={"loss": 2.5}),
        line(
            16, "AttemptEnded", agent="a:1", attempt="x", ended="failed", step=9, stop_seconds=0.5
        ),
        line(16, "WorkerFailed", agent="a:1", cause="signal", status=-9, rank=1, host="a"),
        line(17, "WorkerGroupStarted", agent="a:1", **{**begun, "attempt": "y"}),
        line(18, "TrainingStarted", global_step=6, max_steps=20),
        line(20, "TrainingEnded", global_step=20),
    ]
    found = build_report(records_of(lines))
    back, killed = found.faults
    assert (back.cause, back.detail, back.life) == ("numbers", "loss is nan", 1)
    assert (back.lost_steps, back.lost_ms, back.down_ms) == (4, 5_000, 1_000)
    assert (killed.cause, killed.lost_steps, killed.lost_ms) == ("signal", 3, 3_500)
    assert found.spent_ms[TimeClass.LOST] == 8_500
    assert [(one.step, one.is_lost) for one in found.losses] == [
        (5, False),
        (8, True),
        (6, False),
        (8, True),
    ]


@pytest.mark.parametrize("seconds", [1.8e305, -1e308, 10**400, float("nan")])
def test_a_length_that_no_clock_measured_breaks_nothing(seconds):
    begun = line(0, "WorkerGroupStarted", agent="a:1", met_seconds=seconds, start_seconds=seconds)
    steps = line(0.5, "TrainingStarted", global_step=seconds)
    ended = line(1, "RunEnded", agent="a:1", exit_code=seconds)
    found = build_report(records_of([begun, steps, ended]))
    assert sum(found.spent_ms.values()) == found.wall_ms


def test_a_rollback_into_an_older_life_loses_the_work_of_both():
    lines = [
        *killed_run()[:22],
        line(41, "WorkerGroupStarted", agent="a:2", attempt="z", world_size=2),
        line(44, "TrainingStarted", rank=0, generation=3, step=1, global_step=1, max_steps=15),
        line(45, "FirstStepEnded", rank=0, generation=3, step=2, global_step=2),
    ]
    found = build_report(records_of(lines))
    assert [one.lost_steps for one in found.faults] == [4, 11]
    assert found.spent_ms[TimeClass.TRAINING] == 1_000 + 1_000
    assert sum(found.spent_ms.values()) == found.wall_ms


def test_a_machine_that_vanishes_is_a_fault_of_its_own():
    lines = [one for one in killed_run() if "AttemptEnded" not in one and "RunEnded" not in one]
    lines = [one for one in lines if "Stop" not in one and "WorkerFailed" not in one]
    found = build_report(records_of(lines))
    assert [one.cause for one in found.faults] == ["agent_lost", "agent_lost"]


def lost(how, cause="peer"):
    """Return the faults of a life whose ranks fail, or meet again, because a node is gone."""
    failed = {"cause": cause, "status": 69, "rank": 1, "host": "b", "error": "PeerFailed: rank 0"}
    ended = {"regrouped": "regrouped", "failed": "failed"}[how]
    gone = {"agents": ["10.0.0.3"], "hosts": ["10.0.0.1"], "nodes_left": 1}
    lines = [
        line(0, "WorkerGroupStarted", agent="b:1", attempt="x", world_size=2),
        line(1, "TrainingStarted", rank=1, generation=1, step=0, global_step=0),
        line(2, "FirstStepEnded", rank=1, generation=1, step=1, global_step=1),
        line(3, "AttemptEnded", agent="b:1", ended=ended, step=4),
        *([line(3, "WorkerFailed", agent="b:1", **failed)] if how == "failed" else []),
        line(4, "NodesLost", agent="b:1", **gone),
        line(5, "RunAborted", agent="b:1", exit_code=69),
    ]
    return build_report(records_of(lines)).faults


@pytest.mark.parametrize("how", ["regrouped", "failed"])
def test_a_host_that_is_gone_is_the_cause_and_not_who_waited_for_it(how):
    (found,) = lost(how)
    assert (found.cause, found.host) == ("host_lost", "10.0.0.1")
    assert found.detail == "no answer from 10.0.0.1"


def test_a_rank_that_failed_by_itself_stays_the_cause():
    (found,) = lost("failed", cause="oom_kill")
    assert (found.cause, found.host, found.rank) == ("oom_kill", "b", 1)


def test_ranks_without_an_agent_have_lives_of_their_own():
    lines = [one for one in killed_run() if '"agent"' not in one]
    found = build_report(records_of(lines))
    assert len(found.doings) == 3
    assert found.lost_steps == 3, "the last step that it told of is 8"
    assert sum(found.spent_ms.values()) == found.wall_ms


def test_a_clock_that_is_an_hour_ahead_is_set_right():
    lines = killed_run()
    there = [record(3602, "AgentStarted", agent="b:7")]
    for at_seconds, attempt in ((3602, "x"), (3617, "y")):
        there.append(record(at_seconds, "WorkerGroupStarted", agent="b:7", attempt=attempt))
    there.append(record(3633, "RunEnded", agent="b:7", exit_code=75))
    found = build_report([*records_of(lines), *there])
    assert found.skew_ms == {"b": pytest.approx(3_600_000, abs=500)}
    assert found.wall_ms == 49_000
    assert len(found.doings) == 3


@pytest.mark.parametrize("loss", [10**400, True, "low", None])
def test_a_loss_that_is_none_is_passed_over(loss):
    lines = killed_run()
    lines[6] = line(12, "MetricsLogged", rank=0, generation=1, step=6, metrics={"loss": loss})
    found = build_report(records_of(lines))
    assert [(one.life, one.step) for one in found.losses] == [(1, 8), (2, 8)]


def test_a_run_that_goes_on_is_carried_to_the_present_and_one_that_is_silent_is_not():
    told = records_of(killed_run()[:7])
    now_ms = (BEGAN + 15) * 1000
    found = build_report(told, now_ms)
    assert found.wall_ms == 15_000
    assert found.spent_ms[TimeClass.DOWN] == 0
    assert found.faults == ()
    silent = build_report(told, now_ms + SILENT_MS)
    assert silent.spent_ms[TimeClass.DOWN] == SILENT_MS + 3_000


def test_half_a_line_and_foreign_lines_are_passed_over(tmp_path):
    lines = [*killed_run(), "[]", '{"at": 5}', '{"at": "x", "event": "RunEnded"}', "{" * 9999]
    half = line(50, "RunEnded", agent="a:2", exit_code=1)[:-9]
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "agent.jsonl").write_text("\n".join([*lines, half]), encoding="utf-8")
    (tmp_path / "steps-0.jsonl").write_text("{}\n", encoding="utf-8")
    assert build_report(read_records([tmp_path])) == build_report(
        [parse_line(one, "agent.jsonl") for one in killed_run()]
    )
    with pytest.raises(RepositoryNotFound):
        read_records([tmp_path / "nothing"])


NUMBERS = st.one_of(
    st.integers(-5, 40), st.floats(allow_nan=True), st.none(), st.just("text"), st.booleans()
)
WILD = st.builds(
    lambda at, event, agent, numbers, texts: record(
        at,
        event,
        **({"agent": agent} if agent else {"rank": 0}),
        **numbers,
        **texts,
    ),
    st.floats(0, 100),
    st.sampled_from(sorted(WANTED)),
    st.sampled_from(["", "", "a:1", "a:2", "b:3"]),
    st.dictionaries(
        st.sampled_from(
            (
                *("generation", "step", "global_step", "took_seconds", "stop_seconds"),
                *("met_seconds", "start_seconds", "waited_seconds", "commit_seconds"),
                *("stall_seconds", "exit_code"),
            )
        ),
        NUMBERS,
    ),
    st.fixed_dictionaries(
        {
            "attempt": st.sampled_from(["", "x", "y", "z"]),
            "ended": st.sampled_from(["", "failed", "stopped", "succeeded", "regrouped"]),
            "phase": st.sampled_from(["saving", "evaluating", ""]),
        }
    ),
)


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(WILD, max_size=40), st.integers(0, 200_000))
def test_the_classes_sum_to_the_wall_clock_whatever_was_told(told, after_ms):
    """Also of runs whose events contradict each other, were lost, or are of a broken clock."""
    until_ms = BEGAN * 1000 + after_ms if told else 0
    found = build_report(told, until_ms)
    assert sum(found.spent_ms.values()) == found.wall_ms
    ends = [found.began_ms, *(one.ended_ms for one in found.intervals)]
    starts = [*(one.began_ms for one in found.intervals), found.ended_ms]
    assert ends == starts
    assert all(one.length_ms > 0 for one in found.intervals)
    assert all(one.lost_steps >= 0 for one in found.faults)
    assert 0 <= found.goodput <= 1
