"""What ranks tell of broken losses, as a figure."""

from resilient.elastic.metrics.collector import begin, record_rank_event
from resilient.elastic.metrics.registry import MetricsRegistry
from resilient.goodput.event_log import EventRecord, parse_line
from tests.helpers.exposition import figures

NAME = "resilient_losses_broken_total"


def broke(kind):
    return EventRecord(1_800_000_000_000, "LossDivergenceDetected", "rank-0.jsonl", {"kind": kind})


def test_broken_losses_are_counted_by_kind_since_the_agent_is_there():
    board = MetricsRegistry()
    begin(board, "1", 1.0)
    record_rank_event(broke("nan"), board, is_new=False)
    record_rank_event(broke("odd"), board, is_new=True)
    record_rank_event(broke("inf"), board, is_new=True)
    found = figures(board.page())
    counts = {kind: found[f'{NAME}{{kind="{kind}"}}'] for kind in ("nan", "inf", "spike")}
    assert counts == {"nan": 0, "inf": 1, "spike": 0}
    assert "odd" not in board.page()


def test_what_an_event_file_says_of_it_is_read():
    line = '{"at": "2027-01-15T08:00:01.000Z", "event": "LossDivergenceDetected", "kind": "nan"}'
    assert parse_line(line, "rank-0.jsonl").text("kind") == "nan"
