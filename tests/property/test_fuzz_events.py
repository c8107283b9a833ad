"""Whatever stands in event files, they are read, accounted for, and nothing raises.

Each input is the files of a run that was killed, with one line spoiled as bytes or as a value, or
all of it as bytes. ``--fuzz-runs`` says how often; ``make fuzz`` takes many.
"""

from __future__ import annotations

import json
from contextlib import suppress
from random import Random

from resilient.goodput.event_log import AGENT_FILE, agents, parse_line
from resilient.goodput.report import build_report
from tests.helpers.mutations import spoiled_bytes, spoiled_value
from tests.helpers.told import killed_run

LINES = [one.encode() for one in killed_run()]
EACH = 4
"""Inputs of others for one of these, each of which is a whole run."""


def spoiled(random):
    lines = list(LINES)
    at = random.randrange(len(lines))
    way = random.random()
    if way < 0.2:
        return spoiled_bytes(random, b"\n".join(lines), LINES)
    if way < 0.4:
        lines[at] = spoiled_bytes(random, lines[at], LINES)
    elif way < 0.5:
        del lines[at]
    else:
        for _ in range(random.choice((1, 1, 3))):
            at = random.randrange(len(lines))
            with suppress(ValueError, RecursionError):
                lines[at] = json.dumps(spoiled_value(random, json.loads(LINES[at]))).encode()
    return b"\n".join(lines)


def read(data):
    text = data.decode("utf-8", errors="replace")
    records = [one for line in text.splitlines() if (one := parse_line(line, AGENT_FILE))]
    records.sort(key=lambda one: one.at_ms)
    found = build_report(records)
    assert sum(found.spent_ms.values()) == found.wall_ms
    json.dumps([agents(records), found.risk_steps], default=str)
    return records


def test_an_unspoiled_run_is_read():
    assert len(read(b"\n".join(LINES))) == len(LINES)


def test_spoiled_events_are_accounted_for_and_nothing_raises(request, record_property):
    runs = -(-request.config.getoption("--fuzz-runs") // EACH)
    begin = request.config.getoption("--fuzz-seed")
    for number in range(begin, begin + runs):
        data = spoiled(Random(f"events/{number}"))
        try:
            read(data)
        except BaseException as error:
            raise AssertionError(f"--fuzz-seed {number} --fuzz-runs 1") from error
    record_property("fuzz_runs", runs)
