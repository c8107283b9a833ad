"""Every crash state of recorded histories, each held against the invariants."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from resilient.storage.local import TEMPORARY
from resilient.testing.disk_model import Disk, FileOp, Tree
from tests.crash.figures import Figures
from tests.crash.histories import Segment, below, flat, history, shows
from tests.crash.invariants import Checker, LyingChecker

if TYPE_CHECKING:
    from collections.abc import Iterable


LYING_STATES_PER_MOMENT = 6
LYING_SECOND_LIFE_SHARE = 0.25
"""Of the share of an honest disk."""
DENSE = 0.2
"""From this share on, a life starts over wherever there is nothing to resume from."""


@dataclass(frozen=True, slots=True)
class Depth:
    """How much is looked at.

    Attributes:
        states: how many disks at each moment; all, if there are no more.
        second_lives: the share of what a store shows that a second life is lived on.
        lying_every: how many operations lie between two looks at a disk that lies; each of its
            states has to be judged, so they take the most time.
    """

    states: int = 96
    second_lives: float = 0.25
    lying_every: int = 7

    @staticmethod
    def deep() -> Depth:
        """Return what a sweep without haste takes."""
        return Depth(512, 0.08, 23)


@dataclass(slots=True)
class View:
    """What a store shows of a disk, and what else is on it."""

    digest: int
    objects: dict[str, bytes]
    foreign: dict[str, bytes]


def view_of(tree: Tree) -> View:
    objects, foreign = {}, {}
    for path, content in flat(below(tree)).items():
        if shows(path):
            objects[path] = content
        elif not path.rpartition("/")[2].startswith(TEMPORARY):
            foreign[path] = content
    return View(hash(frozenset(objects.items())), objects, foreign)


class Sweep:
    """Checks the crash states of one segment on a disk that does what it says.

    Args:
        segment: what happened.
        draw: draws states where there are too many.
        figures: are counted up.
        case: how to make it again.
        depth: how much is looked at.
    """

    def __init__(
        self, segment: Segment, draw: Random, figures: Figures, case: str, depth: Depth
    ) -> None:
        self.segment, self.draw, self.figures, self.case = segment, draw, figures, case
        self.expected = segment.expected
        starts_over = depth.second_lives >= DENSE
        self.checker = Checker(segment.setup, always_starts_over=starts_over)
        self.foreign = view_of(segment.base).foreign
        self.limit, self.second_life_share = depth.states, depth.second_lives
        self._views: dict[int, View] = {}
        # Which states a second life is tried on: a draw of its own, so that it is no rhythm.
        self._shown: dict[int, bool] = {}
        self._coin = Random(f"lives of {case}")

    def run(self) -> None:
        disk = self.disk()
        now = self._states(disk)
        for at, step in enumerate(self.segment.steps):
            if isinstance(step, FileOp):
                disk.apply(step)
                self.count_operation()
                now = self._states(disk) if self.is_moment(at) else []
            else:
                self.expected = step
            self._check(now, at)
        self.figures.second_lives += self.checker.second_lives

    def disk(self) -> Disk:
        return Disk(self.segment.base)

    def is_moment(self, _at: int) -> bool:
        return True

    def count_operation(self) -> None:
        self.figures.operations += 1

    def count_state(self, *, is_new_to_a_store: bool) -> None:
        self.figures.on_disk += 1
        self.figures.visible += is_new_to_a_store

    def _states(self, disk: Disk) -> list[View]:
        """Return what a store may show now, each once."""
        found = {}
        for state in disk.states(self.draw, self.limit, self._views.keys()):
            self.figures.moments += 1
            view = self._views.get(state.digest)
            if view is None:
                view = self._views[state.digest] = view_of(state.tree)
                self.count_state(is_new_to_a_store=view.digest not in self._shown)
                if view.digest not in self._shown:
                    self._shown[view.digest] = self._coin.random() < self.second_life_share
            found[view.digest] = view
        return list(found.values())

    def _check(self, views: Iterable[View], at: int) -> None:
        for view in views:
            live_on = self._shown[view.digest]
            facts = self.checker.facts(view.digest, view.objects, live_on=live_on)
            self.figures.checked += 1
            found = self.checker.violations(view.objects, facts, self.expected)
            if self.foreign and view.foreign != self.foreign:
                found.append("4: a foreign file was touched")
            self.figures.blame(found, f"{self.case}, step {at}")


class LyingSweep(Sweep):
    """The same on a disk that claims to have synced and often has not.

    Nothing acknowledged is safe there. But what is read is what was written, or it is refused.
    """

    def __init__(
        self, segment: Segment, draw: Random, figures: Figures, case: str, depth: Depth
    ) -> None:
        super().__init__(segment, draw, figures, f"{case}, lying", depth)
        self.checker = LyingChecker(segment.setup, always_starts_over=False)
        self.limit, self.every = LYING_STATES_PER_MOMENT, depth.lying_every
        self.second_life_share = depth.second_lives * LYING_SECOND_LIFE_SHARE

    def disk(self) -> Disk:
        honesty = self.draw.choice((0.0, 0.5, 0.9))
        return Disk(self.segment.base, lambda: self.draw.random() >= honesty)

    def is_moment(self, at: int) -> bool:
        return at % self.every == 0

    def count_operation(self) -> None:
        """It was counted when it happened."""

    def count_state(self, *, is_new_to_a_store: bool) -> None:
        self.figures.lying += is_new_to_a_store


def sweep_history(seed: int, depth: Depth = Depth()) -> Figures:
    """Return what the crash states of the history of ``seed`` showed."""
    figures = Figures(histories=1)
    for number, segment in enumerate(history(seed)):
        case = f"seed {seed}, segment {number}"
        figures.blame([f"5: a life ended: {one}" for one in segment.refused], case)
        Sweep(segment, Random(seed), figures, case, depth).run()
        LyingSweep(segment, Random(seed), figures, case, depth).run()
    return figures
