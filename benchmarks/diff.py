"""Memory and time of `resilient ckpt diff` for two checkpoints of 10 GB.

Each side is a file of 100 tensors on disk, and the files differ in one tensor. `memory_over_500_mb`
is the peak memory of the process. `diff_over_reading` is its time over that of a plain sequential
read of both files. The page cache is dropped before each of the two. `GIGABYTES` in the
environment sets the size of each side.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.harness import Report

ROUNDS = 1
TENSORS = 100
COLUMNS = 1024
MEMORY_BYTES_MAX = 500_000_000
_READ_BYTES = 8 << 20
# The child prints its own peak last, in KiB as Linux counts it.
_CHILD = """
import resource, sys
from resilient_cli.app import main
code = main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
raise SystemExit(code)
"""


def run(rounds: int) -> Report:
    """Compare two files ``rounds`` times."""
    size_bytes = int(float(os.environ.get("GIGABYTES", "10")) * 1e9)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        sides = [Path(folder) / name / "model.safetensors" for name in ("before", "after")]
        for number, path in enumerate(sides):
            path.parent.mkdir()
            write(path, size_bytes, changed=number)
        found = [(seconds_of_reading(sides), *diff(sides)) for _ in range(rounds)]
    peak_bytes = max(peak for _, _, peak in found)
    ratios = {
        "memory_over_500_mb": round(peak_bytes / MEMORY_BYTES_MAX, 4),
        "diff_over_reading": round(median(took / read for read, took, _ in found), 4),
    }
    figures = {
        "rounds": rounds,
        "bytes_of_each_side": size_bytes,
        "peak_mb": round(peak_bytes / 1e6, 1),
        "diff_seconds": round(median(took for _, took, _ in found), 2),
        "reading_seconds": round(median(read for read, _, _ in found), 2),
    }
    return Report("diff", ratios, figures)


def write(path: Path, size_bytes: int, changed: int) -> None:
    """Write tensors of random numbers; the last one depends on ``changed``."""
    rows = size_bytes // TENSORS // 4 // COLUMNS
    each_bytes = rows * COLUMNS * 4
    header = {
        f"layers.{number}.weight": {
            "dtype": "F32",
            "shape": [rows, COLUMNS],
            "data_offsets": [number * each_bytes, (number + 1) * each_bytes],
        }
        for number in range(TENSORS)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    # Random exponents would make some numbers infinite. These numbers lie between 1 and 2.
    block = bytearray(os.urandom(each_bytes)) if changed == 0 else bytearray(_block_of(path))
    block[3::4] = b"\x3f" * (each_bytes // 4)
    block[2::4] = bytes(byte | 0x80 for byte in block[2::4])
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _ in range(TENSORS - 1):
            file.write(block)
        block[:1] = bytes([block[0] ^ changed])
        file.write(block)
        file.flush()
        os.fsync(file.fileno())


def _block_of(path: Path) -> bytes:
    """Return the bytes of the first tensor of the side that already exists."""
    other = path.parent.parent / "before" / path.name
    with other.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        start, stop = header["layers.0.weight"]["data_offsets"]
        return file.read(stop - start)


def seconds_of_reading(sides: list[Path]) -> float:
    """Return the seconds of a plain read of both files."""
    forget(sides)
    memory = memoryview(bytearray(_READ_BYTES))
    began = time.perf_counter()
    for path in sides:
        with path.open("rb", buffering=0) as file:
            while file.readinto(memory):
                pass
    return time.perf_counter() - began


def diff(sides: list[Path]) -> tuple[float, int]:
    """Return the seconds and the peak memory in bytes of a complete comparison."""
    forget(sides)
    folders = [str(path.parent) for path in sides]
    command = [sys.executable, "-c", _CHILD, "ckpt", "diff", *folders, "--exit-code", "--json"]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    took = time.perf_counter() - began
    assert done.returncode == 1, done.stderr[-2000:]
    return took, int(done.stderr.split()[-1]) * 1024


def forget(sides: list[Path]) -> None:
    """Drop the files from the page cache."""
    for path in sides:
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)
