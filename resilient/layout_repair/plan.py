"""Plan of a repair of another tool's checkpoint, and its execution.

The plan contains the whole result, which is verified before the first write. The execution writes
this result as a new checkpoint. If no repair is possible, it writes the intact tensors. A repair
never changes the damaged checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from resilient.diff.other_steps import REMAINING, remaining_to_json
from resilient.errors import ConfigError, KeyNotFound, StoreError, UnknownLayout
from resilient.layout_repair import donors, file_repair, index_repair, trainer_state_repair
from resilient.layout_repair.case import (
    AGREEMENT,
    UNKNOWN,
    Donor,
    FileSpan,
    RepairCase,
    VirtualFolder,
    names_of,
    read_and_verify,
)
from resilient.layout_repair.donors import DIFFERENT, take_from_copies
from resilient.layout_repair.file_repair import is_saved_so, safetensors_pieces, salvage
from resilient.layout_repair.training_logs import logs_in
from resilient.layouts.consistency import LOSES as RENAMED
from resilient.layouts.detect import read_layout
from resilient.layouts.incomplete import is_incomplete
from resilient.layouts.json_files import POINTER
from resilient.layouts.neighbours import REPAIRED, REPORT, SALVAGED, steps_beside
from resilient.layouts.resumability import assess_resumability, is_costly
from resilient.layouts.single_file import ALONE
from resilient.redaction import shell_quote
from resilient.storage.folder import LINK, open_folder
from resilient.storage.urls import protocol_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    from resilient.layout_repair.case import Piece, RepairAction
    from resilient.layout_repair.file_repair import SalvagedFile
    from resilient.layout_repair.training_logs import MetricsLog
    from resilient.layouts.model import Contents, Problem, Resumability

_NEAR_MAX = 3
_ENDS_IN_NUMBER = re.compile(r"(.*?)(\d{1,12})")
_REPAIRS = (
    take_from_copies,
    file_repair.repair_zips,
    file_repair.repair_headers,
    file_repair.swap_back,
    file_repair.repair_wrapper_names,
    index_repair.repair_encodings,
    index_repair.repair_index,
    index_repair.repair_latest,
    index_repair.repair_documents,
    index_repair.repair_indexes,
    file_repair.cut_slices,
    index_repair.repair_name,
    trainer_state_repair.repair_schedules,
    trainer_state_repair.repair_state,
    donors.drop_optional_files,
)
"""Repairs in the order of application: restore whole files first, and remove lost files last."""
_SAVED_SO = (
    "it was saved like that, so no copy and no checksum can repair it: resume an earlier step"
)
_DISAGREE = "its files are of different steps, and the right one is unknown"
_FETCH = "fetch the file, then repair"
_OTHER = "no source has the missing parts; `--from` a copy of this step has them"
_LEADS_OUT = "a link that leads out is not followed: `cp -rL` copies its target"
_NO_BYTES = "{} is not a file, and nothing was read from it"
_NO_WAY = "no source has the lost bytes; `--from` another copy of this step would have them"


@dataclass(frozen=True, slots=True)
class LayoutRepairPlan:
    """Plan of a repair, with its losses and its limits.

    Attributes:
        url: URL of the damaged checkpoint.
        layout: Short name of its layout; empty if unknown.
        before: Problems before the repair.
        steps: Repairs to apply.
        losses: Lost state -> consequence.
        refused: Place -> reason why the place cannot be repaired.
        after: Problems of the result.
        verdict: Resumability of the result.
        salvaged: Intact tensors of files that cannot be repaired.
        draft: The result.
        sources: Places of copies, other steps and logs that the user named.
    """

    url: str
    layout: str
    before: tuple[Problem, ...]
    steps: tuple[RepairAction, ...]
    losses: Mapping[str, str]
    refused: Mapping[str, str]
    after: tuple[Problem, ...]
    verdict: Resumability
    salvaged: tuple[SalvagedFile, ...]
    draft: VirtualFolder
    sources: tuple[str, ...] = ()

    @property
    def is_repaired(self) -> bool:
        """True if the result is a checkpoint that its tool accepts."""
        return bool(self.steps) and not self.is_hopeless

    @property
    def is_hopeless(self) -> bool:
        """True if a remaining problem stops its tool, or the result must not be used."""
        return any(problem.is_fatal and problem.what != ALONE for problem in self.after)

    @property
    def is_damaged(self) -> bool:
        """True if a resume would lose a state that its tool had saved."""
        return self.is_hopeless or is_costly(self.after)

    @property
    def remaining(self) -> tuple[Problem, ...]:
        """Problems of the damaged checkpoint that its repaired copy still has."""
        names = names_of(self.before)
        return tuple(problem for problem in self.after if names_of([problem]) <= names)

    @property
    def is_whole(self) -> bool:
        """True if nothing is lost, neither by the damage nor by the repair."""
        return self.is_repaired and not self.losses and not self.refused


def plan_layout_repair(
    url: str, urls: Sequence[str] = (), storage_options: Mapping[str, Any] | None = None
) -> LayoutRepairPlan:
    """Plan the repair of a checkpoint of another tool, without a write.

    Args:
        url: The folder or the file.
        urls: Other copies of the checkpoint, other steps of the same run, and logs of the run.
        storage_options: Storage options for all of these places.

    Raises:
        UnknownLayout: The URL has no known checkpoint, and no other place identifies its layout.
        KeyNotFound: Nothing is at the URL.
        StoreError: A place could not be read.
    """
    folder = open_folder(url, storage_options)
    draft = VirtualFolder(folder, folder.list())
    contents, problems = read_and_verify(draft)
    case = RepairCase(draft, contents, problems)
    results = [_open_named_place(donor_url, storage_options) for donor_url in urls]
    found_donors = [donor for donor in results if isinstance(donor, Donor)]
    case.logs = tuple(log for donor in results if not isinstance(donor, Donor) for log in donor)
    case.copies = tuple(donor for donor in found_donors if _is_same_step(case, donor))
    steps = [donor for donor in found_donors if donor not in case.copies]
    case.near = (*steps, *_steps_beside_checkpoint(url))
    problems_before = case.problems
    _repair(case)
    if not case.is_layout_known and not case.steps:
        raise UnknownLayout(
            f"`{folder.url}` is not a checkpoint of a supported tool, and nothing beside it shows "
            "what it was",
            hint=f"resilient ckpt repair {shell_quote(folder.url)} --from COPY",
        )
    contents = replace(case.contents, problems=case.problems)
    _explain(case)
    if case.steps:
        _add_remaining_losses(case, problems_before)
    return LayoutRepairPlan(
        folder.url,
        case.contents.layout,
        problems_before,
        tuple(case.steps),
        dict(case.losses),
        dict(case.refused),
        case.problems,
        assess_resumability(contents, case.draft.url),
        salvage(case) if case.fatal() else (),
        case.draft,
        tuple(urls),
    )


def _repair(case: RepairCase) -> None:
    for repair in _REPAIRS:
        if repair is not take_from_copies and _is_unrepairable(case):
            return
        if case.problems or repair is take_from_copies:
            repair(case)


def _is_unrepairable(case: RepairCase) -> bool:
    """Return True if no repair is possible: the save never ended, or Git LFS has the files.

    A repair would hide that such a folder never was a checkpoint.
    """
    return is_incomplete(case.problems) or any(problem.what == POINTER for problem in case.problems)


def _explain(case: RepairCase) -> None:
    """Record the reason for each remaining problem, except for state that a tool never saves."""
    problem_places = {problem.place for problem in case.problems} | set(case.listing.outside)
    case.refused = {
        place: reason
        for place, reason in case.refused.items()
        if place in problem_places or DIFFERENT in reason
    }
    for problem in case.problems:
        if problem.loses == AGREEMENT:
            case.refused.setdefault(problem.place, _DISAGREE)
        elif problem.what == POINTER or is_incomplete((problem,)):
            case.refused[problem.place] = (
                f"{problem.what}: {_FETCH if problem.what == POINTER else _OTHER}"
            )
        elif problem.what != ALONE and (problem.is_fatal or _is_damage(problem)):
            case.refused.setdefault(problem.place, _SAVED_SO if is_saved_so(problem) else _NO_WAY)
    for name in case.listing.outside:
        kind = case.listing.kinds.get(name, LINK)
        case.refused[name] = _LEADS_OUT if kind == LINK else _NO_BYTES.format(kind)


def _add_remaining_losses(case: RepairCase, before: tuple[Problem, ...]) -> None:
    """Record the losses that the damaged checkpoint had and that its repaired copy still has."""
    names = names_of(before)
    for problem in case.problems:
        if problem.loses and is_costly([problem]) and names_of([problem]) <= names:
            case.losses.setdefault(problem.loses, f"{problem.place}: {problem.what}")


def _is_damage(problem: Problem) -> bool:
    """Return True for a loss by damage, and not of state that a tool never saves."""
    is_lost = problem.what == "it is missing" or problem.loses == RENAMED
    return bool(problem.loses) and (is_lost or is_saved_so(problem))


def _open_named_place(
    url: str, storage_options: Mapping[str, Any] | None
) -> Donor | list[MetricsLog]:
    """Return the checkpoint or the logs at a place that the user named."""
    folder = open_folder(url, storage_options)
    listing = folder.list()
    contents = read_layout(folder, listing)
    if contents is None:
        if logs := logs_in(folder, listing):
            return logs
        raise UnknownLayout(
            f"`{folder.url}` is {UNKNOWN}",
            hint="give a checkpoint of the same run, or a log of the run, with `--from`",
        )
    return Donor(folder, listing, contents)


def _is_same_step(case: RepairCase, other: Donor) -> bool:
    names = {folder.rstrip("/").rpartition("/")[2] for folder in (case.draft.url, other.url)}
    is_mixed = any((problem.place, problem.loses) == (".", AGREEMENT) for problem in case.problems)
    if is_mixed and len(names) == 1:
        return True  # the step in the checkpoint's files is in doubt
    own_step, donor_step = _step(case.contents), _step(other.contents)
    if own_step is None or donor_step is None:
        return not _are_other_steps(names)
    return own_step == donor_step


def _are_other_steps(names: Iterable[str]) -> bool:
    """Return True for names that differ only in the last number."""
    matches = [_ENDS_IN_NUMBER.fullmatch(name) for name in names]
    stems = {match[1] if match else "" for match in matches}
    numbers = {int(match[2]) for match in matches if match}
    return all(matches) and len(stems) == 1 and len(numbers) > 1


def _step(contents: Contents) -> int | None:
    """Return the step that most parts of a checkpoint state."""
    known_steps = [
        contents.step,
        contents.schedule.step if contents.schedule else None,
        contents.optimizer.step if contents.optimizer else None,
    ]
    steps = [step for step in known_steps if step is not None]
    steps_by_votes = sorted(steps, key=lambda step: (-steps.count(step), steps.index(step)))
    return steps_by_votes[0] if steps_by_votes else None


def _steps_beside_checkpoint(url: str) -> Iterable[Donor]:
    """Return other steps beside a checkpoint, with the nearest step first."""
    if protocol_of(url) != "file" or not Path(url.removeprefix("file://")).is_dir():
        return ()
    return tuple(_readable(path for _, path in steps_beside(url)))[:_NEAR_MAX]


def _readable(paths: Iterable[Path]) -> Iterable[Donor]:
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
            yield Donor(folder, listing, contents)


def place_of(plan: LayoutRepairPlan) -> Path:
    """Return the default output path of a plan, beside the damaged checkpoint."""
    own_path = Path(plan.draft.url)
    return own_path.parent / (REPAIRED if plan.is_repaired else SALVAGED) / own_path.name


def write_repaired(plan: LayoutRepairPlan, target: Path) -> Path:
    """Write the result of a plan, or the intact tensors if no repair is possible.

    Crash: a file or folder ``.<name>.partial`` remains beside ``target``; the damaged checkpoint is
    only read.

    Args:
        plan: Result of :func:`resilient.layout_repair.plan.plan_layout_repair`.
        target: Output path; it must not exist.

    Raises:
        ConfigError: The path exists, or there is nothing to write.
        StoreError: A place could not be read.
    """
    if target.exists():
        numbered_paths = (Path(f"{target}-{number}") for number in count(2))
        free_path = next(path for path in numbered_paths if not path.exists())
        options = "".join(f" --from {shell_quote(source)}" for source in plan.sources)
        raise ConfigError(
            f"`{target}` exists already",
            hint=f"resilient ckpt repair {shell_quote(plan.url)}{options} --apply --out "
            f"{shell_quote(free_path)}",
        )
    if not plan.is_repaired and not plan.salvaged:
        raise ConfigError(f"nothing can be written from `{plan.url}`")
    listing = plan.draft.list()
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.unlink(missing_ok=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    if plan.is_repaired and listing.is_file:
        _write(plan.draft, next(iter(listing.sizes)), partial)
    else:
        _write_folder(plan, partial)
    partial.rename(target)
    _sync(target.parent)
    return target


def _write_folder(plan: LayoutRepairPlan, partial: Path) -> None:
    damaged_places = (
        set() if plan.is_repaired else {problem.place for problem in plan.after if problem.is_fatal}
    )
    for name in plan.draft.list().sizes:
        if name not in damaged_places:
            _write(plan.draft, name, partial / name)
    for salvaged in () if plan.is_repaired else plan.salvaged:
        name = f"{salvaged.file}.salvaged.safetensors"
        _write_pieces(safetensors_pieces(salvaged.saved), partial / name)
    partial.mkdir(parents=True, exist_ok=True)
    document = {
        "source": plan.url,
        "steps": [
            {"file": step.file, "what": step.what, "from": step.source} for step in plan.steps
        ],
        "losses": dict(plan.losses),
        "refused": dict(plan.refused),
        "lost_tensors": {salvaged.file: list(salvaged.lost) for salvaged in plan.salvaged},
        REMAINING: remaining_to_json(plan.draft, plan.remaining),
    }
    text = json.dumps(document, indent=2, sort_keys=True) + "\n"
    (partial / REPORT).write_text(text, encoding="utf-8")
    _sync(partial)


def _write(draft: VirtualFolder, name: str, path: Path) -> None:
    _write_pieces(draft.pieces(name), path)


def _write_pieces(pieces: tuple[Piece, ...], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        for piece in pieces:
            file.writelines(_blocks(piece))
        file.flush()
        os.fsync(file.fileno())


def _blocks(piece: Piece) -> Iterable[bytes]:
    if isinstance(piece, FileSpan):
        size = 4 << 20
        return (piece.read(at, size) for at in range(0, piece.size_bytes, size))
    return [piece]


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
