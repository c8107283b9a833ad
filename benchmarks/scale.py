"""Requests of one save to store, key-value store and rank 0, with up to 16,384 ranks.

Every rank is a thread of this process that runs `persist`: the whole path from host bytes to the
commit and the work after it, over the real `ControlGroup` and `TorchKVStore`. The state is
simulated: each rank has one row of each of eight tensors. The key-value server and the store are
simulated in memory, and count their requests (:mod:`benchmarks.peers.counting`). The figures are
those of the second save of an attempt: it has an older checkpoint to delete, and a dedup base.

The times contain no network time. So the path of a save is given as the number of calls that must
follow each other, over all ranks. Times are processor times of rank 0 alone, without the time of
the simulated servers.
"""

from __future__ import annotations

import random
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Report
from benchmarks.peers.counting import CountingBoardStore, CountingStore, Meter, Place
from resilient.checkpoint.context import CheckpointContext, CheckpointOptions
from resilient.checkpoint.generations import claim
from resilient.checkpoint.retention import Retention
from resilient.checkpoint.save.dedup import DedupBase
from resilient.checkpoint.save.metadata import CheckpointInfo, draft_manifest
from resilient.checkpoint.save.persist import SaveHistory, SaveJob, persist
from resilient.clock import SystemClock
from resilient.distributed.coordination import ControlGroup
from resilient.distributed.launch_env import World
from resilient.distributed.torch_kv_store import TorchKVStore
from resilient.events import Emitter
from resilient.format.document import DOCUMENT_BYTES_MAX, canonical
from resilient.format.keys import CheckpointId, rank_part, rank_part_file, shard_name
from resilient.format.manifest import PartEntry, StoredRegion, TensorEntry
from resilient.format.regions import Region, whole
from resilient.format.safetensors_file import StagedFile, TensorSlot, compute_layout
from resilient.testing.memory_store import MemoryStore

if TYPE_CHECKING:
    from resilient.checkpoint.generations import Generation

ROUNDS = 1
SIZES = (1, 8, 64, 512, 4096, 16384)
TENSORS = 8
COLUMNS = 4
_STACK_BYTES = 512 << 10
_WITHIN_SECONDS = 3600.0


def run(rounds: int, sizes: tuple[int, ...] = SIZES) -> Report:
    """Save at every number of ranks; the counts are the same in each round."""
    found = {size: max_of([save_twice(size) for _ in range(rounds)]) for size in sizes}
    last, first = found[sizes[-1]], found[sizes[min(1, len(sizes) - 1)]]
    per_rank = {
        f"{name}_per_rank_over_{sizes[1]}": round(
            last[name] / sizes[-1] / (first[name] / sizes[1]), 3
        )
        for name in ("store_requests", "sent_bytes", "manifest_bytes", "coordinator_cpu_seconds")
        if len(sizes) > 1
    }
    figures: dict[str, Any] = {f"ranks_{size}": result for size, result in found.items()}
    return Report("scale", per_rank, {"tensors": TENSORS, **figures})


