"""Event files as records: names of events of versions before 0.1.0."""

from __future__ import annotations

import pytest

from resilient.goodput.event_log import FORMER_EVENTS, WANTED, parse_line
from resilient.goodput.report import build_report
from tests.helpers.told import killed_run, line, records_of


@pytest.mark.parametrize(("former", "now"), FORMER_EVENTS.items())
def test_parse_line_former_name_gives_event_of_today(former, now):
    assert parse_line(line(1, former)).event == now


def test_parse_line_former_life_ended_keeps_its_fields():
    found = parse_line(line(1, "LifeEnded", life=2, ended="crash"), "agent.jsonl")
    assert (found.event, found.source) == ("AttemptEnded", "agent.jsonl")
    assert (found.number("life"), found.text("ended")) == (2, "crash")


def test_report_of_former_names_equals_report_of_names_of_today():
    former = killed_run()
    for old, new in FORMER_EVENTS.items():
        former = [one.replace(f'"{new}"', f'"{old}"') for one in former]
    assert any("LifeEnded" in one for one in former)
    found, wanted = build_report(records_of(former)), build_report(records_of(killed_run()))
    assert found.spent_ms == wanted.spent_ms
    assert (found.faults, found.now) == (wanted.faults, wanted.now)


def test_former_names_lead_to_wanted_events_only():
    assert WANTED.issuperset(FORMER_EVENTS.values())
    assert WANTED.isdisjoint(FORMER_EVENTS)
