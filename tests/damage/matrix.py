"""Each damage done to each layout: what is said of it here, and what its own tool does."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from resilient.diff.foreign_verify import verify_foreign
from resilient.layouts.detect import read_layout
from resilient.layouts.resumability import assess_resumability, remedy
from resilient.storage.folder import open_folder
from tests.damage import own
from tests.damage.kinds import Inapplicable, Scene
from tests.damage.repairs import loaded, quiet, repaired

if TYPE_CHECKING:
    from tests.damage.kinds import Kind
    from tests.damage.samples import Loaded, Sample

UNSEEN = "unseen"


@dataclass(frozen=True)
class Said:
    """What is said of a checkpoint.

    Attributes:
        answer: of the verdict; ``unknown`` of what is no checkpoint.
        why: of the verdict.
        problems: place, finding, and what would help.
    """

    answer: str
    why: tuple[str, ...]
    problems: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Cell:
    """One damage of one layout.

    Attributes:
        sample: the layout's name.
        kind: the damage's name.
        answer: what the verdict became, or :data:`UNSEEN` when nothing is said that was not said
            of the whole one.
        told: what is said of it: place and finding.
        stock: what the tool itself does (:func:`loaded`); empty if it was not run.
        repair: what a repair does (:mod:`repairs`).
        how: the first thing that it does, or why it does nothing.
        fixes: what is said to help against each thing that is told.
    """

    sample: str
    kind: str
    answer: str
    told: str
    stock: str = ""
    repair: str = ""
    how: str = ""
    fixes: tuple[str, ...] = ()


def say(path: Path) -> Said:
    folder = open_folder(str(path))
    listing = folder.list()
    contents = read_layout(folder, listing)
    if contents is None:
        return Said("unknown", (), ((".", "not a checkpoint of a supported tool", ""),))
    found = (*contents.problems, *verify_foreign(folder, listing, contents))
    verdict = assess_resumability(replace(contents, problems=found), str(path))
    told = tuple((one.place, one.what, remedy(one, str(path))) for one in found)
    return Said(verdict.answer, verdict.why, told)


def said_of(sample: Sample, path: Path) -> Said:
    return Said(*own.verify(path)) if sample.is_ours else say(path)


class Bench:
    """Undamaged checkpoints, each made when it is first needed, and a place for their copies."""

    def __init__(self) -> None:
        self._root = tempfile.TemporaryDirectory()
        self.made: dict[str, tuple[Path, Path]] = {}
        self._loads: dict[str, Loaded] = {}
        self.reports: dict[str, Said] = {}
        self._copy = Path(self._root.name) / "copy"

    def close(self) -> None:
        self._root.cleanup()

    def make(self, sample: Sample) -> tuple[Path, Path]:
        """Return the folder of a sample and the path of its checkpoint."""
        if sample.name not in self.made:
            folder = Path(self._root.name) / sample.name
            folder.mkdir()
            with quiet():
                path = sample.make(folder)
            self.made[sample.name] = (folder, path)
            self.reports[sample.name] = said_of(sample, path)
        return self.made[sample.name]

    def copy(self, sample: Sample) -> Scene:
        folder, path = self.make(sample)
        shutil.rmtree(self._copy, ignore_errors=True)
        shutil.copytree(folder, self._copy)
        return Scene(sample, self._copy / path.relative_to(folder))

    def cell(self, sample: Sample, kind: Kind, *, is_loaded: bool) -> Cell | None:
        scene = self.copy(sample)
        try:
            with quiet():
                path = kind.spoil(scene) or scene.path
        except Inapplicable:
            return None
        said, before = said_of(sample, path), self.reports[sample.name]
        known = {one[:2] for one in before.problems}
        new = [one for one in said.problems if one[:2] not in known]
        answer = said.answer if new or said.answer != before.answer else UNSEEN
        told = f"{new[0][0]}: {new[0][1]}" if new else "; ".join(said.why)
        stock = loaded(sample, path)[0] if is_loaded else ""
        whole = self.load_whole(sample) if is_loaded else None
        repair, how = repaired(sample, path, self.make(sample)[1], whole)
        fixes = tuple(one[2] for one in new)
        return Cell(sample.name, kind.name, answer, told, stock, repair, how, fixes)

    def load_whole(self, sample: Sample) -> Loaded:
        """Return what the tool has after it loaded what is not damaged."""
        if sample.name not in self._loads:
            word, found = loaded(sample, self.copy_whole(sample))
            assert found is not None, f"{sample.name} is not whole: {word}"
            self._loads[sample.name] = found
        return self._loads[sample.name]

    def copy_whole(self, sample: Sample) -> Path:
        folder, path = self.make(sample)
        aside = self._copy.with_name("whole")
        shutil.rmtree(aside, ignore_errors=True)
        shutil.copytree(folder, aside)
        return aside / path.relative_to(folder)
