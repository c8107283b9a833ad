"""Repairs that take files from other copies of a checkpoint or remove broken optional files.

A copy may be in a backup, or in a second store of the run. If two intact copies of a file differ,
they belong to two different checkpoints, or one copy has undetected damage. The repair then uses
neither copy. Some tools fail if an optional file is broken, but continue if the file is missing. In
this case the repair removes the broken file.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from resilient.diff.other_steps import STALE
from resilient.layout_repair.case import BLOCK_BYTES, FileSpan, names_of, read_and_verify
from resilient.layouts.checksums import check_bytes
from resilient.layouts.model import Unreadable
from resilient.layouts.single_file import ALONE
from resilient.layouts.torch_zip import open_archive
from resilient.layouts.training_state import OF_DEVICES, OLDER
from resilient.storage.folder import DirectoryListing

if TYPE_CHECKING:
    from resilient.layout_repair.case import Donor, RepairCase
    from resilient.storage.folder import Folder

_ROUNDS_MAX = 4
"""Largest number of rounds per copy, because one damage may hide another damage."""
DIFFERENT = (
    "but different: they are two checkpoints, or one of the two files has damage that no checksum "
    "shows"
)


def take_from_copies(case: RepairCase) -> None:
    """Replace damaged files by intact files of other copies.

    Raises:
        StoreError: A place could not be read.
    """
    for copy in case.copies:
        if not case.steps and _is_whole(case, copy):
            return
        for _ in range(_ROUNDS_MAX):
            if not _take_from_copy(case, copy):
                break


def _is_whole(case: RepairCase, copy: Donor) -> bool:
    return not case.problems and not _differing_files(case, copy)


def _take_from_copy(case: RepairCase, copy: Donor) -> bool:
    """Take the usable files of a copy; return True if it had any."""
    differing_files = _differing_files(case, copy)
    _, donor_problems = read_and_verify(copy.folder)
    problem_names = names_of(donor_problems)
    repairable_places = {
        problem.place
        for problem in case.problems
        if (problem.place, problem.what) not in problem_names
    }
    damaged_places = {
        problem.place for problem in donor_problems if problem.is_fatal and problem.what != ALONE
    }
    is_general = (
        case.is_layout_known
        and "." in repairable_places
        and _is_small_change(case, copy, differing_files)
    )
    names: list[str] = []
    doubtful: list[str] = []
    for name in differing_files:
        if name in damaged_places:
            case.refused[name] = f"it is damaged in {copy.url} too"
        elif name not in case.listing.sizes or name in repairable_places or is_general:
            names.append(name)
        elif name in copy.listing.sizes and case.is_layout_known:
            is_moved = _is_swapped_in_copy(case, copy, name, differing_files)
            (names if is_moved else doubtful).append(name)
    for name in doubtful:
        case.refused[name] = f"it is intact here and in {copy.url}, {DIFFERENT}"
    if doubtful or not names:
        return False
    for name in names:
        _replace(case, copy, name)
    change_text = f"{len(names)} files copied" if len(names) > 1 else "copied"
    case.done(", ".join(sorted(names)), change_text, copy.url)
    return True


def _is_small_change(case: RepairCase, copy: Donor, different: list[str]) -> bool:
    """Return True if only a few files differ between both places."""
    names = set(case.listing.sizes) | set(copy.listing.sizes)
    return len(different) < len(names) - len(different) or len(names) == 1


def _is_swapped_in_copy(case: RepairCase, copy: Donor, name: str, different: list[str]) -> bool:
    """Return True if a file equals another file of the copy, so that two files are swapped."""
    size_bytes = case.listing.sizes[name]
    return any(
        copy.listing.sizes.get(other_name) == size_bytes
        and all(
            case.draft.read(name, at, BLOCK_BYTES) == copy.folder.read(other_name, at, BLOCK_BYTES)
            for at in range(0, size_bytes, BLOCK_BYTES)
        )
        for other_name in different
        if other_name != name
    )


def _replace(case: RepairCase, copy: Donor, name: str) -> None:
    if name not in copy.listing.sizes:
        case.draft.drop(name)
        return
    case.draft.put(name, FileSpan(copy.folder, name, 0, copy.listing.sizes[name]))


def _differing_files(case: RepairCase, copy: Donor) -> list[str]:
    """Return the files that differ between both places, or exist in one of them only."""
    own_sizes, donor_sizes = case.listing.sizes, copy.listing.sizes
    if len(donor_sizes) == 1 and copy.listing.is_file and not case.listing.is_file:
        return []
    return [
        name
        for name in sorted(set(own_sizes) | set(donor_sizes))
        if own_sizes.get(name) != donor_sizes.get(name)
        or not _same(case.draft, copy.folder, name, donor_sizes[name])
    ]


def _same(left: Folder, right: Folder, name: str, size_bytes: int) -> bool:
    return all(
        left.read(name, at, BLOCK_BYTES) == right.read(name, at, BLOCK_BYTES)
        for at in range(0, size_bytes, BLOCK_BYTES)
    )


_RANDOM = re.compile(r"(?:rng_state(?:_\d{1,7})?\.pth|random_states_\d{1,7}\.pkl)")
_OPTIMIZER, _SCHEDULE, _ARGUMENTS = "optimizer.pt", "scheduler.pt", "training_args.bin"
_SLICED = re.compile(r"optimizer_\d{1,4}/")
_ENGINE = re.compile(r"global_step(?:\d{1,12}|\*)/")
_OF_ENGINE = ("latest", "zero_to_fp32.py", "zero_to_torch.py")
_OF_RUN = ("scheduler.pt", "trainer_state.json", "scaler.pt")
_NEW = "DeepSpeed resumes only complete engines: a new training starts from these weights"
_DRAWN = (
    "dropout and augmentation draw other numbers: the position of a stream of this tool follows "
    "from no seed and no step"
)
_BEGINS = "starts from its initial state: Transformers loads both together, or neither"
_UNREAD = {
    "config.json": (
        "the model's configuration",
        "a resume does not need it; `from_pretrained` of this folder does",
    ),
}
_LOST = (
    "{}, and they are lost: their positions follow from no seed, no step and no other rank. The "
    "states of Python, NumPy, torch and each GPU are created from the script's seed, so dropout, "
    "augmentation and samplers draw other numbers"
)
_OF_DEVICES = (
    "the position of a GPU's generator follows from no seed, no step and no other rank, so its "
    "tool draws other numbers there; a resume on CPUs does not need it"
)


def drop_optional_files(case: RepairCase) -> None:
    """Remove broken random states, and in a Trainer a broken optimizer with its scheduler."""
    for name in case.broken():
        is_listed = name in case.listing.sizes and case.is_broken(name)
        if _RANDOM.fullmatch(name) and is_listed and not _is_kept(case, name):
            case.losses["random state"] = _DRAWN
            case.draft.drop(name)
            case.done(name, "left out: it is damaged", "its tool continues without it")
    for problem in case.problems:
        if problem.loses == "random state" and problem.place == ".":
            case.refused["."] = _LOST.format(problem.what)
        if problem.loses == OF_DEVICES:
            case.refused.setdefault(
                problem.place, problem.what if problem.what == OLDER else _OF_DEVICES
            )
    if case.contents.layout == "hf-trainer":
        _copy_arguments(case)
        _drop_unread_files(case)
        _leave_optimizer(case)
        _drop_optimizer_slices(case)
        _keep_only_model(case)


def _is_kept(case: RepairCase, name: str) -> bool:
    """Return True for a file that a resume partly uses, or for an intact file of an older step."""
    own_problems = [problem for problem in case.problems if problem.place == name]
    return all(
        problem.loses == OF_DEVICES or problem.what.startswith(STALE) for problem in own_problems
    )


def _drop_unread_files(case: RepairCase) -> None:
    """Remove broken files that no resume needs."""
    for name, (loss_text, follows) in _UNREAD.items():
        if name in case.broken() and name in case.listing.sizes:
            case.losses[loss_text] = follows
            case.draft.drop(name)
            case.done(name, "left out: it is damaged", "its tool continues without it")


def _copy_arguments(case: RepairCase) -> None:
    """Copy the run's arguments from another step, if there is one; no resume reads them."""
    if _ARGUMENTS not in case.broken() or _ARGUMENTS not in case.listing.sizes:
        return
    for donor in case.near:
        size_bytes = donor.listing.sizes.get(_ARGUMENTS, 0)
        alone = DirectoryListing({_ARGUMENTS: size_bytes})
        if size_bytes and _is_archive(donor.folder, alone) and not check_bytes(donor.folder, alone):
            case.draft.put(_ARGUMENTS, FileSpan(donor.folder, _ARGUMENTS, 0, size_bytes))
            case.done(_ARGUMENTS, "copied: the steps of a run have the same arguments", donor.url)
            return


