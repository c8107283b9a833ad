"""One damaged checkpoint while it is mended: the draft, what is wrong with it, what stands near."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from resilient.comparison.proving import prove
from resilient.comparison.stale_copies import STALE
from resilient.layouts.plain import ALONE
from resilient.layouts.recognizing import read_layout
from resilient.layouts.values import Contents, Problem

if TYPE_CHECKING:
    from collections.abc import Iterable

    from resilient.mending.drafts import Draft
    from resilient.mending.histories import Log
    from resilient.storage.folder import Folder, Listing

AGREEMENT = "the agreement of its files"
"""What readers say is lost where two files speak of different steps."""
UNKNOWN = "no checkpoint of a tool that is known"


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that was made whole.

    Attributes:
        file: which file, or ``.``.
        what: what is done.
        source: where what is needed for it comes from.
    """

    file: str
    what: str
    source: str


@dataclass(frozen=True, slots=True)
class Near:
    """A checkpoint that may help: another step of the same run, or another copy of this one."""

    folder: Folder
    listing: Listing
    contents: Contents

    @property
    def url(self) -> str:
        """Where it is."""
        return self.folder.url


@dataclass
class Case:
    """A damaged checkpoint and what is known of it.

    Attributes:
        draft: what it would become.
        contents: what the draft holds.
        problems: what is wrong with the draft, its bytes looked at.
        near: other steps of the same run, the nearest first.
        copies: other places of the same checkpoint.
        logs: what its run logged, where that was named.
        steps: what was done, in order.
        losses: what is gone -> what follows from that.
        refused: place -> why nothing was done there.
    """

    draft: Draft
    contents: Contents
    problems: tuple[Problem, ...]
    near: tuple[Near, ...] = ()
    copies: tuple[Near, ...] = ()
    logs: tuple[Log, ...] = ()
    steps: list[Step] = field(default_factory=list)
    losses: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def listing(self) -> Listing:
        """The files of the draft."""
        return self.draft.list()

    @property
    def is_layout_known(self) -> bool:
        """Whether it is recognised."""
        return bool(self.contents.layout)

    def fatal(self) -> list[Problem]:
        """Return what forbids to go on; that there are weights alone is no damage."""
        return [one for one in self.problems if one.is_fatal and one.what != ALONE]

    def broken(self) -> list[str]:
        """Return the files that something forbids to use, or that say what is not so.

        A file of an older step is whole: no mender of damaged bytes may touch it.
        """
        places = (
            one.place
            for one in self.problems
            if one.what != ALONE and not one.what.startswith(STALE)
        )
        return [one for one in dict.fromkeys(places) if one != "."]

    def is_broken(self, name: str) -> bool:
        """Say whether a file is missing or damaged."""
        return any(
            one.place == name and (one.is_fatal or one.loses) and not one.what.startswith(STALE)
            for one in self.problems
        )

    def done(self, file: str, what: str, source: str) -> None:
        """Note what was done, and look at what there is now."""
        self.steps.append(Step(file, what, source))
        self.refused.pop(file, None)
        self.look()

    def undo(self) -> None:
        """Take the last step back, whose draft was taken back already."""
        self.steps.pop()
        self.look()

    def look(self) -> None:
        """Recognise, judge and prove the draft anew.

        Raises:
            StoreError: it could not be read.
        """
        self.contents, self.problems = looked_through(self.draft)


def looked_through(folder: Folder) -> tuple[Contents, tuple[Problem, ...]]:
    """Return what a folder holds and what is wrong with it, every byte looked at.

    Raises:
        StoreError: it could not be read.
    """
    listing = folder.list()
    contents = read_layout(folder, listing)
    if contents is None:
        problem = Problem(".", UNKNOWN, is_fatal=True)
        return Contents("", UNKNOWN, problems=(problem,)), (problem,)
    problems = (*contents.problems, *prove(folder, listing, contents))
    return replace(contents, problems=problems), problems


def names_of(problems: Iterable[Problem]) -> set[tuple[str, str]]:
    """Return what problems say, to tell new ones from others."""
    return {(one.place, one.what) for one in problems}
