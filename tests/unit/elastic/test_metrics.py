"""Figures from events, signs and event files."""

from __future__ import annotations

import json
import threading

import pytest

from resilient.distributed.heartbeat import Phase, ProgressReporter, progress_path
from resilient.elastic.events import (
    AttemptEnded,
    MetricsFailed,
    RestartDecisionMade,
    RunAborted,
    WorkerGroupStarted,
)
from resilient.elastic.metrics import collector as spending_module
from resilient.elastic.metrics import registry
from resilient.elastic.metrics.collector import (
    CHUNK_BYTES,
    EventFileTail,
    GoodputFigures,
    Metrics,
    RankFigures,
    join,
    record_rank_event,
    record_steps_at_risk,
)
from resilient.elastic.metrics.registry import MetricsRegistry, write_textfile
from resilient.elastic.options import MetricsOptions, parse_port
from resilient.errors import ConfigError
from resilient.events import Emitter
from resilient.goodput.event_log import EventRecord
from resilient.goodput.report import build_report
from tests.helpers.clocks import OwnClock
from tests.helpers.exposition import figures

BEGAN_MS = 1_800_000_000_000


def started(life, size=2):
    return WorkerGroupStarted(life, f"a{life}", "start", size, size, 1, False, 0.0, 0.0)


def reaction(ended, cause, action, left=3):
    return RestartDecisionMade(ended, cause, 0, action, "", left, 0)


def told(event, at_ms, source="rank-0.jsonl", **fields):
    return EventRecord(BEGAN_MS + at_ms, event, source, fields)


@pytest.fixture
def heard(tmp_path):
    """Return figures that have heard these events, and their clock."""

    def hear(*events):
        clock = OwnClock()
        metrics = Metrics(MetricsOptions(file=str(tmp_path / "f.prom")), "", 25.0, clock)
        emit = Emitter(clock, (metrics.record_event,), {"agent": "host:1"})
        for one in events:
            emit(one)
        return metrics, clock

    return hear


def page(metrics):
    return figures(metrics._registry.page())


def test_restarts_are_counted_by_the_cause_of_the_failure_and_preemptions_apart(heard):
    metrics, _ = heard(
        started(1),
        reaction("failed", "oom_kill", "Restart", 2),
        started(2),
        reaction("failed", "oom_kill", "Restart", 1),
        started(3),
        reaction("regrouped", "", "Restart", 1),
        started(4),
        reaction("stopped", "", "Finish", 1),
    )
    found = page(metrics)
    assert found['resilient_restarts_total{cause="oom_kill"}'] == 2
    assert found['resilient_restarts_total{cause="regrouped"}'] == 1
    assert found['resilient_restarts_total{cause="hang"}'] == 0
    assert 'resilient_restarts_total{cause="stopped"}' not in found
    assert found['resilient_failures_total{cause="oom_kill"}'] == 2
    assert found["resilient_preemptions_total"] == 1
    assert found["resilient_lives_total"] == 4
    assert found["resilient_restarts_left"] == 1


def test_the_last_step_of_ranks_that_ended_together_is_known_when_they_are_gone(heard):
    together, _ = heard(AttemptEnded(1, "a", "succeeded", 60, 0.0))
    assert page(together)["resilient_step"] == 60
    apart, _ = heard(AttemptEnded(1, "a", "failed", 60, 0.0))
    assert "resilient_step" not in page(apart)


def test_work_at_risk_is_weighed_by_what_is_durable_now():
    board = MetricsRegistry()
    record_steps_at_risk(board)
    board.put(registry.STEP, 14)
    record_steps_at_risk(board)
    assert "resilient_steps_at_risk" not in figures(board.page())
    board.put(registry.GENERATION, 1)
    record_steps_at_risk(board)
    assert board.value(registry.STEPS_AT_RISK) == 14
    board.put(registry.CHECKPOINT_STEP, 9)
    record_steps_at_risk(board)
    assert board.value(registry.STEPS_AT_RISK) == 5
    board.put(registry.CHECKPOINT_STEP, 20)
    record_steps_at_risk(board)
    assert board.value(registry.STEPS_AT_RISK) == 0


def test_what_is_no_cause_of_ours_is_no_label(heard):
    metrics, _ = heard(*(reaction("failed", f"token-{n}", "Restart") for n in range(50)))
    assert page(metrics)['resilient_restarts_total{cause="other"}'] == 50
    assert "token" not in metrics._registry.page()


def test_it_is_well_while_the_agent_moves_and_not_when_it_stands_or_gave_up(heard, tmp_path):
    metrics, clock = heard(started(1))
    clock.sleep(80)
    assert metrics.health() == (True, "ok")
    clock.sleep(10)
    assert metrics.health() == (False, "the agent has made no progress for 90 s")
    metrics.record_agent_alive(tmp_path)
    assert metrics.health()[0]
    lost, _ = heard(RunAborted(70, "crash loop"))
    assert not lost.health()[0]
    assert page(lost)["resilient_agent_exit_code"] == 70