def _is_archive(folder: Folder, listing: DirectoryListing) -> bool:
    try:
        open_archive(folder, listing, _ARGUMENTS)
    except Unreadable:
        return False
    return True


def _leave_optimizer(case: RepairCase) -> None:
    pair = {_OPTIMIZER, _SCHEDULE}
    damaged_files = pair & {problem.place for problem in case.fatal()}
    other_problems = [problem for problem in case.fatal() if problem.place not in pair]
    if not damaged_files or other_problems:
        return
    case.losses["the optimizer's state"] = _BEGINS
    case.losses["the schedule"] = _BEGINS
    for name in pair:
        case.draft.drop(name)
    case.done(
        ", ".join(sorted(damaged_files)),
        "left out with the files that depend on it",
        "its tool continues",
    )


def _drop_optimizer_slices(case: RepairCase) -> None:
    """Remove an FSDP optimizer with lost slices, so that training restarts from the weights."""
    places = [problem.place for problem in case.fatal()]
    folders = {match[0] for place in places if (match := _SLICED.match(place))}
    if not folders or not all(_SLICED.match(place) for place in places):
        return
    names = [file for file in case.listing.sizes if file.startswith(tuple(folders))]
    _restart(case, [*names, _SCHEDULE], ", ".join(sorted(folders)), "its tool continues")


