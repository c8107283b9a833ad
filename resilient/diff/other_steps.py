"""Detection of contradictions between a checkpoint and other steps of its run.

**Files that equal a file of another step byte for byte.** Configurations, tokenizers, arguments,
scalers and frozen weights are the same in all steps. In contrast, each step changes trained
weights, their moments, and the random state of a run with dropout. If such a file is equal in two
steps, one step has a copy of the other step's file.

**Counts of updates.** The optimizer counts the updates of each parameter. A parameter that had no
gradient or was unfrozen later has a lower count than other parameters. This is no damage. But a
count never falls, and grows at most by one with each step.

**Problems of the source of a repaired copy.** The report of a repair has the problems that the
repair did not cure. They count for the copy until their file changes, also if the other steps are
not beside the copy.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from resilient.diff.tensor_reader import Elements
from resilient.diff.tensor_stats import values
from resilient.layouts.accelerate import OPTIMIZERS
from resilient.layouts.dcp import SLICES
from resilient.layouts.detect import read_layout
from resilient.layouts.json_files import read_json
from resilient.layouts.model import MODEL, OPTIMIZER, Problem, Remedy, Unreadable
from resilient.layouts.neighbours import CONFIG, REPORT, nearest_steps, newer_steps, older_steps
from resilient.layouts.pickle_reader import TensorRef
from resilient.layouts.torch_zip import open_archive

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from resilient.diff.tensor_stats import ScannedTensor
    from resilient.layouts.model import Contents, Tensor
    from resilient.storage.folder import DirectoryListing, Folder

STALE = "it is byte for byte that of "
_BLOCK_BYTES = 1 << 20
_LAYOUTS = ("accelerate", "hf-trainer")
"""Layouts with known files that each step changes."""
_SCALER = "scaler.pt"
_RANDOM = re.compile(r"rng_state(?:_\d{1,7})?\.pth")
_LOSES = {
    MODEL: "the weights of this step",
    OPTIMIZER: "the optimizer's state of this step",
    "random": "the random state",
}
_NARROW = ("F16", "BF16")
_SAVE_SECONDS = 2.0
_RATE_MIN = 1e-5
"""A lower rate may leave every 16-bit weight unchanged."""


def stale_copies(
    folder: Folder, listing: DirectoryListing, contents: Contents
) -> Iterator[Problem]:
    """Yield problems of files that equal files of another step although every step changes them.

    Args:
        folder: Folder of the checkpoint.
        listing: Its files.
        contents: Its contents.

    Raises:
        StoreError: A file could not be read.
    """
    if listing.is_file or contents.layout not in _LAYOUTS:
        return
    kinds = {**_tensor_files(contents), **_random_files(folder, listing)}
    older = [(step, False) for step in older_steps(folder.url)]
    newer = [(step, True) for step in newer_steps(folder.url)]
    for (other_folder, other), is_newer in (*older, *newer):
        equal_files = [
            name
            for name in sorted(kinds)
            if 0 < listing.sizes.get(name, 0) == other.sizes.get(name)
            and _same(folder, other_folder, name, listing.sizes[name])
            and not _is_file_of(other, listing, name)
        ]
        other_layout = read_layout(other_folder, other) if equal_files else None
        has_scaler = _SCALER in listing.sizes
        if other_layout is None or not _is_moved(contents, other_layout, has_scaler=has_scaler):
            continue
        step = other_folder.url.rstrip("/").rpartition("/")[2]
        for name in equal_files:
            problem_text = f"{STALE}{step} beside it, although each step changes it"
            # Without times that tell, the newer step is the copy: it holds a file that existed.
            is_own = is_newer and _is_of_save(listing, name)
            is_lost = not is_own or _is_file_of(listing, other, name)
            if not is_lost:
                problem_text += f": {step} may have the file of this step"
            yield Problem(name, problem_text, _LOSES[kinds[name]] * is_lost, cure=Remedy.COPY)
        if equal_files:
            return


def _is_file_of(listing: DirectoryListing, other: DirectoryListing, name: str) -> bool:
    """Return True if times show that a file is of the save of the second step, not of the first.

    One save writes all files of a step, one after the other. A copy may keep the time of its file.
    """
    own_times, other_times = _times_beside(listing, name), _times_beside(other, name)
    if not own_times or not other_times:
        return False
    at = listing.changed[name]
    if at == other.changed[name]:
        own_seconds, other_seconds = (
            min(abs(time - at) for time in times) for times in (own_times, other_times)
        )
        return other_seconds < own_seconds
    return _is_of_save(other, name) and not _is_of_save(listing, name)


def _is_of_save(listing: DirectoryListing, name: str) -> bool:
    """Return True if a file was written while the other files of its folder were written."""
    times = _times_beside(listing, name)
    if not times:
        return False
    return min(times) - _SAVE_SECONDS <= listing.changed[name] <= max(times) + _SAVE_SECONDS


def _times_beside(listing: DirectoryListing, name: str) -> list[float]:
    """Return the times of all other files of a folder; none if the file's own time is unknown."""
    if name not in listing.changed:
        return []
    return [time for other, time in listing.changed.items() if other != name]


