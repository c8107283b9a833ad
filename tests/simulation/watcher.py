"""What must hold whatever happens, looked at whenever something does (docs/guarantees.md)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from resilient.format.digest import digest_file
from resilient.format.keys import MANIFEST, CheckpointId, parse_checkpoint, parse_generation
from resilient.format.manifest import decode
from tests.simulation.rank import content_of, value_at

if TYPE_CHECKING:
    from resilient.testing.memory_store import MemoryStore
    from tests.simulation.loop import Loop
    from tests.simulation.rank import Rank

    Asked = tuple[CheckpointId | None, int]

_UNDER_WAY_SECONDS = 10.0
"""How long a deletion may be tried again: as long as the store of a rank does, and its answer."""


class Watcher:
    """Sees all, and writes down what must not be.

    Attributes:
        violations: in the order they were seen.
        commits: how many manifests were put.
    """

    def __init__(self, loop: Loop, shared: MemoryStore) -> None:
        self.violations: list[str] = []
        self.commits = 0
        self._loop = loop
        self._shared = shared
        self._manifests: dict[str, bytes] = {}
        self._claimed: dict[int, tuple[float, object]] = {}
        self._owners: dict[int, object] = {}
        self._saving: dict[tuple[object, int], float] = {}
        self._stops: dict[object, int] = {}
        self._acknowledged: CheckpointId | None = None
        self._is_parent_gone = False
        self._parent: CheckpointId | None = None
        self._claims: list[CheckpointId | None] = []

    def wrote(self, rank: Rank, key: str, data: bytes | None) -> None:
        """Judge a write or, with None, a deletion that has happened."""
        if data is None:
            self._deleted(rank, key)
            return
        number = parse_generation(key)
        if number:
            self._claimed.setdefault(number, (self._loop.now_seconds, rank.hub))
            # From here on only what this life began from and what it saves is sure to be found.
            folder = json.loads(data)["parent"]
            parent = parse_checkpoint(folder) if folder else None
            # One that slept since it chose may name a parent that was rotated away (ADR 0048).
            is_there = parent is not None and parent.manifest_key in self._shared.objects
            self._acknowledged = parent if is_there else None
            self._is_parent_gone = parent is not None and not is_there
            self._parent, self._claims = parent, [*self._claims, parent]
        if key.endswith(f"/{MANIFEST}"):
            self._put_manifest(rank, key, data)

    def _deleted(self, rank: Rank, key: str) -> None:
        """Note that a rival took away a parent, having looked before it was claimed (ADR 0048)."""
        if self._parent is None or key != self._parent.manifest_key or not self._claimed:
            return
        newest = max(self._claimed)
        age_seconds = self._loop.now_seconds - self._claimed[newest][0]
        if rank.number < newest and age_seconds < _UNDER_WAY_SECONDS:
            self._is_parent_gone = True

    def began(self, rank: Rank) -> None:
        """Hold that a number is one life's alone."""
        if self._owners.setdefault(rank.number, rank.hub) is not rank.hub:
            self._tell(f"two lives share generation {rank.number}")

    def resuming(self) -> Asked:
        """Return what the resume that begins now must at least find."""
        return self._acknowledged, len(self._claims)

    def resumed(self, rank: Rank, choice: Any, asked: Asked) -> None:
        """Hold that what was acknowledged is not lost, and that bytes are those of the step."""
        found, (acknowledged, claims) = choice.checkpoint, asked
        # Nothing is older than what the newest life had acknowledged when this one began to look,
        # but for what a rival chose before that and claimed since: it began a line of its own.
        floors = [acknowledged, *self._claims[claims:]]
        is_ruling = rank.world.is_coordinator and None not in floors
        if is_ruling and (found is None or found < min(one for one in floors if one is not None)):
            self._tell(f"resumed from {found} though {acknowledged} was acknowledged")
        if found is not None and content_of(choice.verified) != value_at(rank.step):
            self._tell(f"{found} holds another state than that of its step")

    def saving(self, rank: Rank) -> None:
        """Note when a rank has begun to save a step."""
        self._saving.setdefault((rank.hub, rank.step), self._loop.now_seconds)

    def saved(self, rank: Rank, checkpoint: CheckpointId) -> None:
        """Hold that what a rank takes for committed is, and remember it."""
        if checkpoint.manifest_key not in self._manifests:
            self._tell(f"rank {rank.world.rank} was told that {checkpoint} is committed")
        if checkpoint.generation == max(self._claimed):
            self._acknowledged = max(checkpoint, self._acknowledged or checkpoint)

    def stopped(self, rank: Rank) -> None:
        """Hold that all ranks of a life stop after the same step."""
        agreed = self._stops.setdefault(rank.hub, rank.step)
        if agreed != rank.step:
            self._tell(f"ranks of one life stop after steps {agreed} and {rank.step}")

    def ended(self, code: int) -> None:
        """Hold that a code is true: nothing is ever damaged here, so no checkpoint was lost."""
        if code in (3, 65, 66) and not self._is_parent_gone:
            self._tell(f"the job ended with {code}, and nothing is damaged")
        if code == 1:
            self._tell("the job ended with 1: an error that nobody explained")

    def finished(self, code: int | None, steps: int) -> None:
        """Hold that an undisturbed job comes to the end."""
        done = any(f"checkpoint-{steps}-" in key for key in self._shared.objects)
        if (code != 0 or not done) and not self._is_parent_gone:
            self._tell(f"a calm job after the storm ended with {code}, done: {done}")

    def _put_manifest(self, rank: Rank, key: str, data: bytes) -> None:
        before = self._manifests.setdefault(key, data)
        if before != data:
            self._tell(f"double commit: two manifests at {key}")
        self.commits += 1
        manifest = decode(data, key)
        checkpoint = manifest.checkpoint
        self._hold_fence(rank, checkpoint)
        voters = {file.rank for file in manifest.files}
        if voters != set(range(rank.world.size)):
            self._tell(f"{checkpoint} was committed with the votes of {sorted(voters)} only")
        if max(self._claimed) > checkpoint.generation:
            # Its put was under way when a newer life began, which may have swept the files: nobody
            # resumes from it (ADR 0048).
            return
        for file in manifest.files:
            content = self._shared.objects.get(checkpoint.key(file.name))
            if content is None or digest_file(content) != file.proof:
                self._tell(f"{checkpoint} was committed, and {file.name} is not whole")

    def _hold_fence(self, rank: Rank, checkpoint: CheckpointId) -> None:
        """A life that was outranked before the save began commits nothing of it."""
        began_seconds = self._saving.get((rank.hub, rank.step), self._loop.now_seconds)
        for number, (at_seconds, _) in self._claimed.items():
            if number > checkpoint.generation and at_seconds < began_seconds:
                self._tell(f"{checkpoint} was committed after life {number} had begun")

    def _tell(self, what: str) -> None:
        self.violations.append(f"at {self._loop.now_seconds:.3f} s: {what}")
