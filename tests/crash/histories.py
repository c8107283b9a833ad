"""Histories of a run, drawn from a seed, with every file operation of them on record.

Several lives, with one rank or two, save, keep what is best, rotate by a policy, prune, tag, fail
for lack of space, and are killed or lose power; the next one goes on from there, on the real disk.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random

from resilient.checkpoint import catalog
from resilient.checkpoint.promotion_policy import TieringOptions
from resilient.checkpoint.refs import read_tags
from resilient.checkpoint.retention import BestOf, Retention
from resilient.errors import ResilientError
from resilient.storage.local import LocalStore
from resilient.storage.posix import PosixFileSystem
from resilient.storage.store import is_key
from resilient.testing.disk_model import (
    Disk,
    FileOp,
    FileOpLog,
    RecordingFileSystem,
    ThreadScheduler,
    Tree,
)
from resilient.testing.fault_store import Crash
from tests.crash.ledger import Expected, Ledger, NotedStore
from tests.crash.little import DURABLE, NEAR, Life, Setup, TickingClock
from tests.crash.promotions import Pool

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder that forgets, which is what is modelled
PLACE = ("runs", "seven")
"""Where the store lies below the machine's top; the first put makes it."""

POLICIES = (
    Retention(keep_last=2),
    Retention(keep_last=1, keep_best=(BestOf("loss"),)),
    Retention(keep_last=2, keep_every=3),
    Retention(keep_last=1, keep_daily=2, verify_before_rotate="quick"),
    Retention(keep_last=3, verify_before_rotate="full"),
)
FOREIGN: Tree = {
    "readme.txt": b"not ours",
    "notes of a person.txt": b"no key",
    ".hidden": {"file": b"no key either"},
    "checkpoint-old": {"model.safetensors": b"another tool's"},
    "checkpoint-2-g1": {"notes.txt": b"a person's"},
}
LIVES = 3
SAVES_MAX = 6
TIERED_SHARE, PARITY_SHARE = 0.35, 0.3


@dataclass(frozen=True, slots=True)
class Segment:
    """What happened between two losses of power.

    Attributes:
        base: what was on the disk, durable.
        expected: what the user knew then.
        steps: operations, and ``Expected`` whenever that changed.
        setup: how the job saves.
        refused: how a life ended that should have gone on.
    """

    base: Tree
    expected: Expected
    steps: list[FileOp | Expected]
    setup: Setup
    refused: tuple[str, ...] = ()


def flat(tree: Tree, prefix: str = "") -> dict[str, bytes]:
    """Return content by path."""
    found = {}
    for name, node in tree.items():
        if isinstance(node, dict):
            found |= flat(node, f"{prefix}{name}/")
        else:
            found[prefix + name] = node
    return found


def below(tree: Tree, names=PLACE) -> Tree:
    """Return the store's folder; empty before it is made."""
    for name in names:
        tree = tree.get(name, {})
    return tree


@lru_cache(1 << 16)
def shows(path: str) -> bool:
    """Say whether a store shows what lies at ``path``."""
    return is_key(path)


def visible(tree: Tree) -> dict[str, bytes]:
    """Return what a store shows of a disk: the content of every key."""
    return {path: content for path, content in flat(below(tree)).items() if shows(path)}


def lay_down(tree: Tree, folder: Path) -> None:
    """Make real files of a tree."""
    for name, node in tree.items():
        if isinstance(node, dict):
            (folder / name).mkdir()
            lay_down(node, folder / name)
        else:
            (folder / name).write_bytes(node)


@contextmanager
def machine(tree: Tree):
    """Give a real folder that holds ``tree``."""
    where = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="crash-", dir=where)).resolve()
    try:
        lay_down(tree, folder)
        yield folder
    finally:
        shutil.rmtree(folder)


def history(seed: int) -> list[Segment]:
    """Return what one history did, segment by segment; the same for the same seed."""
    job = _Job(Random(seed))
    segments = []
    while job.lives_left > 0:
        segments.append(job.until_power_is_lost())
    return segments


def setup_of(seed: int) -> Setup:
    """Return how the job of one history saves."""
    return _setup(Random(seed))


