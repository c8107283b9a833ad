"""What a repair of another tool's checkpoint would do, proved before anything is written."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from resilient.errors import KeyNotFound, StoreError, UnknownLayout
from resilient.layouts.documents import POINTER
from resilient.layouts.incomplete import is_incomplete
from resilient.layouts.judging import judge
from resilient.layouts.layers import LOSES as RENAMED
from resilient.layouts.plain import ALONE
from resilient.layouts.recognizing import read_layout
from resilient.layouts.remedies import is_costly
from resilient.mending import files, leaving, pointers, schedules, slices, states
from resilient.mending.case import AGREEMENT, UNKNOWN, Case, Near, looked_through
from resilient.mending.copies import DIFFERENT, take_from_copies
from resilient.mending.drafts import Draft
from resilient.mending.histories import logs_in
from resilient.mending.salvage import is_saved_so, salvage
from resilient.showing import quoted
from resilient.storage.folder import LINK, open_folder
from resilient.storage.urls import protocol_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    from resilient.layouts.values import Contents, Problem, Verdict
    from resilient.mending.case import Step
    from resilient.mending.histories import Log
    from resilient.mending.salvage import Salvaged

_NEAR_MAX = 3
_ENDS_IN_NUMBER = re.compile(r"(.*?)(\d{1,12})")
_MENDERS = (
    take_from_copies,
    files.mend_zips,
    files.mend_headers,
    files.swap_back,
    pointers.mend_encodings,
    pointers.mend_index,
    pointers.mend_latest,
    pointers.mend_documents,
    slices.mend_indexes,
    files.cut_slices,
    pointers.mend_name,
    schedules.mend_schedules,
    states.mend_state,
    leaving.leave_out,
)
"""In this order: what is whole elsewhere first, what is lost last."""
_SAVED_SO = (
    "it was saved like that, so no copy and no checksum knows better: go back to a step before"
)
_DISAGREE = "its files are of different steps, and which is right does not show"
_FETCH = "fetch the file, then repair"
_OTHER = "no repair knows the missing parts; `--from` a copy of this step has them"
_LEADS_OUT = "a link that leads out is not followed: `cp -rL` takes what it leads to"
_NO_BYTES = "{} is no file, and nothing was read from it"
_NO_WAY = "what was there is nowhere here; `--from` another copy of this step would have it"


@dataclass(frozen=True, slots=True)
class MendingPlan:
    """What a repair would do, and what it cannot.

    Attributes:
        url: the damaged checkpoint.
        layout: its short name; empty of what is not known.
        before: what is wrong with it.
        steps: what would be done.
        losses: what is gone then -> what follows.
        refused: place -> why nothing can be done.
        after: what is wrong with the result.
        verdict: of the result.
        salvaged: what is whole of files that cannot be mended.
        draft: the result.
    """

    url: str
    layout: str
    before: tuple[Problem, ...]
    steps: tuple[Step, ...]
    losses: Mapping[str, str]
    refused: Mapping[str, str]
    after: tuple[Problem, ...]
    verdict: Verdict
    salvaged: tuple[Salvaged, ...]
    draft: Draft

    @property
    def is_mended(self) -> bool:
        """Whether there is something to write that its tool takes."""
        return bool(self.steps) and not self.is_hopeless

    @property
    def is_hopeless(self) -> bool:
        """Whether something stays that its tool stops at, or that must not be used."""
        return any(one.is_fatal and one.what != ALONE for one in self.after)

    @property
    def is_damaged(self) -> bool:
        """Whether something costs a resume a state that its tool had saved."""
        return self.is_hopeless or is_costly(self.after)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is lost, neither by the damage nor by the repair."""
        return self.is_mended and not self.losses and not self.refused


def plan_mending(
    url: str, others: Sequence[str] = (), storage_options: Mapping[str, Any] | None = None
) -> MendingPlan:
    """Return what a repair of a checkpoint of another tool would do; reads only.

    Args:
        url: the folder or the file.
        others: other copies of it, other steps of the same run, and what the run logged.
        storage_options: how to reach them.

    Raises:
        UnknownLayout: it is no checkpoint, and no other place says what it was.
        KeyNotFound: nothing is there.
        StoreError: a place could not be read.
    """
    folder = open_folder(url, storage_options)
    draft = Draft(folder, folder.list())
    contents, problems = looked_through(draft)
    case = Case(draft, contents, problems)
    named = [_near(one, storage_options) for one in others]
    told = [one for one in named if isinstance(one, Near)]
    case.logs = tuple(log for one in named if not isinstance(one, Near) for log in one)
    case.copies = tuple(one for one in told if _is_same_step(case, one))
    steps = [one for one in told if one not in case.copies]
    case.near = (*steps, *_beside(url))
    before = case.problems
    _mend(case)
    if not case.is_layout_known and not case.steps:
        raise UnknownLayout(
            f"`{folder.url}` is no checkpoint of a tool that is known, and nothing beside it says "
            "what it was",
            hint=f"resilient ckpt repair {quoted(folder.url)} --from COPY",
        )
    contents = replace(case.contents, problems=case.problems)
    _explain(case)
    return MendingPlan(
        folder.url,
        case.contents.layout,
        before,
        tuple(case.steps),
        dict(case.losses),
        dict(case.refused),
        case.problems,
        judge(contents, case.draft.url),
        salvage(case) if case.fatal() else (),
        case.draft,
    )


