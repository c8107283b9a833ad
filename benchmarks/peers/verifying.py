"""Speed of verifying a checkpoint on one core, against a core that only reads its bytes."""

from __future__ import annotations

import os
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.peers.loading import READ_BYTES, cold_and_warm
from benchmarks.peers.saving import sync
from resilient.checkpoint.commit import commit, gather_receipts
from resilient.checkpoint.generations import claim
from resilient.checkpoint.save.persist import write
from resilient.checkpoint.verify import verify
from resilient.clock import SystemClock
from resilient.format.keys import CheckpointId
from resilient.format.manifest import Manifest, PartEntry
from resilient.format.safetensors_file import StagedFile
from resilient.storage.open import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from benchmarks.peers.rounds import Contender, Figures
    from resilient.checkpoint.generations import Generation
    from resilient.storage.store import Store

FILES = 4


def verifiers(folder: Path, size_bytes: int) -> dict[str, Contender]:
    """Return contenders that read the same bytes on one core: `verify` and a plain sequential read.

    Args:
        folder: Empty folder for a repository with one checkpoint, and for a plain file.
        size_bytes: Size of each of the two.
    """
    content = os.urandom(size_bytes // FILES)
    plain, repository = folder / "plain", folder / "repository"
    plain.mkdir()
    with (plain / "raw").open("wb") as file:
        for _ in range(FILES):
            file.write(content)
    store = open_store(str(repository))
    generation = claim(store, None, cause="start", clock=SystemClock())
    files = {f"model.r00000-{number:02}.safetensors": content for number in range(FILES)}
    checkpoint = commit_files(store, generation, 1, files)
    sync(folder)
    memory = bytearray(size_bytes // FILES * FILES)

    def prove() -> None:
        assert verify(store, checkpoint, "full") == []

    def read() -> None:
        with (plain / "raw").open("rb", buffering=0) as file:
            at, view = 0, memoryview(memory)
            while came := file.readinto(view[at : at + READ_BYTES]):
                at += came
        assert at == len(memory)

    def on_one_core(place: Path, work: partial[None]) -> Figures:
        with one_core():
            return cold_and_warm(place, work)

    return {
        "verify": lambda _: on_one_core(repository, partial(prove)),
        "raw": lambda _: on_one_core(plain, partial(read)),
    }


@contextmanager
def one_core() -> Iterator[None]:
    """Keep this thread, and the threads that it starts, on one core."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def commit_files(
    store: Store, generation: Generation, step: int, files: Mapping[str, bytes]
) -> CheckpointId:
    """Commit a checkpoint with these files and a document."""
    checkpoint = CheckpointId(generation.number, step)
    part = PartEntry("trainer", "replicated", "state.json")
    staged = [StagedFile(name, data) for name, data in {"state.json": b"{}\n", **files}.items()]
    receipt = write(store, checkpoint, 0, staged, [part])
    world, now = {"size": 1, "strategy": "single"}, SystemClock().now_iso()
    about = Manifest(generation.run_id, checkpoint, None, now, world, (), (), ())
    commit(store, gather_receipts(about, [receipt]))
    return checkpoint
