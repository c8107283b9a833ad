"""Time to load a checkpoint into the live tensors and verify it, against raw reads and peers.

One process loads a model and its AdamW state (parameters and two moments, fp32) from a local disk.
In each round, each contender loads twice: `cold` with an empty page cache, and `warm` right after
that. `raw` reads the same bytes in one sequential stream into memory whose pages exist already. Our
library reads as `resume` does, into the live tensors, and verifies every byte against its digest.
The peers verify nothing. `cpu` is the processor time of this process for both loads, and `peak_mib`
the memory that it added. `MEGAPARAMS` in the environment sets the size, 30 million by default;
`CONTENDERS` selects contenders.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from benchmarks.harness import Report
from benchmarks.peers.loading import makers
from benchmarks.peers.rounds import Rounds, chosen, medians, ratios, spread, turns
from benchmarks.peers.training import Training, mega_parameters

ROUNDS = 5


def run(rounds: int) -> Report:
    """Measure every contender `rounds` times in shuffled order."""
    torch.set_num_threads(1)
    training = Training(mega_parameters())
    with tempfile.TemporaryDirectory(dir=".") as folder:
        found = turns(chosen(makers(training, Path(folder))), Path(folder), rounds)
    return report(found, training.size_bytes)


def report(found: Rounds, size_bytes: int) -> Report:
    """Return the ratios of a run."""
    names = sorted(name.removesuffix("_warm") for name in found[0] if name.endswith("_warm"))
    pairs = {
        "verified_load_throughput_over_raw": ("raw_cold", "ours_cold"),
        "verified_load_throughput_over_raw_warm": ("raw_warm", "ours_warm"),
    }
    for name in names:
        if name not in ("raw", "ours"):
            pairs[f"{name}_throughput_over_raw"] = ("raw_cold", f"{name}_cold")
            pairs[f"{name}_throughput_over_raw_warm"] = ("raw_warm", f"{name}_warm")
    notes = {
        "rounds": len(found),
        "state_mib": size_bytes >> 20,
        "verified_load_throughput_over_raw_lowest_highest": spread(found, "raw_cold", "ours_cold"),
    }
    return Report("load", ratios(found, pairs), {**notes, **medians(found)})
