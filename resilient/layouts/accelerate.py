"""Reader of accelerate's ``save_state`` folders: one or several processes, FSDP or DeepSpeed.

A folder has model files and optimizer files. The Trainer of Transformers writes both kinds of files
in the same format, so its reader also uses this module.

Sources: ``accelerate.checkpointing``, ``accelerate.accelerator`` 1.15,
``accelerate.utils.fsdp_utils`` and ``transformers.trainer`` 5.23. If a file that an object of the
script needs is missing, the loader of accelerate raises an error. If the random states are missing,
the loader continues without a message.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resilient.layouts.consistency import check_base_rates, check_optimizer, check_update_count
from resilient.layouts.dcp import INDEX, optimizer_at, read_index
from resilient.layouts.deepspeed import LATEST, read_engine, tag_of
from resilient.layouts.json_files import decimal, read_text, whole
from resilient.layouts.model import MODEL, OPTIMIZER, OTHER, Contents, Problem, Remedy, Unreadable
from resilient.layouts.torch_zip import open_archive
from resilient.layouts.training_state import (
    device_of,
    is_own_schedule,
    optimizer_of,
    read_random,
    required,
    schedule_of,
)
from resilient.layouts.weights import SAFE, read_all, read_weights

if TYPE_CHECKING:
    from resilient.layouts.model import Optimizer, Schedule, Tensor
    from resilient.storage.folder import DirectoryListing, Folder

OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
_MODEL_FOLDER = re.compile(r"(pytorch_model_fsdp_\d{1,4}/)\.metadata")
_MODEL_SLICES = re.compile(r"(pytorch_model_fsdp_\d{1,4}/)[^/]*\.distcp")
_OPTIMIZER_FOLDER = re.compile(r"(optimizer_\d{1,4}/)\.metadata")
_OPTIMIZER_SLICES = re.compile(r"(optimizer_\d{1,4}/)[^/]*\.distcp")
_OF_TRAINER, _FSDP = "trainer_state.json", "pytorch_model_fsdp.bin"
_ENGINE_FOLDER = re.compile(r"((?:global_step\d{1,12}|pytorch_model)/)[^/]*_optim_states\.pt")
_ENGINE_SCRIPT = "zero_to_fp32.py"
_MODEL_WHOLE = re.compile(r"pytorch_model_fsdp(?:_\d{1,4})?\.bin")


@dataclass(frozen=True, slots=True)
class StateHalf:
    """The model or optimizer half of a folder.

    Attributes:
        tensors: Tensors of the half.
        optimizer: Summary of the optimizer, in the optimizer half.
        kind: Suffix for the title of the layout.
        problems: Missing or broken files.
        engine: Contents of a DeepSpeed engine in the folder, which has both halves.
        world: Number of ranks that wrote the half, if known.
        device: Device of the optimizer's state at the save, if known.
        is_in_one: Whether the half is an optimizer in one torch file.
    """

    tensors: tuple[Tensor, ...] = ()
    optimizer: Optimizer | None = None
    kind: str = ""
    problems: tuple[Problem, ...] = ()
    engine: Contents | None = None
    world: int | None = None
    device: str = ""
    is_in_one: bool = False


def read_model_half(folder: Folder, listing: DirectoryListing, tag: str) -> StateHalf:
    """Return the model half; for a DeepSpeed engine, both halves.

    Args:
        folder: Folder of the checkpoint.
        listing: Its files.
        tag: Folder of a DeepSpeed engine in the folder; empty without one.

    Raises:
        StoreError: A file could not be read.
    """
    sharded = _first(listing, _MODEL_FOLDER, _MODEL_SLICES)
    if sharded:
        return _half(folder, listing, sharded, MODEL, ", FSDP with sharded state")
    if tag:
        engine = read_engine(folder, listing, tag)
        kind = f", DeepSpeed in {tag.rstrip('/')}"
        return StateHalf(engine.tensors, engine.optimizer, kind, engine.problems, engine)
    if engine_problem := _lost_engine(folder, listing):
        engine = Contents("deepspeed", "an engine of DeepSpeed")
        return StateHalf(kind=", DeepSpeed", problems=(engine_problem,), engine=engine)
    whole_files = sorted(file for file in listing.sizes if _MODEL_WHOLE.fullmatch(file))
    if whole_files:
        tensors, problems = read_all(folder, listing, whole_files)
        return StateHalf(tensors, None, ", FSDP with full state", tuple(problems))
    return _read_single_half(folder, listing)


def _read_single_half(folder: Folder, listing: DirectoryListing) -> StateHalf:
    """Return the model half in the form that `save_pretrained` writes."""
    tensors, problems = read_weights(folder, listing)
    if _OF_TRAINER in listing.sizes and OPTIMIZERS[1] in listing.sizes:
        # The Trainer writes this name only with FSDP, and then loads weights from no other file.
        problem_text = "it is missing, and with FSDP the Trainer fails without it"
        problems = [Problem(_FSDP, problem_text, is_fatal=True, cure=Remedy.COPY)]
    elif not tensors and not problems:
        problems = [Problem(".", "it contains no weights", is_fatal=True)]
    return StateHalf(tensors, None, "", tuple(problems))


def _lost_engine(folder: Folder, listing: DirectoryListing) -> Problem | None:
    """Return the problem of a DeepSpeed engine that left traces but no folder."""
    tag = read_text(folder, listing, LATEST)
    folders = (match[1] for file in listing.sizes if (match := _ENGINE_FOLDER.match(file)))
    engine_folder = next(folders, "")
    if not engine_folder and not {LATEST, _ENGINE_SCRIPT} & set(listing.sizes):
        return None
    problem_text = (
        "the engine's model states are missing, and DeepSpeed fails without them"
        if engine_folder
        else "the folder of DeepSpeed's engine is missing, and a resume does not use the model's "
        "file beside it"
    )
    return Problem(
        engine_folder or f"{tag or 'global_step*'}/", problem_text, is_fatal=True, cure=Remedy.COPY
    )


def optimizer_half(
    folder: Folder,
    listing: DirectoryListing,
    model: StateHalf,
    loses: str,
    *,
    is_begun: bool = True,
) -> StateHalf:
    """Return the optimizer half; for an engine, the model half contains it.

    Args:
        folder: Folder of the checkpoint.
        listing: Its files.
        model: The model half.
        loses: State that the tool initializes again without an optimizer file; empty if the tool
            fails.
        is_begun: Whether the training has made steps.

    Raises:
        StoreError: A file could not be read.
    """
    if model.engine is not None:
        return StateHalf(optimizer=model.engine.optimizer)
    sharded = _first(listing, _OPTIMIZER_FOLDER, _OPTIMIZER_SLICES)
    if sharded:
        return _half(folder, listing, sharded, OPTIMIZER, "")
    last = OPTIMIZERS[0] if loses else OPTIMIZERS[1]
    name = next((optimizer for optimizer in OPTIMIZERS if listing.is_there(optimizer)), last)
    try:
        archive = open_archive(folder, listing, name)
        optimizer_value = required(optimizer_of(archive.value, archive), "an optimizer")
        problems = check_optimizer(name, archive.value, archive, is_begun=is_begun)
        device = device_of(archive.value)
        tensors = archive.tensors(OPTIMIZER)
        return StateHalf(
            tensors, optimizer_value, problems=tuple(problems), device=device, is_in_one=True
        )
    except Unreadable as error:
        # A tool may silently ignore a missing file, but fails at a broken file.
        is_fatal = not loses or listing.is_there(name)
        cure = Remedy.REPAIR if listing.is_there(name) else Remedy.COPY
        return StateHalf(problems=(Problem(name, str(error), loses, is_fatal=is_fatal, cure=cure),))


def _half(
    folder: Folder, listing: DirectoryListing, prefix: str, part: str, kind: str
) -> StateHalf:
    try:
        index = read_index(folder, listing, prefix, part)
    except Unreadable as error:
        return StateHalf(
            kind=kind, problems=(Problem(f"{prefix}{INDEX}", str(error), is_fatal=True),)
        )
    half = optimizer_at(folder, listing, index, "optimizer.") if part == OPTIMIZER else None
    return StateHalf(index.tensors, half, kind, index.problems, world=index.ranks)


def _first(listing: DirectoryListing, *patterns: re.Pattern[str]) -> str:
    """Return the folder that the first matching pattern finds; empty without one."""
    for pattern in patterns:
        numbers = sorted(match[1] for file in listing.sizes if (match := pattern.fullmatch(file)))
        if numbers:
            return numbers[0]
    return ""


_RESUME = "accelerator.load_state('{path}')"
_TITLE = "accelerate's `save_state`"
_RANDOM = r"random_states_(\d{1,7})\.pkl"
_OWN = re.compile(r"custom_checkpoint_(\d{1,7})\.pkl")
_NUMBERED = r"(?:_(\d{1,4}))?"
_SCALER, _LOADER = "scaler.pt", "dl_state_dict.bin"
_ROW_MAX = 1 << 10
"""Largest number of models, optimizers or objects for which gaps are detected."""
_PLACE = "the place in the data"
_PLACES = re.compile(r"(?i)data|sampl|load|step|iter|epoch|batch")


def is_state(listing: DirectoryListing) -> bool:
    """Return True if ``save_state`` wrote a folder, even if the random states are missing."""
    names = listing.sizes
    marks = any(re.fullmatch(_RANDOM, name) or _OWN.fullmatch(name) for name in names)
    return marks or bool({"scheduler.bin", "sampler.bin", _LOADER, "optimizer.bin"} & set(names))


def read_saved_state(folder: Folder, listing: DirectoryListing) -> Contents:
    """Return the contents of a folder of ``save_state``.

    Raises:
        StoreError: A file could not be read.
    """
    model = read_model_half(folder, listing, tag_of(folder, listing))
    schedule, schedule_problems = _schedules(folder, listing, model)
    optimizer = optimizer_half(
        folder, listing, model, "", is_begun=bool(schedule and schedule.step)
    )
    schedule_problems += _group_count_problems(folder, listing, optimizer)
    further_tensors, further_problems = _further_tensors(folder, listing, model)
    world = model.engine.world if model.engine else model.world
    rng, random_problems = read_random(folder, listing, _RANDOM, world=world)
    custom_tensors, place, custom_problems = _custom_object_tensors(folder, listing)
    ranks = world or (len(rng.ranks) if rng else None)
    unplaced = [] if place else _data_position_problem(listing, ranks)
    numbers = optimizer.optimizer
    all_problems = [
        *model.problems,
        *optimizer.problems,
        *further_problems,
        *schedule_problems,
        *random_problems,
        *custom_problems,
        *unplaced,
    ]
    return Contents(
        "accelerate",
        f"{_TITLE}{model.kind}",
        _RESUME,
        (*model.tensors, *optimizer.tensors, *further_tensors, *custom_tensors),
        model.engine.step if model.engine else numbers.step if numbers else None,
        world=ranks,
        optimizer=numbers,
        schedule=schedule,
        rng=rng,
        data={"kept by the script itself": place} if place else {},
        versions=dict(model.engine.versions) if model.engine else {},
        facts=_facts(folder, listing, own=len(_numbers(listing, _OWN))),
        problems=(*all_problems, *_schedule_contradictions(folder, listing, numbers, schedule)),
    )


def _further_tensors(
    folder: Folder, listing: DirectoryListing, model: StateHalf
) -> tuple[tuple[Tensor, ...], list[Problem]]:
    """Return the tensors of all models and optimizers but the first model and optimizer."""
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
        names = [f"{stem}_{number}{end}" for number in sorted(numbers) if number]
        halves, read_problems = read_all(folder, listing, names, part)
        tensors += halves
        problems += [*read_problems, *_gaps(numbers, f"{stem}_{{}}{end}")]
    return tuple(tensors), problems


def _schedules(
    folder: Folder, listing: DirectoryListing, model: StateHalf
) -> tuple[Schedule | None, list[Problem]]:
    numbers = _numbers(listing, re.compile(rf"scheduler{_NUMBERED}\.bin"))
    schedules: list[Schedule] = []
    problems = _gaps(numbers, "scheduler_{}.bin")
    for number in sorted(numbers):
        name = f"scheduler_{number}.bin" if number else "scheduler.bin"
        try:
            archive = open_archive(folder, listing, name)
            schedule = schedule_of(archive.value, archive)
            if schedule is not None or not (archive.value and is_own_schedule(archive.value)):
                known_schedule = required(schedule, "a schedule")
                if schedules and known_schedule.fault:
                    problems.append(Problem(name, known_schedule.fault, is_fatal=True))
                schedules.append(known_schedule)
        except Unreadable as error:
            problems.append(Problem(name, str(error), is_fatal=True))
    engine_schedule = model.engine.schedule if model.engine else None
    return (schedules[0] if schedules else engine_schedule), problems


def _group_count_problems(
    folder: Folder, listing: DirectoryListing, optimizer: StateHalf
) -> list[Problem]:
    """Return the problem if the first scheduler and the first optimizer have different groups."""
    try:
        value = open_archive(folder, listing, "scheduler.bin").value
    except Unreadable:
        return []
    saved_optimizer = optimizer.optimizer if optimizer.is_in_one else None
    return [
        *check_update_count("scheduler.bin", value, saved_optimizer, "optimizer.bin"),
        *check_base_rates("scheduler.bin", value, saved_optimizer),
    ]


def _schedule_contradictions(
    folder: Folder,
    listing: DirectoryListing,
    optimizer: Optimizer | None,
    schedule: Schedule | None,
) -> list[Problem]:
    """Return contradictions between the optimizer and the scheduler.

    A scheduler adds a key to the optimizer's groups, so this function detects a lost scheduler.
    """
    name = "scheduler.bin"
    if schedule is None and name not in listing.sizes and _had_schedule(folder, listing):
        problem_text = "it is missing, but the optimizer had a schedule"
        return [Problem(name, problem_text, is_fatal=True)]
    if optimizer is None or schedule is None or not schedule.rates or not optimizer.rates:
        return []
    if optimizer.rates == schedule.rates or len(optimizer.rates) != len(schedule.rates):
        return []
    problem_text = f"the optimizer has the rates {optimizer.rates}, the schedule {schedule.rates}"
    return [Problem(".", problem_text, "the consistency of its files", cure=Remedy.COPY)]


def _had_schedule(folder: Folder, listing: DirectoryListing) -> bool:
    try:
        value = open_archive(folder, listing, "optimizer.bin").value
    except Unreadable:
        return False
    groups = value.get("param_groups") if isinstance(value, dict) else None
    entries = groups if isinstance(groups, list) else []
    return any(isinstance(group, dict) and "initial_lr" in group for group in entries)


def _custom_object_tensors(
    folder: Folder, listing: DirectoryListing
) -> tuple[tuple[Tensor, ...], str, list[Problem]]:
    """Return tensors of a script's own objects, names that suggest a data position, and problems.

    The loader requires the number of objects that the script registers, so it fails at a gap.
    """
    numbers = _numbers(listing, _OWN)
    problems = _gaps(numbers, "custom_checkpoint_{}.pkl", first=0)
    tensors: list[Tensor] = []
    places = []
    for number in sorted(numbers):
        name = f"custom_checkpoint_{number}.pkl"
        try:
            archive = open_archive(folder, listing, name)
            tensors += archive.tensors(OTHER)
        except Unreadable as error:
            problems.append(Problem(name, str(error), is_fatal=True))
            continue
        value = archive.value if isinstance(archive.value, dict) else {}
        places += [text for text in value if isinstance(text, str) and _PLACES.search(text)]
    return tuple(tensors), ", ".join(place[:40] for place in places[:6]), problems


def _data_position_problem(listing: DirectoryListing, ranks: int | None) -> list[Problem]:
    """Return the problem of the data position, which accelerate saves only for some loaders."""
    if _LOADER not in listing.sizes:
        return [Problem(".", "it does not contain a data position", _PLACE, cure=Remedy.UNKEPT)]
    if (ranks or 1) > 1:
        problem_text = (
            f"{ranks} ranks wrote their data positions to this one file, and only the last remains"
        )
        return [
            Problem(_LOADER, problem_text, f"{_PLACE} of all ranks but one", cure=Remedy.UNKEPT)
        ]
    return []


def _facts(folder: Folder, listing: DirectoryListing, own: int) -> dict[str, Any]:
    facts: dict[str, Any] = {"objects of the script": own} if own else {}
    step = _value(folder, listing, "random_states_0.pkl", "step")
    if whole(step):
        facts["batches since it began"] = whole(step)
    scale = decimal(_value(folder, listing, _SCALER, "scale"))
    return {**facts, **({"loss scale": scale} if scale is not None else {})}


def _value(folder: Folder, listing: DirectoryListing, name: str, key: str) -> Any:
    try:
        archive = open_archive(folder, listing, name)
    except Unreadable:
        return None
    value = archive.value.get(key) if isinstance(archive.value, dict) else None
    return archive.number(value)


def _numbers(listing: DirectoryListing, pattern: re.Pattern[str]) -> set[int]:
    matches = (pattern.fullmatch(file) for file in listing.sizes)
    return {int(match[1] or 0) for match in matches if match}


def _gaps(numbers: set[int], pattern: str, first: int = 1) -> list[Problem]:
    """Return the missing files of a numbered series."""
    last = min(max(numbers, default=0), _ROW_MAX)
    missing_numbers = [number for number in range(first, last) if number not in numbers]
    return [
        Problem(pattern.format(number), "it is missing", is_fatal=True)
        for number in missing_numbers[:8]
    ]
