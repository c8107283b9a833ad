"""How long training waits for a save and how soon it is durable, against raw copies and peers.

One process, local disk, a model and its AdamW (parameters and two moments, fp32). Per round and
contender: `stall` is how long the training thread waits, `durable` how long until the bytes are
synced. `keeper` is ours with a keeper process; `overlap` is ours with overlap, where training
makes a forward and backward pass in between. `memcpy` copies the same bytes into a warm buffer,
`raw` writes them in one sequential stream and syncs. All state changes before each save of ours,
so that nothing can be referred to. `cpu` is this process's; `peak_mib` what was added to the
memory that it held. `MEGAPARAMS` in the environment sets the size, 30 million by default;
`CONTENDERS` names some.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from benchmarks.harness import Report
from benchmarks.peers.rounds import Rounds, chosen, medians, ratios, spread, turns, wants
from benchmarks.peers.saving import makers
from benchmarks.peers.training import Training, mega_parameters
from benchmarks.stalls import keeper_of, overlap_of, training_speed_while_persisting

ROUNDS = 5


def run(rounds: int) -> Report:
    """Measure every contender `rounds` times in shuffled order."""
    torch.set_num_threads(1)
    training = Training(mega_parameters())
    with tempfile.TemporaryDirectory(dir=".") as folder:
        own = {
            "keeper": lambda: keeper_of(training, Path(folder) / "keeper"),
            "overlap": lambda: overlap_of(training.size_bytes, Path(folder) / "overlap"),
        }
        contenders = chosen({**own, **makers(training, Path(folder))})
        found = turns(contenders, Path(folder), rounds)
        speed = {}
        if wants("speed"):
            speed["training_speed_while_persisting"] = training_speed_while_persisting(
                training, Path(folder), rounds
            )
    return report(found, training.size_bytes, speed)


def report(found: Rounds, size_bytes: int, measured: dict[str, float]) -> Report:
    """Return the ratios of a run."""
    names = sorted(name.removesuffix("_durable") for name in found[0] if name.endswith("_durable"))
    pairs = {
        "stall_over_memcpy": ("ours_stall", "memcpy_stall"),
        "ours_over_hf_save": ("ours_stall", "hf_stall"),
        "ours_over_dcp_async": ("ours_stall", "dcp_async_thread_stall"),
        "durable_throughput_over_raw": ("raw_durable", "ours_durable"),
    }
    pairs |= {f"{name}_stall_over_memcpy": (f"{name}_stall", "memcpy_stall") for name in names}
    pairs |= {f"{name}_throughput_over_raw": ("raw_durable", f"{name}_durable") for name in names}
    notes = {
        "rounds": len(found),
        "state_mib": size_bytes >> 20,
        "durable_throughput_over_raw_lowest_highest": spread(found, "raw_durable", "ours_durable"),
    }
    return Report("save", ratios(found, pairs) | measured, {**notes, **medians(found)})
