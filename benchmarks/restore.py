"""Time to resume the next attempt: from the saver daemon's memory, from disk, and by peers.

One process resumes a model and its AdamW state (parameters and two moments, fp32). `keeper` and
`ours` are a whole `resume`: it lists the checkpoints, claims an attempt, and verifies every byte
against its digest. `keeper` takes the files from the shared memory of a saver daemon, `ours` from
the disk. In each round, each contender loads twice: `cold` with an empty page cache, and `warm`
right after that. Peers only load the state and verify no bytes. `memory_over_*` below 1 means that
memory is faster. `MEGAPARAMS` in the environment sets the size, 30 million by default; `CONTENDERS`
selects contenders.
"""

from __future__ import annotations

import tempfile
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.harness import Report
from benchmarks.peers.loading import cold_and_warm, makers
from benchmarks.peers.rounds import Rounds, chosen, medians, ratios, spread, turns
from benchmarks.peers.training import Training, mega_parameters
from benchmarks.stalls import open_quietly, start_keeper
from resilient.checkpoint.save.metadata import CheckpointInfo

if TYPE_CHECKING:
    from benchmarks.peers.rounds import Contender
    from resilient.checkpoint.daemon.messages import DaemonAddress

ROUNDS = 5
PEERS = ("torch_save", "dcp", "safetensors")


def run(rounds: int) -> Report:
    """Measure every contender `rounds` times in shuffled order."""
    torch.set_num_threads(1)
    training = Training(mega_parameters())
    with tempfile.TemporaryDirectory(dir=".") as place:
        folder = Path(place)
        peers = makers(training, folder)
        found = turns(
            chosen(
                {
                    "raw": peers["raw"],
                    "ours": lambda: resumed(training, folder / "ours", None),
                    "keeper": lambda: resumed(training, folder / "keeper", start_keeper()),
                    **{name: peers[name] for name in PEERS if name in peers},
                }
            ),
            folder,
            rounds,
        )
    return report(found, training.size_bytes)


def resumed(training: Training, folder: Path, keeper: DaemonAddress | None) -> Contender:
    """Save once, and return a contender that begins a new attempt from that save each time."""
    parts, numbers = training.parts(), count()
    first = open_quietly(folder, keeper, scope="first")
    first.resume(parts)
    checkpoint = first.save(1, parts, CheckpointInfo())
    first.close()

    def resume() -> None:
        checkpointer = open_quietly(folder, keeper, scope=f"life-{next(numbers)}")
        found = checkpointer.resume(parts)
        assert found is not None
        assert found.checkpoint == checkpoint
        checkpointer.close()

    return lambda _: cold_and_warm(folder, resume)


def report(found: Rounds, size_bytes: int) -> Report:
    """Return the ratios of a run."""
    pairs = {"memory_over_disk": ("keeper_cold", "ours_cold")}
    pairs["memory_over_disk_warm"] = ("keeper_warm", "ours_warm")
    for name in ("raw", *PEERS):
        pairs[f"memory_over_{name}"] = ("keeper_cold", f"{name}_cold")
        pairs[f"memory_over_{name}_warm"] = ("keeper_warm", f"{name}_warm")
    notes = {
        "rounds": len(found),
        "state_mib": size_bytes >> 20,
        "memory_over_disk_lowest_highest": spread(found, "keeper_cold", "ours_cold"),
        "memory_over_disk_warm_lowest_highest": spread(found, "keeper_warm", "ours_warm"),
    }
    return Report("restore", ratios(found, pairs), {**notes, **medians(found)})