class _Job:
    """A job that is started again and again on a machine that is not to be relied on."""

    def __init__(self, draw: Random) -> None:
        self.draw = draw
        self.setup = _setup(draw)
        self.ranks = draw.choice((1, 2, 4))
        self.tree: Tree = _before(self.setup) if draw.random() < 0.8 else {}
        self.ledger, self.clock = Ledger(visible(self.tree)), TickingClock()
        self.lives_left = LIVES
        self.refused: tuple[str, ...] = ()

    def until_power_is_lost(self) -> Segment:
        """Live lives that end or are killed, until the power goes."""
        record, first, base = FileOpLog(), self.ledger.now, self.tree
        with machine(base) as folder:
            turns = ThreadScheduler(self.draw)
            files = RecordingFileSystem(PosixFileSystem(), folder, record, turns)
            self.ledger.note = files.note
            ending = ""
            while self.lives_left > 0 and ending != "power":
                self.lives_left -= 1
                ending = self.draw.choice(("end", "kill", "power", "power"))
                if ending != "end":
                    files.die_in(self.draw.randrange(30, 400))
                self._one_life(folder, files, turns)
        self.tree = _one_of(base, record, self.draw)
        self.ledger.note = lambda expected: None
        self.ledger.lost_power(visible(self.tree))
        return Segment(base, first, record.steps, self.setup, self.refused)

    def _one_life(self, folder: Path, files: RecordingFileSystem, turns: ThreadScheduler) -> None:
        inner = LocalStore(folder.joinpath(*PLACE), files)
        self.ledger.see = lambda: {one.key: inner.get(one.key) for one in inner.list()}
        store = NotedStore(inner, self.ledger, turns.turn)
        life = Life(store, self.setup, self.clock, self.ledger, self.ranks, turns.run, Pool(turns))
        try:
            _live(life, files, self.draw, self.ledger)
        except Crash:
            self.ledger.died()
        except ResilientError as error:
            self.refused += (str(error),)
        files.revive()


def _setup(draw: Random) -> Setup:
    retention = draw.choice(POLICIES)
    is_tiered, parity = draw.random() < TIERED_SHARE, int(draw.random() < PARITY_SHARE)
    tiering = TieringOptions(draw.choice((1, 2, 3)), draw.choice((1, 2, 3))) if is_tiered else None
    return Setup(retention, tiering, parity)


def _before(setup: Setup) -> Tree:
    """Return what is there before the first life: what others put there."""
    tree: Tree = {NEAR: FOREIGN, DURABLE: FOREIGN} if setup.tiering else FOREIGN
    for name in reversed(PLACE):
        tree = {name: tree}
    return tree


def _live(life: Life, files: RecordingFileSystem, draw: Random, ledger: Ledger) -> None:
    life.begin()
    for _ in range(draw.randrange(2, SAVES_MAX + 1)):
        if draw.random() < 0.12:
            files.full_in = draw.randrange(6)
        life.save(metric=draw.random())
        files.full_in = None
        if draw.random() < 0.3:
            _keep_house(life, draw, ledger)
    life.end()


def _keep_house(life: Life, draw: Random, ledger: Ledger) -> None:
    there = catalog.committed(life.house)
    if not there:
        return
    acts = ("tag", "untag", "prune", *(("repair",) * 3 if life.setup.parity else ()))
    match draw.choice(acts):
        case "tag":
            one = draw.choice(there)
            life.tag(f"tag{draw.randrange(3)}", one)
            _pin(life, ledger)
        case "untag":
            # Whom the tag held may go from now on.
            for one in ledger.now.pinned:
                ledger.unpin(one)
            for number in range(3):
                life.untag(f"tag{number}")
        case "repair":
            one = draw.choice(there)
            life.damage(one)
            life.repair(one)
        case _:
            life.prune()
    life.end()


def _pin(life: Life, ledger: Ledger) -> None:
    for tag in read_tags(life.house):
        ledger.pin(tag.checkpoint)


def _one_of(tree: Tree, record: FileOpLog, draw: Random) -> Tree:
    """Return one disk that a power loss at the end of a record may leave."""
    disk = Disk(tree)
    for step in record.steps:
        if isinstance(step, FileOp):
            disk.apply(step)
    return draw.choice(list(disk.states(draw, 64))).tree
