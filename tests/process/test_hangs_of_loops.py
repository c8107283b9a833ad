"""Hangs of ranks that show no progress themselves: plain loops, and scripts that say nothing."""

from __future__ import annotations

import json
import os
import signal
import time

LOOP = """
import hashlib, resilient, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
checkpointer = resilient.Checkpointer("repo", model=model, optimizer=optimizer)
start = checkpointer.resume() or 0
together = DistributedDataParallel(model)
for step in range(start, 40):
    together(torch.ones(2, 4) * (step + rank)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    say("step", step + 1)
    if (step + 1) % 10 == 0:
        checkpointer.save(step + 1)
    time.sleep(0.02)
checkpointer.close()
say("end", hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest())
dist.destroy_process_group()
"""
OPTIONS = ("--nproc-per-node", "2", "--hang-floor", "2", "--events", "events", "--repo", "repo")


def told(agent, name):
    lines = (agent.folder / "events" / "agent.jsonl").read_text(encoding="utf-8").splitlines()
    return [one for one in map(json.loads, lines) if one["event"] == name]


def test_a_stopped_rank_of_a_plain_loop_is_found_and_the_loop_ends_as_if_it_had_not_been(train):
    calm = train(LOOP, *OPTIONS)
    assert calm.end() == 0, calm.err
    agent = train(LOOP, *OPTIONS)
    deadline = time.monotonic() + 60
    while "15" not in agent.said("step"):
        assert time.monotonic() < deadline, agent.err
        time.sleep(0.01)
    pid = int((agent.folder / "pid.1").read_text().split()[0])
    os.kill(pid, signal.SIGSTOP)
    assert agent.end() == 0, agent.err
    (hang,) = told(agent, "HangFound")
    assert (hang["rank"], hang["state"]) == (1, "stopped (SIGSTOP)")
    assert hang["step"] >= 14
    assert 0 < hang["median_seconds"] < 1
    assert set(hang["stacks"]) == {"0", "1"}
    assert all("worker.py" in one["stacks"] for one in hang["stacks"].values())
    assert "attempt 2: 2 ranks (hang)" in agent.err
    assert agent.said("end") == calm.said("end")
    assert len(set(agent.said("end"))) == 1
    # What had been saved was not done again.
    again = (agent.folder / "step.1").read_text().split()
    assert again.count("10") == 1
    assert again[-1] == "40"


def test_a_stopped_rank_needs_no_sign_to_be_found(train):
    agent = train(
        """
if rank == 1 and life == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
while rank == 0 and life == 1:
    time.sleep(0.1)
""",
        *("--nproc-per-node", "2", "--hang-floor", "1", "--events", "events"),
    )
    assert agent.end() == 0, agent.err
    (hang,) = told(agent, "HangFound")
    assert (hang["rank"], hang["state"], hang["step"]) == (1, "stopped (SIGSTOP)", -1)
    assert "worker.py" in hang["stacks"]["1"]["stacks"]


def test_one_that_is_stopped_and_goes_on_in_time_is_not_found(train):
    agent = train(
        """
import subprocess
if rank == 1 and life == 1:
    subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(4)
""",
        *("--nproc-per-node", "2", "--hang-floor", "3", "--events", "events"),
    )
    assert agent.end() == 0, agent.err
    assert not told(agent, "HangFound")
