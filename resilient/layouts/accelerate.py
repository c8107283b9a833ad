"""Folders of accelerate's ``save_state``: one process, many, FSDP, DeepSpeed inside.

Source: ``accelerate.checkpointing`` and ``accelerate.accelerator`` 1.15. Its loader stops at any
file that a script's objects want and that is not there, and passes over random states in silence.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from resilient.layouts.agreeing import odd_count
from resilient.layouts.archives import open_archive
from resilient.layouts.deepspeed import tag_of
from resilient.layouts.documents import decimal, whole
from resilient.layouts.halves import model_half, optimizer_half
from resilient.layouts.progress import read_random, required, schedule_of
from resilient.layouts.values import MODEL, OPTIMIZER, OTHER, Contents, Cure, Problem, Unreadable
from resilient.layouts.weights import SAFE, read_all

if TYPE_CHECKING:
    from resilient.layouts.halves import Half
    from resilient.layouts.values import Optimizer, Schedule, Tensor
    from resilient.storage.folder import Folder, Listing

_RESUME = "accelerator.load_state('{path}')"
_TITLE = "accelerate's `save_state`"
_RANDOM = r"random_states_(\d{1,7})\.pkl"
_OWN = re.compile(r"custom_checkpoint_(\d{1,7})\.pkl")
_NUMBERED = r"(?:_(\d{1,4}))?"
_SCALER, _LOADER = "scaler.pt", "dl_state_dict.bin"
_ROW_MAX = 1 << 10
"""Models, optimizers or objects of one script; beyond it gaps are not looked for."""
_PLACE = "the place in the data"
_PLACES = re.compile(r"(?i)data|sampl|load|step|iter|epoch|batch")


def is_state(listing: Listing) -> bool:
    """Say whether a folder is of ``save_state``, also when it lost its random states."""
    names = listing.sizes
    marks = any(re.fullmatch(_RANDOM, one) or _OWN.fullmatch(one) for one in names)
    return marks or bool({"scheduler.bin", "sampler.bin", _LOADER, "optimizer.bin"} & set(names))


def read_saved_state(folder: Folder, listing: Listing) -> Contents:
    """Return what a folder of ``save_state`` holds.

    Raises:
        StoreError: it could not be read.
    """
    model = model_half(folder, listing, tag_of(folder, listing))
    schedule, odd = _schedules(folder, listing, model)
    optimizer = optimizer_half(
        folder, listing, model, "", is_begun=bool(schedule and schedule.step)
    )
    odd += _counted(folder, listing, optimizer)
    more, problems = _more(folder, listing, model)
    world = model.engine.world if model.engine else model.world
    rng, lost = read_random(folder, listing, _RANDOM, world=world)
    own, place, broken = _own(folder, listing)
    ranks = world or (len(rng.ranks) if rng else None)
    unplaced = [] if place else _unplaced(listing, ranks)
    numbers = optimizer.optimizer
    found = [*model.problems, *optimizer.problems, *problems, *odd, *lost, *broken, *unplaced]
    return Contents(
        "accelerate",
        f"{_TITLE}{model.kind}",
        _RESUME,
        (*model.tensors, *optimizer.tensors, *more, *own),
        model.engine.step if model.engine else numbers.step if numbers else None,
        world=ranks,
        optimizer=numbers,
        schedule=schedule,
        rng=rng,
        data={"kept by the script itself": place} if place else {},
        versions=dict(model.engine.versions) if model.engine else {},
        facts=_facts(folder, listing, own=len(_numbers(listing, _OWN))),
        problems=(*found, *_scheduled(folder, listing, numbers, schedule)),
    )


def _more(
    folder: Folder, listing: Listing, model: Half
) -> tuple[tuple[Tensor, ...], list[Problem]]:
    """Return what is kept of models and optimizers beyond the first of each."""
    if model.engine is not None or model.kind:
        return (), []
    tensors: list[Tensor] = []
    problems: list[Problem] = []
    for stem, end, part in (
        ("model", SAFE, MODEL),
        ("pytorch_model", ".bin", MODEL),
        ("optimizer", ".bin", OPTIMIZER),
    ):
        numbers = _numbers(listing, re.compile(f"{stem}{_NUMBERED}{re.escape(end)}"))
        names = [f"{stem}_{one}{end}" for one in sorted(numbers) if one]
        found, broken = read_all(folder, listing, names, part)
        tensors += found
        problems += [*broken, *_gaps(numbers, f"{stem}_{{}}{end}")]
    return tuple(tensors), problems


def _schedules(
    folder: Folder, listing: Listing, model: Half
) -> tuple[Schedule | None, list[Problem]]:
    numbers = _numbers(listing, re.compile(rf"scheduler{_NUMBERED}\.bin"))
    found: list[Schedule] = []
    problems = _gaps(numbers, "scheduler_{}.bin")
    for one in sorted(numbers):
        name = f"scheduler_{one}.bin" if one else "scheduler.bin"
        try:
            archive = open_archive(folder, listing, name)
            found.append(required(schedule_of(archive.value, archive), "a schedule"))
        except Unreadable as error:
            problems.append(Problem(name, str(error), is_fatal=True))
    inside = model.engine.schedule if model.engine else None
    return (found[0] if found else inside), problems


def _counted(folder: Folder, listing: Listing, optimizer: Half) -> list[Problem]:
    """Return whether the first schedule is of another number of groups than the first optimizer."""
    try:
        value = open_archive(folder, listing, "scheduler.bin").value
    except Unreadable:
        return []
    held = optimizer.optimizer if optimizer.is_in_one else None
    return odd_count("scheduler.bin", value, held, "optimizer.bin")


def _scheduled(
    folder: Folder, listing: Listing, optimizer: Optimizer | None, schedule: Schedule | None
) -> list[Problem]:
    """Return what the optimizer and the schedule say of each other.

    A schedule leaves its mark in the optimizer's groups, so that one which is gone is missed.
    """
    name = "scheduler.bin"
    if schedule is None and name not in listing.sizes and _had_schedule(folder, listing):
        what = "it is missing, and the optimizer had a schedule"
        return [Problem(name, what, is_fatal=True)]
    if optimizer is None or schedule is None or not schedule.rates or not optimizer.rates:
        return []
    if optimizer.rates == schedule.rates or len(optimizer.rates) != len(schedule.rates):
        return []
    what = f"the optimizer has the rates {optimizer.rates}, the schedule {schedule.rates}"
    return [Problem(".", what, "the agreement of its files", cure=Cure.COPY)]


def _had_schedule(folder: Folder, listing: Listing) -> bool:
    try:
        value = open_archive(folder, listing, "optimizer.bin").value
    except Unreadable:
        return False
    groups = value.get("param_groups") if isinstance(value, dict) else None
    held = groups if isinstance(groups, list) else []
    return any(isinstance(one, dict) and "initial_lr" in one for one in held)


def _own(folder: Folder, listing: Listing) -> tuple[tuple[Tensor, ...], str, list[Problem]]:
    """Return the tensors of a script's own objects, what tells a place in the data, what is wrong.

    Their number must be that of the objects a script registers, so a gap stops the loader.
    """
    numbers = _numbers(listing, _OWN)
    problems = _gaps(numbers, "custom_checkpoint_{}.pkl", first=0)
    tensors: list[Tensor] = []
    places = []
    for one in sorted(numbers):
        name = f"custom_checkpoint_{one}.pkl"
        try:
            archive = open_archive(folder, listing, name)
            tensors += archive.tensors(OTHER)
        except Unreadable as error:
            problems.append(Problem(name, str(error), is_fatal=True))
            continue
        value = archive.value if isinstance(archive.value, dict) else {}
        places += [one for one in value if isinstance(one, str) and _PLACES.search(one)]
    return tuple(tensors), ", ".join(one[:40] for one in places[:6]), problems


def _unplaced(listing: Listing, ranks: int | None) -> list[Problem]:
    """Return what is to say of the place in the data, which accelerate keeps for few loaders."""
    if _LOADER not in listing.sizes:
        return [
            Problem(".", "nothing in it says how far in the data it was", _PLACE, cure=Cure.UNKEPT)
        ]
    if (ranks or 1) > 1:
        what = f"{ranks} ranks wrote their place in the data to this one file, and one was last"
        return [Problem(_LOADER, what, f"{_PLACE} of all ranks but one", cure=Cure.UNKEPT)]
    return []


def _facts(folder: Folder, listing: Listing, own: int) -> dict[str, Any]:
    found: dict[str, Any] = {"objects of the script": own} if own else {}
    step = _value(folder, listing, "random_states_0.pkl", "step")
    if whole(step):
        found["batches since it began"] = whole(step)
    scale = decimal(_value(folder, listing, _SCALER, "scale"))
    return {**found, **({"loss scale": scale} if scale is not None else {})}


def _value(folder: Folder, listing: Listing, name: str, key: str) -> Any:
    try:
        archive = open_archive(folder, listing, name)
    except Unreadable:
        return None
    value = archive.value.get(key) if isinstance(archive.value, dict) else None
    return archive.number(value)


def _numbers(listing: Listing, pattern: re.Pattern[str]) -> set[int]:
    found = (pattern.fullmatch(one) for one in listing.sizes)
    return {int(match[1] or 0) for match in found if match}


def _gaps(numbers: set[int], named: str, first: int = 1) -> list[Problem]:
    """Return which files of a row are missing before its last."""
    last = min(max(numbers, default=0), _ROW_MAX)
    lacking = [one for one in range(first, last) if one not in numbers]
    return [Problem(named.format(one), "it is missing", is_fatal=True) for one in lacking[:8]]
