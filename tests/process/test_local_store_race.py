"""Real processes race for one key on a real file system."""

import subprocess
import sys

import pytest

RACER = """
import sys, time
from pathlib import Path
from resilient.errors import KeyExists
from resilient.storage.local import LocalStore

root, name, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
store = LocalStore(root)
print("ready", flush=True)
sys.stdin.readline()
won = []
for number in range(rounds):
    try:
        store.put_new(f"generations/g{number:06d}.json", name.encode() * 50)
        won.append(str(number))
    except KeyExists:
        pass
print(",".join(won), flush=True)
"""
RACERS, ROUNDS = 8, 60


@pytest.fixture
def racers(tmp_path):
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(tmp_path), f"racer-{number}", str(ROUNDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(RACERS)
    ]
    yield started
    for one in started:
        one.kill()
        one.communicate()


@pytest.mark.smoke
def test_of_eight_processes_exactly_one_wins_each_key(racers, tmp_path):
    for one in racers:
        assert one.stdout.readline() == "ready\n"
    for one in racers:
        one.stdin.write("go\n")
        one.stdin.flush()
    won = {}
    for number, one in enumerate(racers):
        for key in filter(None, one.stdout.readline().strip().split(",")):
            won.setdefault(int(key), []).append(number)
        assert one.wait(60) == 0
    assert {key: len(winners) for key, winners in won.items()} == dict.fromkeys(range(ROUNDS), 1)
    for key, (winner,) in won.items():
        content = (tmp_path / f"generations/g{key:06d}.json").read_bytes()
        assert content == f"racer-{winner}".encode() * 50
    assert len(list((tmp_path / "generations").iterdir())) == ROUNDS, "a temporary file is left"
    assert len({winner for (winner,) in won.values()}) > 1, "there was no race"
