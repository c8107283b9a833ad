"""Wait of training for a save and time until it is durable, against raw copies and peers.

One process saves a model and its AdamW (parameters and two moments, fp32) to a local disk. Per
round and contender, `stall` is the time that the training thread waits, and `durable` the time
until the bytes are synced.

* `keeper` is ours with a saver daemon.
* `overlap` is ours with overlap: training makes a forward and backward pass during the save. `call`
  is the wait in save() alone.
* `dcp_overlap_*` is DCP in the same loop, which waits for its copy before the step as ours does.
* `dcp_async_*` is DCP's call alone, which does not tell when the state may change. `torn` is the
  share of bytes of the next step in such a checkpoint, if the loop continues at once.
* `memcpy` copies the same bytes into a warm buffer. `raw` writes them in one sequential stream and
  syncs.
* `cpu` is the processor time of this process, and `peak_mib` the memory that it added.
* `speed` is the speed of a loop on all cores while a save is persisted: by a throttled thread, by a
  thread at full speed, and by a saver daemon.

All state changes before each save of ours, so that nothing can be deduplicated. A turn is repeated
if other processes used the machine. `MEGAPARAMS` in the environment sets the size, 30 million by
default; `CONTENDERS` selects contenders.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.harness import Report
from benchmarks.peers.overlapping import dcp_overlap_of, torn_share
from benchmarks.peers.rounds import Maker, Rounds, chosen, medians, ratios, spread, turns, wants
from benchmarks.peers.saving import makers
from benchmarks.peers.training import Training, mega_parameters
from benchmarks.stalls import Loop, keeper_of, overlap_of, speeds_while_persisting

ROUNDS = 5


def run(rounds: int) -> Report:
    """Measure every contender `rounds` times in shuffled order."""
    torch.set_num_threads(1)
    training = Training(mega_parameters())
    with tempfile.TemporaryDirectory(dir=".") as folder:
        contenders = chosen(
            {
                "keeper": lambda: keeper_of(training, Path(folder) / "keeper"),
                **makers(training, Path(folder)),
                **overlapping(training.size_bytes, Path(folder)),
            }
        )
        found = turns(contenders, Path(folder), rounds)
        measured: dict[str, float] = {}
        if wants("speed"):
            measured |= speeds_while_persisting(training, Path(folder), rounds)
        if wants("torn"):
            place = Path(folder) / "torn"
            measured["dcp_async_torn_share"] = torn_share(
                training, place, AsyncCheckpointerType.THREAD
            )
    return report(found, training.size_bytes, measured)


def overlapping(size_bytes: int, folder: Path) -> dict[str, Maker]:
    """Return the contenders that save during a pass of the same loop."""
    loop = cache(lambda: Loop.of_size(size_bytes))
    found: dict[str, Maker] = {
        "overlap": lambda: overlap_of(loop(), size_bytes, folder / "overlap")
    }
    for kind in AsyncCheckpointerType:
        name = f"dcp_overlap_{kind.value}"
        found[name] = lambda kind=kind: dcp_overlap_of(loop(), size_bytes, kind)  # type: ignore[misc]
    return found


def report(found: Rounds, size_bytes: int, measured: dict[str, float]) -> Report:
    """Return the ratios of a run."""
    names = sorted(name.removesuffix("_durable") for name in found[0] if name.endswith("_durable"))
    pairs = {
        "stall_over_memcpy": ("ours_stall", "memcpy_stall"),
        "ours_over_hf_save": ("ours_stall", "hf_stall"),
        "overlap_over_hf_save": ("overlap_stall", "hf_stall"),
        "ours_over_dcp_async": ("ours_stall", "dcp_async_thread_stall"),
        "overlap_over_dcp_overlap_thread": ("overlap_stall", "dcp_overlap_thread_stall"),
        "overlap_over_dcp_overlap_process": ("overlap_stall", "dcp_overlap_process_stall"),
        "overlap_call_over_dcp_async_call": ("overlap_call", "dcp_async_thread_stall"),
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
