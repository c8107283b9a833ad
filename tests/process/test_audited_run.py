"""A run that dies often and is resized often: ``resilient audit`` proves what really happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from random import Random

import pytest

from resilient.checkpoint.catalog import lineage, read_manifest
from resilient.checkpoint.ledger_segments import read_segment
from resilient.storage.open import open_store
from resilient.train.data.ordering import epoch_order

SCRIPT = Path(__file__).with_name("audited_trainer.py")
SEED = 42


def start(folder, ranks, steps, deaths):
    command = [sys.executable, "-m", "resilient_cli", "train", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", "100", str(SCRIPT), str(folder), str(steps)]
    with (folder / "said.txt").open("a") as said:
        return subprocess.Popen(
            command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True, cwd=folder
        )


def trained_until(folder, step, process, seconds):
    """Wait until a step of rank 0 is done, then kill the whole job."""
    deadline = time.monotonic() + seconds
    path = folder / "trained-0.jsonl"
    while not path.exists() or last_step(path) < step:
        assert process.poll() is None, (folder / "said.txt").read_text()[-3000:]
        assert time.monotonic() < deadline, (folder / "said.txt").read_text()[-3000:]
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_step(path):
    lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
    return json.loads(lines[-1])["step"] if lines else 0


def live(folder, worlds, per_world, deaths_per_world, draw, seconds):
    """Train with one number of ranks after the other; return how many faults there were."""
    faults = 0
    steps = per_world * len(worlds)
    folder.mkdir()
    for number, ranks in enumerate(worlds):
        low, high = number * per_world + 1, (number + 1) * per_world
        at = sorted(draw.sample(range(low, high), deaths_per_world))
        deaths = [[step, draw.randrange(ranks)] for step in at]
        (folder / "plan.json").write_text(json.dumps(deaths))
        for mark in folder.glob("death-*"):
            mark.unlink()
        process = start(folder, ranks, steps, deaths)
        if number + 1 < len(worlds):
            trained_until(folder, high, process, seconds)
            faults += 1
        else:
            assert process.wait(seconds) == 0, (folder / "said.txt").read_text()[-3000:]
        faults += len(list(folder.glob("death-*")))
    return faults


def audited(folder, status=0):
    command = [sys.executable, "-m", "resilient_cli", "audit", str(folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return json.loads(done.stdout)


def chain_of(folder):
    """Return (generation, record) of all steps that became the result."""
    store = open_store(str(folder))
    newest = lineage(store).candidates[0]
    key, found = read_manifest(store, newest).data["ledger"]["segment"], []
    while key:
        segment = read_segment(store, key)
        rows = [json.loads(row) for row in segment.rows]
        found[:0] = [(segment.checkpoint.generation, row) for row in rows if row[0] == "step"]
        key = segment.previous
    return found


def check_what_was_trained(folder):
    """Hold the ledger against what the processes say that they trained on."""
    trained = defaultdict(dict)
    for path in folder.glob("trained-*.jsonl"):
        rank = int(path.stem.partition("-")[2])
        for line in path.read_text().splitlines():
            one = json.loads(line)
            trained[one["generation"], one["step"]][rank] = one["trained"]
    sizes = defaultdict(list)
    for generation, row in chain_of(folder):
        _, first, last, epoch, low, high, rounds, batch, seats, ranks, _, _ = row
        assert (first, seats) == (last, ranks)
        by_rank = trained[generation, first]
        assert sorted(by_rank) == list(range(ranks))
        order = epoch_order(203, SEED, epoch).tolist()
        # Micro-batches of a round lie one after the other in the order, dealt to ranks in turn.
        flat = [
            index
            for turn in range(rounds)
            for rank in range(ranks)
            for index in by_rank[rank][turn * batch : (turn + 1) * batch]
        ]
        assert flat[: high - low] == order[low:high], (generation, row)
        sizes[epoch] += flat[: high - low]
    epochs = sorted(sizes)
    for epoch in epochs[:-1]:
        assert sorted(sizes[epoch]) == list(range(203)), "each sample once"
    assert len(set(sizes[epochs[-1]])) == len(sizes[epochs[-1]])


def check(folder, worlds, faults, steps):
    answer = audited(folder)
    assert answer["proven"]
    assert answer["place"]["step"] == steps
    assert answer["ranks"] == worlds
    assert answer["lives_begun"] == faults + 1
    check_what_was_trained(folder)
    assert not list(folder.glob("checkpoint-0*"))
    assert len(list(folder.glob("checkpoint-*"))) <= 3


@pytest.mark.long
def test_deaths_and_resizes_are_proven_to_have_lost_nothing(tmp_path):
    worlds = [2, 1, 3]
    folder = tmp_path / "run"
    faults = live(folder, worlds, 8, 1, Random(3), 120)
    assert faults >= 4
    check(folder, worlds, faults, 24)
    newest = max(folder.glob("ledger/*.json"))
    newest.write_bytes(newest.read_bytes().replace(b'"step",24', b'"step",23'))
    flaw = audited(folder, 1)["flaws"][0]
    assert flaw["key"] == f"ledger/{newest.name}"


@pytest.mark.timeout(3000)
def test_fifty_faults_and_ten_resizes(tmp_path, request):
    if not request.config.getoption("--fifty-faults"):
        pytest.skip("it takes minutes: make audited")
    draw = Random(11)
    worlds = [2, 1, 3, 2, 4, 1, 2, 3, 1, 4, 2]
    folder = tmp_path / "run"
    faults = live(folder, worlds, 16, 5, draw, 900)
    assert faults >= 50
    assert len(worlds) - 1 >= 10
    check(folder, worlds, faults, 16 * len(worlds))