def _tensor_files(contents: Contents) -> dict[str, str]:
    """Return the files of weights and moments that each step changes, with their kind."""
    optimizer = contents.optimizer
    if optimizer is None:
        return {}
    weights = [tensor for tensor in contents.tensors if tensor.part == MODEL]
    files = {name for weight in weights for name in weight.files}
    moment_owners = {
        tensor.name.rpartition(".")[0] for tensor in contents.tensors if tensor.part == OPTIMIZER
    }
    part_by_file = {}
    for name in files:
        weights_in_file = [weight for weight in weights if name in weight.files]
        is_narrow = all(tensor.dtype in _NARROW for tensor in weights_in_file)
        if is_narrow and max(optimizer.rates, default=0.0) < _RATE_MIN:
            continue
        if name.endswith(SLICES):
            names = {tensor.name.removeprefix("model.") for tensor in weights_in_file}
            is_trained = any(_owner(tensor) in names for tensor in moment_owners)
        else:
            is_trained = len(files) == 1 or optimizer.states >= len(weights)
        if is_trained:
            part_by_file[name] = MODEL
    for tensor in contents.tensors:
        if tensor.part == OPTIMIZER and tensor.elements > 1:
            part_by_file |= {name: OPTIMIZER for name in tensor.files if name not in part_by_file}
    return part_by_file


def _owner(name: str) -> str:
    return name.partition("state.")[2]


def _random_files(folder: Folder, listing: DirectoryListing) -> dict[str, str]:
    """Return the files of random states, if dropout draws from these states."""
    names = [file for file in listing.sizes if _RANDOM.fullmatch(file)]
    try:
        config = read_json(folder, listing, CONFIG) if names else {}
        content = open_archive(folder, listing, OPTIMIZERS[0]).value if names else None
    except Unreadable:
        return {}
    drops = any("drop" in key and _is_share(value) for key, value in config.items())
    devices = _devices(content)
    is_saved = bool(devices) and all(device.startswith(("cpu", "cuda")) for device in devices)
    return dict.fromkeys(names, "random") if drops and is_saved else {}


def _is_share(value: Any) -> bool:
    return isinstance(value, float) and 0 < value < 1


def _devices(value: Any) -> set[str]:
    state = value.get("state") if isinstance(value, dict) else None
    return {
        tensor.storage.device
        for of in (state.values() if isinstance(state, dict) else ())
        for tensor in (of.values() if isinstance(of, dict) else ())
        if isinstance(tensor, TensorRef) and tensor.storage is not None
    }


