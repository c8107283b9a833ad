"""Comparison of a checkpoint with checkpoints of other steps in the same local folder."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from resilient.errors import KeyNotFound, StoreError
from resilient.layouts.consistency import UNLESS_UNUSED
from resilient.layouts.json_files import read_json
from resilient.layouts.model import OPTIMIZER, Problem, Remedy, Unreadable
from resilient.layouts.weights import read_weights
from resilient.storage.folder import open_folder
from resilient.storage.urls import protocol_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from resilient.layouts.model import Contents, Tensor
    from resilient.storage.folder import DirectoryListing, Folder

CONFIG = "config.json"
REPORT = "repaired.json"
"""Report of a repair in the repaired copy."""
REPAIRED, SALVAGED = "repaired", "salvaged"
"""Folders of the copies below a run."""
_ADAPTER = "adapter_config.json"
_WITH_CONFIG = ("generation_config.json", "model.safetensors.index.json")
"""Files that only `save_pretrained` writes, after it wrote ``config.json``."""
_NUMBERED = re.compile(r"(.*?)(\d{1,12})")
_READ_MAX = 2
_WITNESSES_LEAST = 2
_COUNTED_MOMENT = re.compile(r"state\.\d+\.exp_avg(?:_sq)?")
"""Name of a moment in an optimizer that counts its parameters."""
_LOSES = "the model's configuration"


def steps_beside(url: str) -> list[tuple[int, Path]]:
    """Return the folders of other steps beside a checkpoint, each with its distance in steps.

    The distance of an older step is negative. The nearest step comes first.

    Args:
        url: URL of the checkpoint; the result is empty if it is not on this machine.
    """
    if protocol_of(url) != "file":
        return []
    own_path = Path(place_in_run(url).removeprefix("file://")).absolute()
    match = _NUMBERED.fullmatch(own_path.name)
    if match is None or not own_path.parent.is_dir():
        return []
    steps = []
    for path in own_path.parent.iterdir():
        neighbour_match = _NUMBERED.fullmatch(path.name)
        if (
            neighbour_match
            and neighbour_match[1] == match[1]
            and path.name != own_path.name
            and path.is_dir()
        ):
            steps.append((int(neighbour_match[2]) - int(match[2]), path))
    return sorted(steps, key=lambda step: (abs(step[0]), step[0]))


def place_in_run(url: str) -> str:
    """Return the path of a checkpoint in its run; of a repaired copy, the path of its source.

    A repaired copy stands in a folder of copies below the run, and its report names the source.

    Args:
        url: URL of the checkpoint; the result is equal if it is no repaired copy on this machine.
    """
    own_path = Path(url.removeprefix("file://")).absolute()
    if protocol_of(url) != "file" or own_path.parent.name not in (REPAIRED, SALVAGED):
        return url
    try:
        folder = open_folder(str(own_path))
        source = read_json(folder, folder.list(), REPORT).get("source")
    except (Unreadable, StoreError, KeyNotFound):
        return url
    name = Path(source).name if isinstance(source, str) else own_path.name
    return str(own_path.parent.parent / name)


def older_steps(url: str) -> Iterator[tuple[Folder, DirectoryListing]]:
    """Yield the nearest older steps beside a checkpoint, without unreadable folders.

    Args:
        url: URL of the checkpoint.
    """
    older = [path for distance, path in steps_beside(url) if distance < 0]
    yield from _opened(older[:_READ_MAX])


def newer_steps(url: str) -> Iterator[tuple[Folder, DirectoryListing]]:
    """Yield the nearest newer steps beside a checkpoint, without unreadable folders.

    Args:
        url: URL of the checkpoint.
    """
    newer = [path for distance, path in steps_beside(url) if distance > 0]
    yield from _opened(newer[:_READ_MAX])


def weights_beside(url: str) -> tuple[dict[str, Tensor], int]:
    """Return the weights of the nearest other step by name, and its distance in steps.

    Args:
        url: URL of the checkpoint.
    """
    for distance, path in steps_beside(url)[:_READ_MAX]:
        for folder, listing in _opened([path]):
            tensors, problems = read_weights(folder, listing)
            if tensors and not problems:
                return {tensor.name: tensor for tensor in tensors}, distance
    return {}, 0


def nearest_steps(url: str) -> Iterator[tuple[Folder, DirectoryListing]]:
    """Yield the nearest other steps beside a checkpoint, older and newer.

    Args:
        url: URL of the checkpoint.
    """
    yield from _opened([path for _, path in steps_beside(url)[:_READ_MAX]])


def lost_config(url: str, listing: DirectoryListing) -> list[Problem]:
    """Return the problem of a lost configuration, if the folder or another step shows the loss.

    Args:
        url: URL of the checkpoint of the Trainer of Transformers.
        listing: Its files.
    """
    is_adapted = any(name.rpartition("/")[2] == _ADAPTER for name in listing.sizes)
    if listing.is_there(CONFIG) or listing.is_there(_ADAPTER) or is_adapted:
        return []
    neighbour = next((path for _, path in steps_beside(url) if (path / CONFIG).is_file()), None)
    by_file = next((name for name in _WITH_CONFIG if name in listing.sizes), "")
    if neighbour is None and not by_file:
        return []
    evidence = (
        f"{neighbour.name} beside it has one" if neighbour else f"`{by_file}` shows that it existed"
    )
    cure = Remedy.REPAIR if neighbour else Remedy.COPY
    return [Problem(CONFIG, f"it is missing, and {evidence}", _LOSES, cure=cure)]


def decide_partial_states(
    contents: Contents, steps: Callable[[], Iterable[tuple[str, Contents]]]
) -> tuple[Problem, ...]:
    """Return the problems, with each partial state compared with the steps beside it.

    An optimizer has a state of each parameter from the first gradient on. If an older step has more
    states, this checkpoint lost states. If another step has no more states than this checkpoint,
    the other parameters had no gradient.

    Args:
        contents: Contents of the checkpoint.
        steps: Function that reads the nearest other steps: their names and contents, nearest first.
    """
    problems = contents.problems
    if not any(problem.what.endswith(UNLESS_UNUSED) for problem in problems):
        return problems
    owned = _state_owners(contents)
    by_steps: list[tuple[str, bool]] = []
    for name, other in steps():
        if not other.optimizer or not contents.optimizer:
            continue
        if (other.layout, other.optimizer.params) != (contents.layout, contents.optimizer.params):
            continue
        other_owned, is_older = _state_owners(other), (other.step or 0) < (contents.step or 0)
        if is_older and not other_owned <= owned:
            by_steps.insert(0, (f"{name} beside it has a state of more", True))
        elif other_owned and other_owned <= owned:
            by_steps.append((f"they had no gradient, as {name} beside it shows", False))
    for evidence, is_lost in by_steps[:1]:
        problems = tuple(
            replace(
                problem,
                what=problem.what.replace(UNLESS_UNUSED, evidence),
                loses=problem.loses if is_lost else "",
                cure=problem.cure if is_lost else Remedy.NEEDLESS,
            )
            if problem.what.endswith(UNLESS_UNUSED)
            else problem
            for problem in problems
        )
    return problems


def exchanged_moments(
    contents: Contents, steps: Callable[[], Iterable[tuple[str, Contents]]]
) -> list[Problem]:
    """Return the problem of moments that have the shapes of one another in two other steps.

    An optimizer may count its parameters, so the weights do not show the owner of a moment. One
    other step alone does not show which of both is wrong.

    Args:
        contents: Contents of the checkpoint.
        steps: Function that reads the nearest other steps: their names and contents, nearest first.
    """
    own = _moment_shapes(contents)
    if not own:
        return []
    witnesses: list[str] = []
    for name, other in steps():
        shapes = _moment_shapes(other)
        if shapes == own:
            return []
        differ = [moment for moment in own if shapes.get(moment) != own[moment]]
        is_permuted = Counter(own.values()) == Counter(shapes.values())
        if is_permuted and own.keys() == shapes.keys():
            witnesses.append(f"{list(shapes[differ[0]])} in {name}")
    if len(witnesses) < _WITNESSES_LEAST:
        return []
    problem_text = (
        f"`{differ[0][:80]}` has the shape {list(own[differ[0]])}, but {' and '.join(witnesses)} "
        "beside it: moments of its parameters were exchanged"
    )
    return [Problem(".", problem_text, is_fatal=True, cure=Remedy.COPY)]


def _moment_shapes(contents: Contents) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the moments of an optimizer that counts its parameters."""
    return {
        tensor.name: tensor.shape
        for tensor in contents.tensors
        if tensor.part == OPTIMIZER and _COUNTED_MOMENT.fullmatch(tensor.name)
    }


def _state_owners(contents: Contents) -> set[tuple[str, ...]]:
    """Return the file and the parameter of each state of the optimizer."""
    return {
        (*tensor.files, tensor.name.rpartition(".")[0])
        for tensor in contents.tensors
        if tensor.part == OPTIMIZER
    }


def _opened(paths: list[Path]) -> Iterator[tuple[Folder, DirectoryListing]]:
    for path in paths:
        try:
            folder = open_folder(str(path))
            listing = folder.list()
        except (StoreError, KeyNotFound):
            continue
        yield folder, listing
