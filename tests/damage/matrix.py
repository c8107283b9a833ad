"""Each damage done to each layout: what is said of it here, and what its own tool does."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import tempfile
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kinds import Inapplicable, Scene
from torch.distributed.checkpoint.api import CheckpointException

from resilient.comparison.proving import prove
from resilient.layouts.judging import judge
from resilient.layouts.recognizing import read_layout
from resilient.storage.folder import open_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kinds import Kind
    from samples import Sample

UNSEEN = "unseen"


@dataclass(frozen=True)
class Said:
    """What is said of a checkpoint.

    Attributes:
        answer: of the verdict; ``unknown`` of what is no checkpoint.
        why: of the verdict.
        problems: place and finding.
    """

    answer: str
    why: tuple[str, ...]
    problems: tuple[tuple[str, str], ...]


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
    """

    sample: str
    kind: str
    answer: str
    told: str
    stock: str = ""


def say(path: Path) -> Said:
    folder = open_folder(str(path))
    listing = folder.list()
    contents = read_layout(folder, listing)
    if contents is None:
        return Said("unknown", (), ((".", "no checkpoint of a tool that is known"),))
    found = (*contents.problems, *prove(folder, listing, contents))
    verdict = judge(replace(contents, problems=found), str(path))
    return Said(verdict.answer, verdict.why, tuple((one.place, one.what) for one in found))


class Bench:
    """Whole checkpoints, made once, and a place for their copies."""

    def __init__(self, samples: list[Sample]) -> None:
        self._held = tempfile.TemporaryDirectory()
        root = Path(self._held.name)
        self._made: dict[str, tuple[Path, Path]] = {}
        self.whole: dict[str, Said] = {}
        for one in samples:
            folder = root / one.name
            folder.mkdir()
            with quiet():
                path = one.make(folder)
            self._made[one.name] = (folder, path)
            self.whole[one.name] = say(path)
        self._copy = root / "copy"

    def close(self) -> None:
        self._held.cleanup()

    def copy(self, sample: Sample) -> Scene:
        folder, path = self._made[sample.name]
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
        said, before = say(path), self.whole[sample.name]
        new = [one for one in said.problems if one not in before.problems]
        answer = said.answer if new or said.answer != before.answer else UNSEEN
        told = f"{new[0][0]}: {new[0][1]}" if new else "; ".join(said.why)
        return Cell(sample.name, kind.name, answer, told, loaded(sample, path) if is_loaded else "")


def loaded(sample: Sample, path: Path) -> str:
    """Return what a layout's own tool does: ``loads``, ``stops``, or ``runs it``."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DAMAGE_BOMB"] = f"{folder}/went-off"
        try:
            with quiet():
                sample.load(path)
        except (Exception, CheckpointException):  # noqa: BLE001 - whatever its tool raises
            done = "stops"
        else:
            done = "loads"
        return "runs it" if any(Path(folder).iterdir()) else done


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    sink = io.StringIO()
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(sink),
            contextlib.redirect_stderr(sink),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