def test_steps_of_ranks_are_read_from_their_signs(tmp_path):
    clock, board = OwnClock(), MetricsRegistry()
    board.put(registry.LOCAL_WORLD_SIZE, 2)
    board.put(registry.LIVES, 1)
    ranks = RankFigures(board)
    ranks.look(clock.seconds, 5000.0)
    ranks.agent_folder = str(tmp_path)
    pulses = [ProgressReporter(progress_path(str(tmp_path), local), clock) for local in range(2)]
    for one in pulses:
        one.enter(Phase.FIRST)
    ranks.look(clock.seconds, 5000.0)
    assert "resilient_step" not in figures(board.page())
    pulses[0].end_step(11)
    pulses[1].end_step(10)
    clock.sleep(2)
    ranks.look(clock.seconds, 5002.0)
    found = figures(board.page())
    assert found["resilient_step"] == 10
    assert found['resilient_rank_step{local_rank="0"}'] == 11
    assert found['resilient_rank_last_step_timestamp_seconds{local_rank="0"}'] == 5000
    pulses[1].end_step(14)
    pulses[0].end_step(14)
    clock.sleep(2)
    ranks.look(clock.seconds, 5004.0)
    found = figures(board.page())
    assert found["resilient_steps_per_second"] == 2
    assert found['resilient_rank_last_step_timestamp_seconds{local_rank="0"}'] == 5002
    ranks.look(clock.seconds, 5060.0)
    found = figures(board.page())
    assert found['resilient_rank_last_step_timestamp_seconds{local_rank="0"}'] == 5002


def test_ranks_of_an_older_life_are_forgotten(tmp_path):
    clock, board = OwnClock(), MetricsRegistry()
    board.put(registry.LIVES, 1)
    board.put(registry.LOCAL_WORLD_SIZE, 2)
    ranks = RankFigures(board)
    ranks.agent_folder = str(tmp_path)
    for local in range(2):
        ProgressReporter(progress_path(str(tmp_path), local), clock).end_step(3)
    ranks.look(clock.seconds, 0.0)
    assert 'resilient_rank_step{local_rank="1"}' in figures(board.page())
    board.put(registry.LIVES, 2)
    board.put(registry.LOCAL_WORLD_SIZE, 1)
    ranks.look(clock.seconds, 0.0)
    found = figures(board.page())
    assert found['resilient_rank_step{local_rank="0"}'] == 3
    assert 'resilient_rank_step{local_rank="1"}' not in found


def test_saves_are_counted_since_the_agent_is_there_and_the_last_is_known_before():
    board = MetricsRegistry()
    save = {"size_bytes": 100, "stall_seconds": 0.5, "commit_seconds": 2.0, "written_bytes": 40}
    one = told("CheckpointCommitted", 500, checkpoint="checkpoint-20-g1", **save)
    record_rank_event(one, board, is_new=False)
    found = figures(board.page())
    assert found["resilient_checkpoint_step"] == 20
    assert "resilient_checkpoints_total" not in found
    record_rank_event(one, board, is_new=True)
    found = figures(board.page())
    assert found["resilient_checkpoints_total"] == 1
    assert found["resilient_checkpoint_written_bytes_total"] == 40
    assert found["resilient_checkpoint_size_bytes"] == 100
    assert found["resilient_checkpoint_stall_seconds_sum"] == 0.5
    assert found["resilient_checkpoint_last_timestamp_seconds"] == (BEGAN_MS + 500) / 1000
    record_rank_event(told("GenerationClaimed", 600, generation=2, parent=""), board, is_new=True)
    found = figures(board.page())
    assert found["resilient_generation"] == 2
    assert "resilient_checkpoint_step" not in found


def line(event, at="2027-01-15T08:00:01.000Z", **fields):
    return json.dumps({"at": at, "event": event, **fields}).encode()


def test_event_files_are_read_once_and_half_a_line_waits(tmp_path):
    following = EventFileTail(tmp_path)
    assert following.read() == []
    path = tmp_path / "rank-0.jsonl"
    whole = line("MetricsLogged", step=3)
    path.write_bytes(whole + b"\n" + whole[:20])
    (tmp_path / "rank-x.jsonl").write_bytes(whole + b"\n")
    assert [one.event for one in following.read()] == ["MetricsLogged"]
    assert following.read() == []
    with path.open("ab") as file:
        file.write(whole[20:] + b"\n\xff\xfe no event \n" + b"x" * CHUNK_BYTES * 2)
    assert len(following.read()) == 1
    for _ in range(3):
        assert following.read() == []
    path.write_bytes(whole + b"\n")
    assert len(following.read()) == 1


