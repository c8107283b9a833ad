"""Step time of the demo's model with and without the step cache, in alternating blocks of one run.

One training of two ranks (and one of one rank) runs under `resilient train`, with gloo and one
thread each. Blocks of steps alternate. With `--every memory=1step`, one block keeps each step in
memory, and the next block keeps none. The first two blocks are not counted. A step is measured from
its beginning to the beginning of the next one, so a copy during the next pass counts. `ratios` are
medians over the blocks with the step cache. The ratio of a block is its median step time, divided
by the mean of the block before and the block after it. The machine's speed changes from minute to
minute by more than the cost of a copy, so only neighbours are compared. Half of the ratios are
between the `quartiles`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

from benchmarks.harness import Report

ROUNDS = 40
BLOCK_STEPS = 10
RANKS = (1, 2)
_WARM_BLOCKS = 2
_SCRIPT = Path(__file__).parent / "peers" / "holding.py"


def run(rounds: int) -> Report:
    """Train ``rounds`` pairs of blocks on each number of ranks."""
    ratios: dict[str, float] = {}
    figures: dict[str, Any] = {"rounds": rounds, "block_steps": BLOCK_STEPS}
    for ranks in RANKS:
        blocks = _blocks(ranks, 2 * rounds + _WARM_BLOCKS + 1)
        counted = blocks[_WARM_BLOCKS:]
        found = [
            block["seconds"] / mean((before["seconds"], behind["seconds"]))
            for before, block, behind in zip(counted, counted[1:], counted[2:], strict=False)
            if block["held"]
        ]
        name = f"{ranks}_ranks" if ranks > 1 else "1_rank"
        ratios[f"held_over_not_{name}"] = round(median(found), 4)
        low, _, high = quantiles(found, n=4) if len(found) > 1 else found * 3
        figures[f"{name}_quartiles"] = [round(low, 4), round(high, 4)]
        for is_held, kind in ((True, "held"), (False, "not_held")):
            some = [block["seconds"] for block in counted if block["held"] is is_held]
            figures[f"{name}_{kind}_step_seconds"] = round(median(some), 5)
    return Report("everystep", ratios, figures)


def _blocks(ranks: int, blocks: int) -> list[dict[str, Any]]:
    """Return the median step of each block of one training, and if it was kept in memory."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        command = [sys.executable, "-m", "resilient_cli", "train", "--nproc-per-node", str(ranks)]
        command += [str(_SCRIPT), folder, str(blocks), str(BLOCK_STEPS)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "not cached in memory" not in done.stderr, done.stderr[-3000:]
        steps = json.loads((Path(folder) / "steps.json").read_text(encoding="utf-8"))
    found = []
    for block in range(blocks):
        block_steps = [step for step in steps if step["block"] == block]
        seconds = median(record["seconds"] for record in block_steps)
        found.append({"held": block_steps[-1]["held"], "seconds": seconds})
    return found