def _mend(case: Case) -> None:
    for mend in _MENDERS:
        if mend is not take_from_copies and _is_elsewhere(case):
            return
        if case.problems or mend is take_from_copies:
            mend(case)


def _is_elsewhere(case: Case) -> bool:
    """Return True if no repair may be tried: the save never ended, or Git LFS has the files.

    A repair that fills such a folder up would hide that it never was a checkpoint.
    """
    return is_incomplete(case.problems) or any(one.what == POINTER for one in case.problems)


def _explain(case: Case) -> None:
    """Say of whatever stays why it does; what its tool keeps of nobody is no damage."""
    left = {one.place for one in case.problems} | set(case.listing.outside)
    case.refused = {
        place: why for place, why in case.refused.items() if place in left or DIFFERENT in why
    }
    for one in case.problems:
        if one.loses == AGREEMENT:
            case.refused.setdefault(one.place, _DISAGREE)
        elif one.what == POINTER or is_incomplete((one,)):
            case.refused[one.place] = f"{one.what}: {_FETCH if one.what == POINTER else _OTHER}"
        elif one.what != ALONE and (one.is_fatal or _is_damage(one)):
            case.refused.setdefault(one.place, _SAVED_SO if is_saved_so(one) else _NO_WAY)
    for name in case.listing.outside:
        kind = case.listing.kinds.get(name, LINK)
        case.refused[name] = _LEADS_OUT if kind == LINK else _NO_BYTES.format(kind)


def _is_damage(problem: Problem) -> bool:
    """Say whether a loss is this checkpoint's; most that are told are what its tool never keeps."""
    is_lost = problem.what == "it is missing" or problem.loses == RENAMED
    return bool(problem.loses) and (is_lost or is_saved_so(problem))


def _near(url: str, storage_options: Mapping[str, Any] | None) -> Near | list[Log]:
    """Return the checkpoint at a place that was named, or what is logged there."""
    folder = open_folder(url, storage_options)
    listing = folder.list()
    contents = read_layout(folder, listing)
    if contents is None:
        if logs := logs_in(folder, listing):
            return logs
        raise UnknownLayout(
            f"`{folder.url}` is {UNKNOWN}",
            hint=f"resilient ckpt inspect {quoted(folder.url)}",
        )
    return Near(folder, listing, contents)


def _is_same_step(case: Case, other: Near) -> bool:
    names = {one.rstrip("/").rpartition("/")[2] for one in (case.draft.url, other.url)}
    is_mixed = any((one.place, one.loses) == (".", AGREEMENT) for one in case.problems)
    if is_mixed and len(names) == 1:
        return True  # what its files say of the step is what is in doubt
    ours, theirs = _step(case.contents), _step(other.contents)
    return ours is None or theirs is None or ours == theirs


def _step(contents: Contents) -> int | None:
    """Return the step that a checkpoint says, or two of its parts where they differ."""
    found = [
        contents.step,
        contents.schedule.step if contents.schedule else None,
        contents.optimizer.step if contents.optimizer else None,
    ]
    said = [one for one in found if one is not None]
    ranked = sorted(said, key=lambda one: (-said.count(one), said.index(one)))
    return ranked[0] if ranked else None


def _beside(url: str) -> Iterable[Near]:
    """Return other steps beside a checkpoint, the nearest first."""
    if protocol_of(url) != "file":
        return ()
    own = Path(url)
    match = _ENDS_IN_NUMBER.fullmatch(own.name)
    if match is None or not own.is_dir():
        return ()
    found = []
    for one in own.absolute().parent.iterdir():
        other = _ENDS_IN_NUMBER.fullmatch(one.name)
        if other and other[1] == match[1] and one.name != own.name and one.is_dir():
            found.append((abs(int(other[2]) - int(match[2])), one))
    return tuple(_readable(one for _, one in sorted(found)))[:_NEAR_MAX]


def _readable(paths: Iterable[Path]) -> Iterable[Near]:
    for path in paths:
        try:
            folder = open_folder(str(path))
            listing = folder.list()
            contents = read_layout(folder, listing)
        except StoreError:
            continue
        except KeyNotFound:
            continue
        if contents is not None:
            yield Near(folder, listing, contents)
