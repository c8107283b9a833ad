"""Files of a checkpoint that equal files of an older step of the same run, byte for byte.

Configurations, tokenizers, arguments, scalers and frozen weights are the same in all steps. Trained
weights, their moments, and the random state of a run with dropout change with each step.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from resilient.layouts.accelerate import OPTIMIZERS
from resilient.layouts.dcp import SLICES
from resilient.layouts.detect import read_layout
from resilient.layouts.json_files import read_json
from resilient.layouts.model import MODEL, OPTIMIZER, Problem, Remedy, Unreadable
from resilient.layouts.neighbours import CONFIG, older_steps
from resilient.layouts.pickle_reader import TensorRef
from resilient.layouts.torch_zip import open_archive

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resilient.layouts.model import Contents
    from resilient.storage.folder import DirectoryListing, Folder

STALE = "it is byte for byte that of "
_BLOCK_BYTES = 1 << 20
_LAYOUTS = ("accelerate", "hf-trainer")
"""Layouts for which it is known which files a step changes."""
_SCALER = "scaler.pt"
_RANDOM = re.compile(r"rng_state(?:_\d{1,7})?\.pth")
_LOSES = {
    MODEL: "the weights of this step",
    OPTIMIZER: "the optimizer's state of this step",
    "random": "the random state",
}
_NARROW = ("F16", "BF16")
_RATE_MIN = 1e-5
"""A lower rate may leave every 16-bit weight unchanged."""


def stale_copies(
    folder: Folder, listing: DirectoryListing, contents: Contents
) -> Iterator[Problem]:
    """Yield files that every step should change but that equal the files of an older step.

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
    for older_folder, older in older_steps(folder.url):
        equal_files = [
            name
            for name in sorted(kinds)
            if 0 < listing.sizes.get(name, 0) == older.sizes.get(name)
            and _same(folder, older_folder, name, listing.sizes[name])
        ]
        older_layout = read_layout(older_folder, older) if equal_files else None
        has_scaler = _SCALER in listing.sizes
        if older_layout is None or not _is_moved(contents, older_layout, has_scaler=has_scaler):
            continue
        step = older_folder.url.rstrip("/").rpartition("/")[2]
        for name in equal_files:
            problem_text = f"{STALE}{step} beside it, although each step changes it"
            yield Problem(name, problem_text, _LOSES[kinds[name]], cure=Remedy.COPY)
        if equal_files:
            return


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
    """Return the files of random states, if dropout draws from the saved states."""
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


def _is_moved(contents: Contents, older: Contents, *, has_scaler: bool) -> bool:
    """Return True if an update was made between two steps, at a rate above 0."""
    rates = [
        rate
        for content in (contents, older)
        if content.optimizer is not None
        for rate in content.optimizer.rates
    ]
    own_step = contents.optimizer.step if contents.optimizer else None
    older_step = older.optimizer.step if older.optimizer else None
    # A scaler of fp16 may have skipped every update between two steps.
    is_skipped = has_scaler and own_step is not None and own_step == older_step
    return any(rates) and not is_skipped


def _same(folder: Folder, other: Folder, name: str, size_bytes: int) -> bool:
    return all(
        folder.read(name, at, _BLOCK_BYTES) == other.read(name, at, _BLOCK_BYTES)
        for at in range(0, size_bytes, _BLOCK_BYTES)
    )
