"""Reader of ``step-<n>`` folders of torchtitan: distributed checkpoints with its own tensor names.

Source: ``torchtitan.components.checkpoint``. The names of the weights have no prefix. Other state
has the prefixes ``optimizer.``, ``lr_scheduler.``, ``dataloader.`` and ``train_state.``. torchtitan
saves no random states.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from resilient.layouts.dcp import optimizer_at, value_at
from resilient.layouts.json_files import decimal, whole
from resilient.layouts.model import MODEL, OPTIMIZER, OTHER, Contents, Problem, Remedy, Schedule

if TYPE_CHECKING:
    from resilient.layouts.dcp import Index
    from resilient.layouts.model import Optimizer, Tensor
    from resilient.storage.folder import DirectoryListing, Folder

_TITLE = "a step of torchtitan"
_STEP = "train_state.step"
_RANK = re.compile(r"dataloader\.dp_rank_(\d{1,7})")
_WORLD = "dataloader.world_size"
_PLACE = "the place in the data"
_OTHERS = ("lr_scheduler", "dataloader", "train_state")
_GAPS_MAX = 8


def is_step(index: Index) -> bool:
    """Return True if the names of a distributed checkpoint are those of torchtitan."""
    return _STEP in index.slices and any(part.startswith("optimizer.") for part in index.slices)


def read_step(folder: Folder, listing: DirectoryListing, index: Index) -> Contents:
    """Return the contents of a step of torchtitan.

    Raises:
        StoreError: A file could not be read.
    """
    step = whole(value_at(folder, listing, index, _STEP))
    optimizer = optimizer_at(folder, listing, index, "optimizer.")
    last = whole(value_at(folder, listing, index, "lr_scheduler.last_epoch"))
    rates = value_at(folder, listing, index, "lr_scheduler._last_lr")
    values = rates if isinstance(rates, list) else []
    schedule = Schedule(
        last, tuple(rate for value in values if (rate := decimal(value)) is not None)
    )
    tokens = whole(value_at(folder, listing, index, "train_state.ntokens_seen"))
    world = whole(value_at(folder, listing, index, _WORLD))
    missing_problems = (
        []
        if optimizer
        else [Problem(".", "it contains no optimizer", "the optimizer's state", cure=Remedy.UNKEPT)]
    )
    if last is None:
        missing_problems.append(
            Problem(".", "it contains no schedule", "the schedule", cure=Remedy.UNKEPT)
        )
    data = {"loaders": world, "tokens": tokens}
    return Contents(
        "torchtitan",
        _TITLE,
        "./run_train.sh --checkpoint.load_step=" + ("-1" if step is None else str(step)),
        tuple(_assign_part(tensor) for tensor in index.tensors),
        step,
        world=index.ranks,
        optimizer=optimizer,
        schedule=None if last is None else schedule,
        data={name: value for name, value in data.items() if value is not None},
        versions={"metadata": index.version} if index.version else {},
        problems=(
            *index.problems,
            *missing_problems,
            *_loader_position_problems(index, world),
            *_disagreements(folder, step, last, optimizer),
            Problem(
                ".", "torchtitan keeps no random states", "the random state", cure=Remedy.UNKEPT
            ),
        ),
    )


def _assign_part(tensor: Tensor) -> Tensor:
    head = tensor.name.partition(".")[0]
    part = OPTIMIZER if head == "optimizer" else OTHER if head in _OTHERS else MODEL
    return replace(tensor, part=part)


def _loader_position_problems(index: Index, world: int | None) -> list[Problem]:
    """Return the loaders without a position in the data; each data-parallel rank has one."""
    ranks = {int(match[1]) for part in index.slices if (match := _RANK.fullmatch(part))}
    if not ranks:
        return [Problem(".", "it contains no loader's position", _PLACE, cure=Remedy.UNKEPT)]
    last = min(max(world or 0, max(ranks) + 1), len(ranks) + _GAPS_MAX)
    gaps = [str(rank) for rank in range(last) if rank not in ranks][:_GAPS_MAX]
    if not gaps:
        return []
    return [
        Problem(".", f"loaders without their position: {', '.join(gaps)}", _PLACE, cure=Remedy.COPY)
    ]


def _disagreements(
    folder: Folder, step: int | None, last: int | None, optimizer: Optimizer | None
) -> list[Problem]:
    match = re.search(r"step-(\d{1,12})/?$", folder.url)
    steps_by_source: dict[str, Any] = {
        "the folder's name": int(match[1]) if match else None,
        "its state": step,
        "the schedule": last,
        "the optimizer": optimizer.step if optimizer else None,
    }
    steps = {name: value for name, value in steps_by_source.items() if value is not None}
    if len(set(steps.values())) < 2:  # noqa: PLR2004 - they agree
        return []
    problem_text = "they name different steps: " + ", ".join(
        f"{a} of {b}" for a, b in steps.items()
    )
    # A repair can fix a wrong folder name if all other sources agree.
    is_mixed = len({number for number in (step, last, optimizer and optimizer.step) if number}) > 1
    cure = Remedy.COPY if is_mixed else Remedy.REPAIR
    return [Problem(".", problem_text, "the consistency of its files", cure=cure)]
