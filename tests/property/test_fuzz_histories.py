"""Whatever is in a file of events or of lines beside a checkpoint, a history is read, or it is not.

Frames are spoiled as bytes, and inside with their checksums made right again, so that these are no
shelter. ``--fuzz-runs`` says how often; ``make fuzz`` takes many.
"""

from __future__ import annotations

import json
import struct
import tempfile
import tracemalloc
from contextlib import suppress
from pathlib import Path
from random import Random

from torch.utils.tensorboard import SummaryWriter

from resilient.errors import KeyNotFound
from resilient.layout_repair.training_logs import logs_in
from resilient.layouts.tfevents import masked_sum
from resilient.storage.folder import DirectoryListing
from tests.helpers.mutations import spoiled_bytes, spoiled_value

PEAK_BYTES_MAX = 48 << 20
EACH = 4
"""Inputs of others for one of these, whose checksums are counted here byte by byte."""
MEASURED = 100
"""Of how many inputs the memory is watched, which makes reading several times as slow."""
BOARD, LINES = "events.out.tfevents.1.host", "log.jsonl"
ENTRIES = [
    {"at": "2026-01-01T00:00:00Z", "generation": life, "step": step, "epoch": step / 8, "loss": 0.5}
    for life, first in ((1, 1), (2, 3))
    for step in range(first, first + 4)
]
EVENT = {"event": "MetricsLogged", "generation": 1, "metrics": {"step": 9, "epoch": 1.0}}
JSON_LINES = [json.dumps(one).encode() for one in (*ENTRIES, EVENT)]


def _board():
    with tempfile.TemporaryDirectory() as at:
        with SummaryWriter(at) as board:
            board.add_text("args", "{}")
            for one in ENTRIES:
                board.add_scalar("train/loss", 0.5, one["step"])
                board.add_scalar("eval/loss", 0.5, one["step"], new_style=True)
                board.add_scalar("train/epoch", one["epoch"], one["step"], double_precision=True)
        (path,) = Path(at).iterdir()
        return path.read_bytes()


def bodies(data):
    found, at = [], 0
    while at < len(data):
        (length,) = struct.unpack("<Q", data[at : at + 8])
        found.append(data[at + 12 : at + 12 + length])
        at += length + 16
    return found


def framed(body):
    head = struct.pack("<Q", len(body))
    sums = (struct.pack("<I", masked_sum(one)) for one in (head, body))
    return head + next(sums) + body + next(sums)


DATA = _board()
BODIES = bodies(DATA)


class Held:
    """Two files in memory as a folder."""

    url = "memory://held"

    def __init__(self, files):
        self._files = files

    def list(self):
        return DirectoryListing({name: len(data) for name, data in self._files.items()})

    def read(self, name, start, length):
        if name not in self._files:
            raise KeyNotFound(name, key=name)
        return self._files[name][start : start + length]


def spoiled(random):
    if random.random() < 0.3:
        return {BOARD: spoiled_bytes(random, DATA, [DATA])}
    if random.random() < 0.6:
        some = list(BODIES)
        for _ in range(random.choice((1, 1, 3))):
            at = random.randrange(len(some))
            some[at] = spoiled_bytes(random, some[at], BODIES)
        return {BOARD: b"".join(map(framed, some))}
    lines = list(JSON_LINES)
    at = random.randrange(len(lines))
    with suppress(ValueError, RecursionError):
        lines[at] = json.dumps(spoiled_value(random, json.loads(lines[at]))).encode()
    data = b"\n".join(lines)
    return {LINES: data if random.random() < 0.5 else spoiled_bytes(random, data, JSON_LINES)}


def read(files):
    folder = Held(files)
    found = logs_in(folder, folder.list())
    for log in found:
        for entry in log.until(6):
            assert 0 <= entry["step"] <= 6
            json.dumps(entry)
        assert log.reach() >= 0
    return found


def test_an_unspoiled_history_is_read():
    lines, board = read({BOARD: DATA, LINES: b"\n".join(JSON_LINES)})
    assert [one["step"] for one in lines.until(6)] == [1, 2, 3, 4, 5, 6]
    assert len(board.until(6)) == 12
    assert b"".join(map(framed, BODIES)) == DATA


def test_spoiled_histories_are_read_or_not_and_nothing_raises(request, record_property):
    runs = -(-request.config.getoption("--fuzz-runs") // EACH)
    begin = request.config.getoption("--fuzz-seed")
    peak, some = 0, 0
    tracemalloc.start(1)
    try:
        for number in range(begin, begin + runs):
            files = spoiled(Random(f"histories/{number}"))
            if number - begin == MEASURED:
                tracemalloc.stop()
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                some += bool(read(files))
            except BaseException as error:
                raise AssertionError(f"--fuzz-seed {number} --fuzz-runs 1") from error
            peak = max(peak, tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    record_property("fuzz_runs", runs)
    assert 0 < peak <= PEAK_BYTES_MAX
    assert some