def run_of(seconds, every_ms):
    records = [
        told("WorkerGroupStarted", 0, "agent.jsonl", agent="host:1", attempt="a", world_size=1),
        told("TrainingStarted", 0, global_step=0, max_steps=10),
    ]
    for at_ms in range(every_ms, seconds * 1000, every_ms):
        records.append(told("MetricsLogged", at_ms, step=at_ms // every_ms, metrics={"loss": 1.0}))
        records.append(told("PhaseEnded", at_ms, phase="saving", took_seconds=every_ms / 4000))
    return records


def test_the_classes_of_the_wall_clock_are_those_of_the_account(monkeypatch):
    board, clock, records = MetricsRegistry(), OwnClock(), run_of(20, 100)
    spending = GoodputFigures(board, clock)
    spending.add_records(records)
    spending.update(BEGAN_MS + 20_000)
    found, known = figures(board.page()), build_report(records, BEGAN_MS + 20_000)
    for spent, spent_ms in known.spent_ms.items():
        assert found[f'resilient_spent_seconds{{class="{spent}"}}'] == spent_ms / 1000
    assert found["resilient_goodput_ratio"] == known.goodput > 0
    spending.add_records([told("MetricsLogged", 20_500, step=500)])
    spending.update(BEGAN_MS + 21_000)
    assert figures(board.page()) == found
    clock.sleep(5)
    spending.update(BEGAN_MS + 21_000)
    assert figures(board.page()) != found


def test_records_that_are_joined_keep_their_sums():
    records = run_of(100, 100)
    joined = join(records, 4000)
    assert len(joined) < len(records) / 15
    before, after = build_report(records).spent_ms, build_report(joined).spent_ms
    assert sum(before.values()) == sum(after.values())
    assert all(abs(before[spent] - after[spent]) <= 200 for spent in before)


def test_nothing_is_joined_across_lives():
    records = [told("MetricsLogged", 1, step=1), told("AttemptEnded", 2), told("MetricsLogged", 3)]
    assert len(join(records, 1000)) == 3


def test_a_long_run_takes_a_bounded_memory_and_a_longer_one_has_no_account(monkeypatch):
    monkeypatch.setattr(spending_module, "RECORDS_MAX", 200)
    board, clock = MetricsRegistry(), OwnClock()
    spending = GoodputFigures(board, clock)
    records = run_of(1000, 500)
    for one in records:
        spending.add_records([one])
        assert len(spending._records) <= 200
    assert 4000 <= spending._join_window_ms <= 32_000
    spending.update(BEGAN_MS + 1_000_000)
    assert figures(board.page())["resilient_goodput_ratio"] > 0.5
    spending.add_records(told("AttemptEnded", 1_000_000 + n) for n in range(300))
    assert spending.is_full
    assert board.page() == ""
    spending.add_records(records)
    spending.update(BEGAN_MS + 2_000_000, is_last=True)
    assert board.page() == ""


def test_a_failure_is_told_once_counted_and_stops_nothing(tmp_path):
    clock, events = OwnClock(), []
    path = tmp_path / "figures.prom"
    (tmp_path / "rank-0.jsonl").mkdir()
    metrics = Metrics(MetricsOptions(file=str(path)), str(tmp_path), 25.0, clock)
    with metrics.running(Emitter(clock, (lambda _record, event: events.append(event),))):
        for _ in range(3):
            metrics._look(is_last=True)
    assert [type(one) for one in events] == [MetricsFailed]
    assert "training is not affected" in events[0].message()
    assert figures(path.read_text())["resilient_metrics_errors_total"] >= 3


def test_a_reader_of_the_file_never_sees_a_part(tmp_path):
    path, over, seen = tmp_path / "figures.prom", threading.Event(), set()
    pages = [f"{letter * size}\n" for letter, size in (("a", 10), ("b", 300_000), ("c", 70_000))]
    write_textfile(path, pages[0])

    def read():
        while not over.is_set():
            seen.add(path.read_text())

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(400):
        write_textfile(path, pages[number % 3])
    over.set()
    reader.join()
    assert seen <= set(pages)
    assert [one.name for one in tmp_path.iterdir()] == ["figures.prom"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_file_that_cannot_be_written_is_refused_and_the_old_one_stands(tmp_path):
    with pytest.raises(ConfigError, match="--metrics-file: cannot write"):
        Metrics(MetricsOptions(file=str(tmp_path / "none" / "f.prom")), "", 25.0, OwnClock())
    path = tmp_path / "f.prom"
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        write_textfile(path, "x")
    assert [one.name for one in tmp_path.iterdir()] == ["f.prom"]


@pytest.mark.parametrize(
    ("text", "port"), [("0", None), ("auto", 0), (" AUTO ", 0), ("9400", 9400)]
)
def test_a_port_is_off_or_free_or_named(text, port):
    assert parse_port(text) == port


@pytest.mark.parametrize("text", ["", "-1", "65536", "free", "\u0663"])
def test_what_is_no_port_is_refused(text):
    with pytest.raises(ConfigError, match="not a port or auto"):
        parse_port(text)
