"""The text that Prometheus reads, held against its own parser, and the page of the docs."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import yaml

from resilient.elastic.metrics import registry
from resilient.elastic.metrics.registry import (
    LABELS_MAX,
    Metric,
    MetricKind,
    MetricsRegistry,
    Sample,
    render,
)
from tests.helpers.exposition import figures

PAGE = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"
ODD = Metric("odd", MetricKind.GAUGE, 'back\\slash, "quotes"\nand a line', "label")


def full_board():
    board = MetricsRegistry()
    for one in registry.ALL:
        label = 'a\\b"c\nd' if one.label else ""
        (board.put if one.kind is MetricKind.GAUGE else board.add)(one, 1.5, label)
    return board


def parsed(text):
    parser = pytest.importorskip("prometheus_client.parser")
    families = list(parser.text_string_to_metric_families(text))
    return {
        (one.name, *one.labels.values()): (family.type, family.documentation, one.value)
        for family in families
        for one in family.samples
    }


def test_prometheus_reads_every_metric_back():
    found = parsed(full_board().page())
    for one in registry.ALL:
        label = ('a\\b"c\nd',) if one.label else ()
        suffix = "_sum" if one.kind is MetricKind.SUMMARY else ""
        assert found[one.name + suffix, *label] == (one.kind.value, one.meaning, 1.5)


def test_prometheus_reads_odd_texts_and_numbers_back():
    numbers = {"nan": math.nan, "inf": math.inf, "minus": -math.inf, "small": 1e-9, "big": 2.0**60}
    found = parsed(render(Sample(ODD, value, name) for name, value in numbers.items()))
    assert math.isnan(found["odd", "nan"][2])
    assert {found["odd", name][2] == numbers[name] for name in numbers if name != "nan"} == {True}
    assert found["odd", "big"][1] == ODD.meaning


def test_names_say_the_unit_and_counters_their_kind():
    for one in registry.ALL:
        assert re.fullmatch(r"resilient_[a-z_]+", one.name)
        assert one.name.endswith("_total") == (one.kind is MetricKind.COUNTER)
    assert len({one.name for one in registry.ALL}) == len(registry.ALL)


def test_a_summary_is_a_sum_and_a_count():
    board = MetricsRegistry()
    board.add(registry.COMMIT, 0.25)
    board.add(registry.COMMIT, 0.5)
    found = figures(board.page())
    assert found["resilient_checkpoint_commit_seconds_sum"] == 0.75
    assert found["resilient_checkpoint_commit_seconds_count"] == 2


def test_the_values_of_a_label_are_bounded():
    board = MetricsRegistry()
    for number in range(2 * LABELS_MAX):
        board.put(registry.RANK_STEP, 1, str(number))
    board.put(registry.RANK_STEP, 7, "0")
    found = figures(board.page())
    assert len(found) == LABELS_MAX
    assert found['resilient_rank_step{local_rank="0"}'] == 7


def test_the_table_of_the_docs_is_the_table_of_the_code():
    rows = re.findall(
        r"^\| `(resilient_\w+)` \| (\w+) \| (\S*) \| (.*) \|$", PAGE.read_text(), re.MULTILINE
    )
    assert rows == [
        (one.name, one.kind.value, f"`{one.label}`" if one.label else "", one.meaning)
        for one in registry.ALL
    ]


def test_the_alerts_of_the_docs_are_rules_about_metrics_that_there_are():
    text = re.search(r"```yaml\n(groups:.*?)```", PAGE.read_text(), re.DOTALL)[1]
    rules = [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]
    assert len(rules) >= 5
    known = {one.name for one in registry.ALL}
    for rule in rules:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        used = set(re.findall(r"resilient_\w+", rule["expr"]))
        assert used
        assert used <= known
        assert rule["annotations"]["summary"]


def test_an_odd_label_and_meaning_are_escaped_as_the_format_says():
    assert render([Sample(ODD, 2, 'a\\b"c\nd')]) == (
        '# HELP odd back\\\\slash, "quotes"\\nand a line\n'
        "# TYPE odd gauge\n"
        'odd{label="a\\\\b\\"c\\nd"} 2\n'
    )