def _is_moved(contents: Contents, other: Contents, *, has_scaler: bool) -> bool:
    """Return True if the optimizer made an update at a rate above 0 between two steps."""
    rates = [
        rate
        for content in (contents, other)
        if content.optimizer is not None
        for rate in content.optimizer.rates
    ]
    own_step = contents.optimizer.step if contents.optimizer else None
    other_step = other.optimizer.step if other.optimizer else None
    # A scaler of fp16 may have skipped every update between two steps.
    is_skipped = has_scaler and own_step is not None and own_step == other_step
    return any(rates) and not is_skipped


def _same(folder: Folder, other: Folder, name: str, size_bytes: int) -> bool:
    return all(
        folder.read(name, at, _BLOCK_BYTES) == other.read(name, at, _BLOCK_BYTES)
        for at in range(0, size_bytes, _BLOCK_BYTES)
    )


REMAINING = "remaining"
"""Key of a repair report: problems that the repair did not cure."""
_TEXT_MAX = 400


def remaining_to_json(folder: Folder, problems: Iterable[Problem]) -> list[dict[str, Any]]:
    """Return problems of single files for a repair report, with the digests of these files.

    Args:
        folder: The repaired copy.
        problems: Problems that the repair did not cure.

    Raises:
        StoreError: A file could not be read.
    """
    listing = folder.list()
    return [
        {
            "file": problem.place,
            "what": problem.what,
            "loses": problem.loses,
            "fatal": problem.is_fatal,
            "sha256": _digest(folder, listing, problem.place),
        }
        for problem in problems
        if problem.place in listing.sizes
    ]


def remaining_problems(
    folder: Folder, listing: DirectoryListing, found: Iterable[Problem]
) -> tuple[Problem, ...]:
    """Return found problems, and problems of the report of a repaired copy that still apply.

    Args:
        folder: Folder of the checkpoint.
        listing: Its files.
        found: Problems that the check of the folder itself found.

    Raises:
        StoreError: A file could not be read.
    """
    problems = list(found)
    try:
        entries = read_json(folder, listing, REPORT).get(REMAINING) if listing.sizes else None
    except Unreadable:
        entries = None
    for entry in entries[:_CHECKED_MAX] if isinstance(entries, list) else ():
        problem = _remaining_problem(folder, listing, entry)
        if problem is None:
            continue
        alike = [other for other in problems if _is_alike(other, problem)]
        if all(_SEVERITIES[other.severity] < _SEVERITIES[problem.severity] for other in alike):
            problems = [other for other in problems if other not in alike]
            problems.append(problem)
    return tuple(problems)


_SEVERITIES = {"note": 0, "warning": 1, "error": 2}


def _is_alike(found: Problem, recorded: Problem) -> bool:
    """Return True for one problem, perhaps with another end of its text."""
    shorter, longer = sorted((found.what, recorded.what), key=len)
    return found.place == recorded.place and longer.startswith(shorter)


def _remaining_problem(folder: Folder, listing: DirectoryListing, entry: Any) -> Problem | None:
    """Return the problem of an entry; None if its file has changed since the repair."""
    if not isinstance(entry, dict):
        return None
    texts = [entry.get(key) for key in ("file", "what", "loses", "sha256")]
    file, what, loses, digest = (text if isinstance(text, str) else "" for text in texts)
    if file not in listing.sizes or not what or _digest(folder, listing, file) != digest:
        return None
    is_fatal = entry.get("fatal") is True
    return Problem(file, what[:_TEXT_MAX], loses[:_TEXT_MAX], is_fatal=is_fatal, cure=Remedy.COPY)


def _digest(folder: Folder, listing: DirectoryListing, name: str) -> str:
    digest = hashlib.sha256()
    for at in range(0, listing.sizes[name], _BLOCK_BYTES):
        digest.update(folder.read(name, at, _BLOCK_BYTES))
    return digest.hexdigest()


_STEP = ".step"
_COUNT = "the optimizer's count of updates"
_CHECKED_MAX = 16
_READ_MAX = 1 << 16
_APART_MAX = 10_000
"""Steps after which a second moment may have become zero."""


