"""Search for other steps of a run beside a checkpoint on this machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from resilient.errors import KeyNotFound, StoreError
from resilient.layouts.model import Problem, Remedy
from resilient.layouts.weights import read_weights
from resilient.storage.folder import open_folder
from resilient.storage.urls import protocol_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resilient.layouts.model import Tensor
    from resilient.storage.folder import DirectoryListing, Folder

CONFIG = "config.json"
_ADAPTER = "adapter_config.json"
_WITH_CONFIG = ("generation_config.json", "model.safetensors.index.json")
"""Files that only `save_pretrained` writes, after it wrote ``config.json``."""
_NUMBERED = re.compile(r"(.*?)(\d{1,12})")
_READ_MAX = 2
_LOSES = "the model's configuration"


def steps_beside(url: str) -> list[tuple[int, Path]]:
    """Return the folders of other steps beside a checkpoint, each with its distance in steps.

    The distance of an older step is negative. The nearest step comes first.

    Args:
        url: URL of the checkpoint; the result is empty if it is not on this machine.
    """
    if protocol_of(url) != "file":
        return []
    own_path = Path(url.removeprefix("file://")).absolute()
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
    if listing.is_there(CONFIG) or listing.is_there(_ADAPTER):
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


def _opened(paths: list[Path]) -> Iterator[tuple[Folder, DirectoryListing]]:
    for path in paths:
        try:
            folder = open_folder(str(path))
            listing = folder.list()
        except (StoreError, KeyNotFound):
            continue
        yield folder, listing
