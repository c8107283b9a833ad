"""Repositories for the tests of the command line, written by the vault itself, without torch."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from resilient.checkpoint.commit import commit, copy_manifest, gather_receipts
from resilient.checkpoint.generations import claim
from resilient.checkpoint.save.persist import write
from resilient.format.keys import CheckpointId, shard_name
from resilient.format.manifest import Manifest, PartEntry, StoredRegion, TensorEntry
from resilient.format.regions import whole
from resilient.format.safetensors_file import StagedFile, TensorSlot, compute_layout
from resilient.storage.open import open_store

if TYPE_CHECKING:
    from pathlib import Path

SHAPES = {"wte.weight": (8, 4), "head.weight": (4, 2), "head.bias": (2,)}


@dataclass
class TickingClock:
    """Moves on by a minute whenever it is asked."""

    minutes: int = field(default=0)

    def monotonic_seconds(self) -> float:
        return 60.0 * self.minutes

    def now_iso(self) -> str:
        self.minutes += 1
        hours, minutes = divmod(self.minutes, 60)
        return f"2026-01-01T{hours:02d}:{minutes:02d}:00.000Z"

    def sleep(self, seconds: float) -> None:
        self.minutes += 1


# Files of the runs that this process has written, by the arguments. Writes that wait for a disk are
# most of the time of a small test.
_written: dict[str, dict[str, bytes]] = {}


def write_run(
    folder: Path, attempts: list[tuple[CheckpointId | None, list[int]]], parity: int = 0
) -> None:
    """Write a run of ``attempts``: where each began, and the steps that it saved.

    The second run with the same arguments is a copy of the first, tokens included.
    """
    if folder.exists():
        _save_run(folder, attempts, parity)
        return
    key = repr((attempts, parity, socket.gethostname()))
    if key not in _written:
        _save_run(folder, attempts, parity)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        _written[key] = {str(path.relative_to(folder)): path.read_bytes() for path in files}
        return
    for name, data in _written[key].items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _save_run(
    folder: Path, attempts: list[tuple[CheckpointId | None, list[int]]], parity: int
) -> None:
    store = open_store(str(folder))
    clock = TickingClock()
    for parent, steps in attempts:
        generation = claim(store, parent, cause="restart" if parent else "start", clock=clock)
        for step in steps:
            checkpoint = CheckpointId(generation.number, step)
            receipt = write(store, checkpoint, 0, _files(step), _PARTS, parity)
            about = Manifest(
                "a-run", checkpoint, parent, clock.now_iso(), {"size": 1, "strategy": "none"},
                (), (), (), {"learning_rate": 0.1, "seed": 7}, {"torch": "2.13.0"},
                {"epoch": 0, "samples": step * 8}, {"eval_loss": abs(20 - step) / 10},
            )  # fmt: skip
            commit(store, gather_receipts(about, [receipt]))
            if parity:
                copy_manifest(store, checkpoint)


def write_usual_run(folder: Path, parity: int = 0) -> None:
    """Write steps 10, 20 and 30; then a second life from 20, which saved 25 and 35."""
    write_run(folder, [(None, [10, 20, 30]), (CheckpointId(1, 20), [25, 35])], parity)


def write_two_ranks(folder: Path) -> CheckpointId:
    """Write one checkpoint: the model and the documents by rank 0, the optimizer by rank 1."""
    store = open_store(str(folder))
    generation = claim(store, None, cause="start", clock=TickingClock())
    checkpoint = CheckpointId(generation.number, 10)
    model, _, documents = _files(10)
    files_of_rank_0 = write(store, checkpoint, 0, [model, documents], _PARTS)
    files_of_rank_1 = write(store, checkpoint, 1, [_tensor_file("optimizer", 10, rank=1)])
    about = Manifest(
        "a-run", checkpoint, None, TickingClock().now_iso(), {"size": 2, "strategy": "none"},
        (), (), (), {}, {"torch": "2.13.0"}, {"epoch": 0, "samples": 80}, {},
    )  # fmt: skip
    commit(store, gather_receipts(about, [files_of_rank_0, files_of_rank_1]))
    return checkpoint


_PARTS = (
    PartEntry("model", "replicated", "state.json"),
    PartEntry("optimizer", "replicated", "state.json"),
)


def _files(step: int) -> list[StagedFile]:
    state = b'{"step":%d}\n' % step
    return [
        _tensor_file("model", step),
        _tensor_file("optimizer", step),
        StagedFile("state.json", state),
    ]


def _tensor_file(part: str, step: int, rank: int = 0) -> StagedFile:
    slots = [TensorSlot(name, "F32", shape) for name, shape in SHAPES.items()]
    layout = compute_layout(slots, {})
    data = layout.head + bytes([step % 256]) * (layout.size_bytes - len(layout.head))
    file = shard_name(part, rank)
    tensors = []
    for slot in slots:
        region = StoredRegion(whole(slot.shape), file, layout.starts[slot.key], slot.size_bytes)
        tensors.append(TensorEntry(f"{part}/{slot.key}", part, slot.dtype, slot.shape, (region,)))
    return StagedFile(file, data, tuple(tensors))


def flip_bit(path: Path, *, offset: int = -1) -> None:
    """Change one bit of a file; by default in its last byte."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def truncate_file(path: Path, size_bytes: int) -> None:
    """Leave only the first bytes of a file."""
    path.write_bytes(path.read_bytes()[:size_bytes])