def odd_update_counts(
    folder: Folder, contents: Contents, scans: Sequence[ScannedTensor]
) -> Iterator[Problem]:
    """Yield the problem of the first parameter with an unusual count of updates.

    Args:
        folder: Folder of the checkpoint.
        contents: Its contents.
        scans: All weights and moments that were read.

    Raises:
        StoreError: A file could not be read.
    """
    steps = {
        scan: scan.counts.first
        for scan in scans
        if scan.tensor.part == OPTIMIZER and scan.name.endswith(_STEP) and scan.tensor.elements == 1
    }
    if len(set(steps.values())) <= 1:
        return
    usual_step, _ = Counter(steps.values()).most_common(1)[0]
    odd = [scan for scan, step in steps.items() if step != usual_step]
    wrong = _contradicted(folder, contents, {scan.name: steps[scan] for scan in odd[:_CHECKED_MAX]})
    scan = next((one for one in odd if one.name in wrong), odd[0])
    problem_text = f"`{scan.name[:80]}` is {steps[scan]:g}, but most others are {usual_step:g}"
    if wrong:
        problem_text += f", and {wrong[scan.name]}: its next updates have another size"
    else:
        problem_text += ": a parameter that was frozen, or had no gradient, has fewer updates"
    loses = _COUNT if wrong else ""
    yield Problem(scan.place, problem_text, loses, cure=Remedy.COPY)


def _contradicted(folder: Folder, contents: Contents, steps: Mapping[str, float]) -> dict[str, str]:
    """Return the contradictions between counts and another step, by name of the count."""
    wrong: dict[str, str] = {}
    for other_folder, listing, other in steps_beside_alike(folder, contents):
        distance = (other.step or 0) - (contents.step or 0)
        name = other_folder.url.rstrip("/").rpartition("/")[2]
        for tensor in other.tensors:
            if tensor.name not in steps or tensor.elements != 1:
                continue
            numbers = _numbers(other_folder, listing, tensor)
            growth = float(numbers[0]) - steps[tensor.name] if numbers.size else 0.0
            if growth > max(distance, 0):
                wrong.setdefault(tensor.name, f"it is {numbers[0]:g} in {name}")
    return wrong


def contradicts_older(folder: Folder, contents: Contents, names: Sequence[str]) -> bool:
    """Return True if second moments that are zero here are not zero in an older step.

    Args:
        folder: Folder of the checkpoint.
        contents: Its contents.
        names: Names of the moments.

    Raises:
        StoreError: A file could not be read.
    """
    return any(
        np.count_nonzero(_numbers(other_folder, listing, tensor))
        for other_folder, listing, other in steps_beside_alike(folder, contents)
        if 0 < (contents.step or 0) - (other.step or 0) < _APART_MAX
        for tensor in other.tensors
        if tensor.name in names and tensor.part == OPTIMIZER
    )


def steps_beside_alike(
    folder: Folder, contents: Contents
) -> Iterator[tuple[Folder, DirectoryListing, Contents]]:
    """Yield the nearest other steps with the same layout and the same number of parameters.

    Args:
        folder: Folder of the checkpoint.
        contents: Its contents.

    Raises:
        StoreError: A file could not be read.
    """
    for other_folder, listing in nearest_steps(folder.url):
        other = read_layout(other_folder, listing)
        if other is None or None in (contents.step, other.step):
            continue
        is_alike = (
            contents.optimizer is not None
            and other.optimizer is not None
            and contents.optimizer.params == other.optimizer.params
        )
        if other.layout == contents.layout and is_alike:
            yield other_folder, listing, other


def _numbers(folder: Folder, listing: DirectoryListing, tensor: Tensor) -> NDArray[np.float64]:
    """Return the first numbers of a tensor; an empty array for an unreadable tensor."""
    try:
        data = Elements(folder, listing, tensor).read(0, min(tensor.elements, _READ_MAX))
    except Unreadable:
        return np.empty(0)
    return values(data, tensor.dtype)
