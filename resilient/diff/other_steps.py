"""Detection of contradictions between a checkpoint and other steps of its run.

**Files that equal a file of another step byte for byte.** Configurations, tokenizers, arguments,
scalers and frozen weights are the same in all steps. In contrast, each step changes trained
weights, their moments, and the random state of a run with dropout. If such a file is equal in two
steps, one step has a copy of the other step's file.

**Counts of updates.** The optimizer counts the updates of each parameter. A parameter that had no
gradient or was unfrozen later has a lower count than other parameters. This is no damage. But a
count never falls, and grows at most by one with each step.
"""

from __future__ import annotations

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
from resilient.layouts.neighbours import CONFIG, nearest_steps, newer_steps, older_steps
from resilient.layouts.pickle_reader import TensorRef
from resilient.layouts.torch_zip import open_archive

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

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
            and not (is_newer and _is_copied_from(listing, other, name))
        ]
        other_layout = read_layout(other_folder, other) if equal_files else None
        has_scaler = _SCALER in listing.sizes
        if other_layout is None or not _is_moved(contents, other_layout, has_scaler=has_scaler):
            continue
        step = other_folder.url.rstrip("/").rpartition("/")[2]
        for name in equal_files:
            problem_text = f"{STALE}{step} beside it, although each step changes it"
            # Without times that tell, the newer step is the copy: it holds a file that existed.
            is_lost = not (is_newer and _is_of_save(listing, name))
            if not is_lost:
                problem_text += f": {step} may have the file of this step"
            yield Problem(name, problem_text, _LOSES[kinds[name]] * is_lost, cure=Remedy.COPY)
        if equal_files:
            return


def _is_copied_from(listing: DirectoryListing, newer: DirectoryListing, name: str) -> bool:
    """Return True if times show that a newer step has the file of this step, and not the reverse.

    One save writes all files of a step, one after the other.
    """
    return _is_of_save(listing, name) and not _is_of_save(newer, name)


def _is_of_save(listing: DirectoryListing, name: str) -> bool:
    """Return True if a file was written while the other files of its folder were written."""
    times = [time for other, time in listing.changed.items() if other != name]
    at = listing.changed.get(name)
    if at is None or not times:
        return False
    return min(times) - _SAVE_SECONDS <= at <= max(times) + _SAVE_SECONDS


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
