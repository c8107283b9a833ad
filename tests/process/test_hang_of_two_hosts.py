"""A hang on one of two hosts: the ranks of the other wait for it, and that one is not blamed."""

from __future__ import annotations

import json

FLOOR_SECONDS = 3.0

# Rank 0 comes to a collective first and is overdue there, seconds before the one that it waits for.
HANGS = f"""
import resilient

def stuck_here():
    while True:
        time.sleep(0.1)

def waits_for_its_peer():
    while True:
        time.sleep(0.1)

for step in range(30):
    if life == 1 and rank == 0 and step == 20:
        waits_for_its_peer()
    if life == 1 and rank == 1 and step == 18:
        time.sleep({FLOOR_SECONDS} - 1)
    if life == 1 and rank == 1 and step == 19:
        stuck_here()
    time.sleep(0.02)
    resilient.heartbeat(step)
"""


def told(agent, name):
    lines = (agent.folder / "events" / "agent.jsonl").read_text(encoding="utf-8").splitlines()
    return [one for one in map(json.loads, lines) if one["event"] == name]


def test_only_the_host_of_the_rank_that_hangs_is_blamed(node):
    options = ("--hang-floor", str(FLOOR_SECONDS), "--events", "events")
    agents = [node(HANGS, "2:2", *options) for _ in range(2)]
    assert [agent.end() for agent in agents] == [0, 0], agents[0].err + agents[1].err
    innocent, guilty = sorted(agents, key=lambda one: not (one.folder / "pid.0").exists())
    (hang,) = told(guilty, "HangFound")
    assert (hang["rank"], hang["step"]) == (1, 18)
    assert "stuck_here" in hang["stacks"]["1"]["stacks"]
    assert not told(innocent, "HangFound"), innocent.err
    (elsewhere,) = told(innocent, "RemoteHangReported")
    assert (elsewhere["rank"], elsewhere["step"], elsewhere["waiting"]) == (1, 18, 0)
    # Neither a failure nor a restart of its own.
    assert [one["ended"] for one in told(innocent, "RestartDecisionMade")] == [
        "regrouped",
        "succeeded",
    ]
    assert told(innocent, "RestartDecisionMade")[0]["restarts_left"] == 3
    assert not told(innocent, "WorkerFailed")