def _keep_only_model(case: RepairCase) -> None:
    """Keep only the model if parts of a DeepSpeed engine are lost.

    DeepSpeed fails at such a folder, and a separate file has the weights.
    """
    places = [problem.place for problem in case.fatal()]
    is_lost = any(_ENGINE.match(place) for place in places)
    if not is_lost or not all(_ENGINE.match(place) or place in _OF_ENGINE for place in places):
        return
    names = [
        file
        for file in case.listing.sizes
        if _ENGINE.match(file) or file in _OF_ENGINE or _RANDOM.fullmatch(file) or file in _OF_RUN
    ]
    folders = sorted({match[0] for file in names if (match := _ENGINE.match(file))})
    step = case.contents.step
    name = f"weights-{step}" if step is not None else "weights"
    _restart(case, names, ", ".join(folders) or _OF_ENGINE[0], "`from_pretrained`", name)


def _restart(
    case: RepairCase, names: list[str], change_text: str, source: str, name: str = ""
) -> None:
    """Remove files if the weights are complete without them, and record the losses."""
    trial = case.draft.copy()
    for file in names:
        if file in case.listing.sizes:
            trial.drop(file)
    if name:
        trial.renamed(name)
    _, problems = read_and_verify(trial)
    if any(problem.is_fatal and problem.what != ALONE for problem in problems):
        return
    case.draft.take(trial)
    follows = _NEW if name else _BEGINS
    case.losses |= dict.fromkeys(("the optimizer's state", "the schedule"), follows)
    if name:
        case.losses |= dict.fromkeys(("random state", "the place in the data"), _NEW)
    case.done(
        change_text, "left out with the files that depend on it: the weights are intact", source
    )