def max_of(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the round in which rank 0 worked least; all other figures are the same."""
    return min(rounds, key=lambda measured: measured["coordinator_cpu_seconds"])


@dataclass
class Gang:
    """All ranks of one attempt.

    Attributes:
        shared: Contents of the store.
        place: Contents of the key-value server.
        meters: Meters of the measured save, by rank.
        failed: Errors that ranks raised.
    """

    size: int
    shared: MemoryStore = field(default_factory=MemoryStore)
    place: Place = field(default_factory=Place)
    meters: dict[int, Meter] = field(default_factory=dict)
    failed: list[BaseException] = field(default_factory=list)

    def rank_main(self, rank: int, generation: Generation) -> None:
        """Save twice as one rank; only the second is metered."""
        try:
            self._save_twice(rank, generation)
        except BaseException as error:
            self.failed.append(error)
            raise

    def _save_twice(self, rank: int, generation: Generation) -> None:
        meter = self.meters[rank] = Meter()
        key_value_store = TorchKVStore(CountingBoardStore(self.place, meter))  # type: ignore[arg-type]
        store, world = CountingStore(self.shared, meter), World(rank, self.size)
        comms = ControlGroup(key_value_store, world, "save")
        limits = CheckpointOptions(Retention(keep_last=1), _WITHIN_SECONDS)
        context = CheckpointContext(store, comms, limits, SystemClock(), Emitter(SystemClock()))
        memory, bases = SaveHistory(), ()
        for step in (1, 2):
            meter.begin()
            persist(context, _job(context, generation, step, bases), memory)
            meter.end()
            bases = (DedupBase(CheckpointId(generation.number, step)),)


def save_twice(size: int) -> dict[str, Any]:
    """Return the figures of the second save of an attempt with ``size`` ranks."""
    group = Gang(size)
    generation = claim(group.shared, None, cause="start", clock=SystemClock())
    before = threading.stack_size(_STACK_BYTES)
    threads = [
        threading.Thread(target=group.rank_main, args=(rank, generation)) for rank in range(1, size)
    ]
    for thread in threads:
        thread.start()
    threading.stack_size(before)
    group.rank_main(0, generation)
    for thread in threads:
        thread.join()
    assert not group.failed, group.failed[0]
    return _figures(group, CheckpointId(generation.number, 2).manifest_key)


def _job(
    context: CheckpointContext, generation: Generation, step: int, bases: tuple[DedupBase, ...]
) -> SaveJob:
    about = draft_manifest(context, generation, step, CheckpointInfo(strategy="fsdp"), ())
    files = _files(step, context.world.rank, context.world.size)
    parts = (
        (PartEntry("model", "replicated", "state.json"),) if context.world.is_coordinator else ()
    )
    return SaveJob(about, files, parts, (), step == 1, f"save/{step}", 0.0, float, bases)


def _files(step: int, rank: int, ranks: int) -> tuple[StagedFile, ...]:
    """Return a row of each tensor, which changes, and random state, which does not."""
    row, draw = Region((rank, 0), (1, COLUMNS)), random.Random(f"{step} {rank}")  # noqa: S311
    model = {f"model/layer.{at}.weight": draw.randbytes(4 * COLUMNS) for at in range(TENSORS)}
    own = f"{rank_part('rng_state', rank)}/words"
    files = [
        _packed(shard_name("model", rank), model, row, (ranks, COLUMNS)),
        _packed(rank_part_file("rng_state", rank), {own: bytes(16)}, whole((4,)), (4,)),
    ]
    if rank == 0:
        files.append(StagedFile("state.json", canonical({"model": {"steps": step}})))
    return tuple(files)


def _packed(
    name: str, tensors: dict[str, bytes], box: Region, shape: tuple[int, ...]
) -> StagedFile:
    layout = compute_layout([TensorSlot(key, "F32", box.lengths) for key in tensors], {})
    data = bytearray(layout.head.ljust(layout.size_bytes, b"\0"))
    entries = []
    for key, content in tensors.items():
        start = layout.starts[key]
        data[start : start + len(content)] = content
        stored = StoredRegion(box, name, start, len(content))
        entries.append(TensorEntry(key, key.partition("/")[0], "F32", shape, (stored,)))
    return StagedFile(name, bytes(data), tuple(entries))


def _figures(group: Gang, manifest_key: str) -> dict[str, Any]:
    meters, zero = group.meters.values(), group.meters[0]
    other_meters = [meter for rank, meter in group.meters.items() if rank]
    size_bytes = len(group.shared.objects[manifest_key])
    return {
        "store_requests": sum(sum(meter.store.values()) for meter in meters),
        "store_requests_per_rank": max(
            (sum(meter.store.values()) for meter in other_meters), default=0
        ),
        "coordinator_store_requests": dict(sorted(zero.store.items())),
        "messages": sum(sum(meter.board.values()) for meter in meters),
        "messages_per_rank": max((sum(meter.board.values()) for meter in other_meters), default=0),
        "coordinator_messages": dict(sorted(zero.board.items())),
        "sent_bytes": sum(meter.sent_bytes for meter in meters),
        "sent_bytes_per_rank": max(meter.sent_bytes for meter in other_meters or meters),
        "coordinator_received_bytes": zero.received_bytes,
        "manifest_bytes": size_bytes,
        "manifest_share_of_limit": round(size_bytes / DOCUMENT_BYTES_MAX, 4),
        "path_to_commit_calls": zero.path_to_commit,
        "path_to_ruling_calls": max(meter.path for meter in other_meters or meters),
        "path_to_end_calls": zero.path,
        "coordinator_cpu_to_commit_seconds": round(zero.cpu_to_commit_seconds, 3),
        "coordinator_cpu_seconds": round(zero.cpu_seconds, 3),
    }


def table(report: Report) -> str:
    """Return the figures as the table of docs/scale.md, with a column per number of ranks."""
    columns = {name: column for name, column in report.figures.items() if name.startswith("ranks_")}
    heads = " | ".join(f"{int(name.removeprefix('ranks_')):,}" for name in columns)
    lines = [f"| ranks | {heads} |", "|" + "---|" * (len(columns) + 1)]
    for row in next(iter(columns.values())):
        cells = " | ".join(_cell(column[row]) for column in columns.values())
        lines.append(f"| `{row}` | {cells} |")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {count:,}" for name, count in value.items())
    return f"{value:,}"


if __name__ == "__main__":
    sizes = tuple(int(word) for word in sys.argv[1:]) or SIZES
    print(table(run(ROUNDS, sizes)))
