"""Repositories that hold nothing but a ledger, written as a run writes it, without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING

from resilient.checkpoint.catalog import read_manifest
from resilient.checkpoint.commit import commit
from resilient.checkpoint.generations import claim
from resilient.checkpoint.ledger_segments import put_segment, random_order
from resilient.checkpoint.resume_selection import ResumeResult
from resilient.format.document import seal
from resilient.format.keys import CheckpointId, segment_key
from resilient.format.ledger import (
    CHECK_LENGTH,
    LedgerHead,
    LedgerPosition,
    extend_chain,
    first_link,
)
from resilient.format.manifest import Manifest
from resilient.storage.open import open_store
from resilient.train.sample_ledger import Ledger
from tests.helpers.cli_repositories import TickingClock

if TYPE_CHECKING:
    from pathlib import Path

SEED = 7


@dataclass
class Run:
    """A run over ``size`` samples that one can tell to live, to step, to save and to go on."""

    folder: Path
    size: int = 40
    batch: int = 4
    clock: TickingClock = field(default_factory=TickingClock)

    def __post_init__(self) -> None:
        self.store = open_store(str(self.folder))

    def begin(self, parent: CheckpointId | None = None, ranks: int = 2) -> None:
        """Begin a life from a checkpoint, with as many ranks."""
        self.parent = parent
        data, step = {}, 0
        cursor = SimpleNamespace(size=self.size, seed=SEED, epoch=0, samples=0)
        if parent is not None:
            data, step = dict(read_manifest(self.store, parent).data), parent.step
            cursor.epoch, cursor.samples = data["epoch"], data["samples"]
        self.life = claim(self.store, parent, cause="test", clock=self.clock)
        self.ledger, self.step, self.cursor = Ledger(is_kept=True, ranks=ranks), step, cursor
        self.layout = SimpleNamespace(batch=self.batch, ranks=ranks)
        result = ResumeResult(parent, step, {}, ranks, (), data) if parent else None
        self.ledger.begin(result, step, cursor)
        self.see_order()

    def see_order(self, seed: int = SEED) -> None:
        order = random_order(self.size, seed + self.cursor.epoch)
        self.ledger.see_order(self.cursor, "random", SimpleNamespace(numpy=lambda: order))

    def train(self, steps: int = 1) -> None:
        """Make steps of one round each."""
        for _ in range(steps):
            if self.cursor.samples == self.size:
                self.next_epoch()
            start = self.cursor.samples
            self.cursor.samples = min(self.size, start + self.batch * self.layout.ranks)
            self.step += 1
            loss = [1 / self.step]
            self.ledger.end_step(self.step, start, self.cursor, self.layout, 1, loss, updated=True)

    def next_epoch(self) -> None:
        self.cursor.epoch, self.cursor.samples = self.cursor.epoch + 1, 0
        self.see_order()

    def save(self, *, commits: bool = True) -> CheckpointId:
        """Put the segment, and commit a checkpoint that holds nothing else."""
        checkpoint = CheckpointId(self.life.number, self.step)
        self.ledger.settle(lambda steps: [sum(step_of_save) for step_of_save in steps])
        segment = self.ledger.close(checkpoint, self.life.run_id)
        put_segment(self.store, segment)
        if commits:
            data = {"epoch": self.cursor.epoch, "samples": self.cursor.samples}
            data["ledger"] = segment.anchor.to_json()
            world = {"size": self.layout.ranks, "strategy": "ddp"}
            about = (self.life.run_id, checkpoint, self.parent, self.clock.now_iso(), world)
            commit(self.store, Manifest(*about, (), (), (), data=data))
        return checkpoint


def usual_run(folder: Path) -> Run:
    """Four lives: a rollback between the second and the third, three numbers of ranks."""
    run = Run(folder)
    run.begin(ranks=2)
    for _ in range(2):
        run.train(2)
        older = run.save()
    run.begin(older, ranks=1)
    run.train(3)
    run.save()
    run.begin(older, ranks=3)
    run.train(2)
    newest = run.save()
    run.begin(newest, ranks=2)
    run.train(4)
    run.save()
    return run


class Forger:
    """Changes segments and manifests, as any writer of the store can."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def keys(self) -> list[str]:
        return sorted(f"ledger/{path.name}" for path in self.folder.glob("ledger/*.json"))

    def read(self, key: str) -> dict:
        return json.loads((self.folder / key).read_text())

    def write(self, key: str, fields: dict) -> None:
        """Seal the fields as a writer would."""
        body = {name: value for name, value in fields.items() if name != "root"}
        (self.folder / key).write_bytes(seal(body))

    def rechain(self, fields: dict) -> None:
        """Make the links of a segment fit its records."""
        rows = [json.dumps(record, separators=(",", ":")) for record in fields["records"]]
        start = LedgerPosition(*(fields["start"][name] for name in ("step", "epoch", "samples")))
        opening = fields["opens"] or first_link(fields["run_id"], start)
        links = list(extend_chain(opening, fields["generation"], rows))
        fields["checks"] = [record[:CHECK_LENGTH] for record in links]
        fields["head"] = links[-1]

    def forge(self, key: str, change) -> None:
        """Change a segment, and all that stands on it: links, later segments, manifests."""
        fields = self.read(key)
        shift = -len(fields["records"])
        change(fields)
        shift += len(fields["records"])
        while True:
            self.rechain(fields)
            self.write(key, fields)
            self.anchor(fields)
            after = [
                object_key for object_key in self.keys() if self.read(object_key)["previous"] == key
            ]
            if not after:
                return
            # Where two lives go on from here, the later one is what became of the run.
            head, key = fields["head"], after[-1]
            fields = self.read(key)
            fields["opens"], fields["before"] = head, fields["before"] + shift

    def anchor(self, fields: dict) -> None:
        """Let a checkpoint's manifest name the head of its segment as it is now."""
        checkpoint = CheckpointId(fields["generation"], fields["step"])
        place = LedgerPosition(*(fields["stop"][name] for name in ("step", "epoch", "samples")))
        records = fields["before"] + len(fields["records"])
        manifest = self.read(checkpoint.manifest_key)
        anchor = LedgerHead(segment_key(checkpoint), fields["head"], records, place)
        manifest["data"]["ledger"] = anchor.to_json()
        self.write(checkpoint.manifest_key, manifest)
