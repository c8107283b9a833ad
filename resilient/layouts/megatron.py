"""Reader of Megatron-Core's distributed checkpoints: folders ``iter_<n>``, or their parent folder.

Source: ``megatron.core.dist_checkpointing`` and ``megatron.training.checkpointing``. The tensors
are stored as a distributed checkpoint of torch. State that is common to all ranks is in one torch
file.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from resilient.layouts.dcp import INDEX, SLICES, read_index
from resilient.layouts.field_types import count_fault, miscounted
from resilient.layouts.json_files import decimal, read_json, read_text, whole
from resilient.layouts.model import (
    Contents,
    Optimizer,
    Problem,
    RandomStates,
    Remedy,
    Schedule,
    Unreadable,
)
from resilient.layouts.pickle_reader import PickledCall
from resilient.layouts.torch_zip import open_archive

if TYPE_CHECKING:
    from resilient.layouts.dcp import Index
    from resilient.layouts.model import Tensor
    from resilient.storage.folder import DirectoryListing, Folder

COMMON, CONFIG = "common.pt", "metadata.json"
TRACKER = "latest_checkpointed_iteration.txt"
_TITLE = "an iteration of Megatron"
_ITERATION = re.compile(r"iter_(\d{1,12})/?$")
_RANDOM = "rng_state/shard_"
_PLACE = "the place in the data"


def is_iteration(listing: DirectoryListing, prefix: str = "") -> bool:
    """Return True if a folder directly contains the files of one iteration."""
    names = {file[len(prefix) :] for file in listing.sizes if file.startswith(prefix)}
    slices = INDEX in names or any(name.endswith(SLICES) and "/" not in name for name in names)
    return len({COMMON, CONFIG} & names) + slices > 1


def is_megatron(listing: DirectoryListing) -> bool:
    """Return True if a folder is an iteration of Megatron, or the parent with the tracker."""
    return is_iteration(listing) or bool(TRACKER in listing.sizes and _inside(listing))


def read_megatron(folder: Folder, listing: DirectoryListing) -> Contents:
    """Return the contents of an iteration; for a parent folder, of the tracked iteration.

    Raises:
        StoreError: A file could not be read.
    """
    if is_iteration(listing):
        return _read(folder, listing, "")
    latest = read_text(folder, listing, TRACKER)
    name = f"iter_{int(latest):07d}/" if re.fullmatch(r"\d{1,12}", latest) else "release/"
    if is_iteration(listing, name):
        return _read(folder, listing, name)
    is_complete = latest == "release" or name != "release/"
    problem_text = (
        f"it names `{name}`, which does not exist" if is_complete else "it names no iteration"
    )
    existing_folder = max(_inside(listing))
    help_ = "resilient ckpt inspect {path}/" + existing_folder.rstrip("/")
    return Contents(
        "megatron", _TITLE, problems=(Problem(TRACKER, problem_text, is_fatal=True, help=help_),)
    )


def _inside(listing: DirectoryListing) -> set[str]:
    """Return the folders of iterations in a folder."""
    folders = {file.partition("/")[0] + "/" for file in listing.sizes if "/" in file}
    checkpoint_folders = {
        folder for folder in folders if _ITERATION.fullmatch(folder) or folder == "release/"
    }
    return {folder for folder in checkpoint_folders if is_iteration(listing, folder)}


def _read(folder: Folder, listing: DirectoryListing, prefix: str) -> Contents:
    problems: list[Problem] = []
    config = _config(folder, listing, prefix, problems)
    try:
        index = read_index(folder, listing, prefix)
    except Unreadable as error:
        problems.append(Problem(f"{prefix}{INDEX}", str(error), is_fatal=True))
        return Contents("megatron", _TITLE, problems=tuple(problems))
    common = _common(folder, listing, prefix, config, problems)
    arguments = common.get("args")
    state = arguments.state if isinstance(arguments, PickledCall) else None
    values = state if isinstance(state, dict) else {}
    step = whole(common.get("iteration"))
    rng = _random(index)
    if rng is None:
        problems.append(
            Problem(".", "no random states are saved", "the random state", cure=Remedy.UNKEPT)
        )
    optimizer = _optimizer(index.tensors, common)
    if optimizer is None:
        problems.append(
            Problem(".", "it contains no optimizer", "the optimizer's state", cure=Remedy.UNKEPT)
        )
    samples = whole(values.get("consumed_train_samples"))
    if common and samples is None:
        problems.append(
            Problem(f"{prefix}{COMMON}", "it has no count of samples", _PLACE, cure=Remedy.UNKEPT)
        )
    problems += _disagreements(folder, prefix, step, optimizer)
    version = common.get("checkpoint_version")
    return Contents(
        "megatron",
        _TITLE,
        "pretrain_gpt.py --load {path}" + ("" if prefix else "/.."),
        index.tensors,
        step,
        world=whole(values.get("world_size")) or index.ranks,
        optimizer=optimizer,
        schedule=_schedule(common, problems, prefix),
        rng=rng,
        data={} if samples is None else {"samples": samples},
        versions={} if version is None else {"checkpoint": str(version)[:40]},
        facts=_facts(values),
        problems=(*problems, *index.problems),
    )


def _config(
    folder: Folder, listing: DirectoryListing, prefix: str, problems: list[Problem]
) -> dict[str, Any]:
    """Return the format description; without this file, Megatron assumes another format."""
    name = f"{prefix}{CONFIG}"
    try:
        config = read_json(folder, listing, name)
    except Unreadable as error:
        problems.append(Problem(name, str(error), is_fatal=True))
        return {}
    backend = config.get("sharded_backend")
    if backend != "torch_dist":
        problem_text = (
            f"its tensors are stored by `{str(backend)[:40]}`, which is not supported here"
        )
        problems.append(Problem(name, problem_text, is_fatal=True))
    return config


def _common(
    folder: Folder,
    listing: DirectoryListing,
    prefix: str,
    config: dict[str, Any],
    problems: list[Problem],
) -> dict[Any, Any]:
    name = f"{prefix}{COMMON}"
    if name not in listing.sizes and config and "common_backend" not in config:
        problem_text = "it is missing; newer releases store it in the index, where it is not read"
        problems.append(Problem(name, problem_text))
        return {}
    try:
        value = open_archive(folder, listing, name).value
    except Unreadable as error:
        problems.append(Problem(name, str(error), is_fatal=True))
        return {}
    if not isinstance(value, dict):
        problems.append(Problem(name, "it holds no state", is_fatal=True))
    return value if isinstance(value, dict) else {}


def _optimizer(tensors: tuple[Tensor, ...], common: dict[Any, Any]) -> Optimizer | None:
    """Return the summary of an optimizer: names ``optimizer.state.<slot>.<parameter>``."""
    split = [re.fullmatch(r".*?optimizer\.state\.([^.]+)\.(.+)", tensor.name) for tensor in tensors]
    slots = dict.fromkeys(sorted({match[1] for match in split if match}))
    params = {match[2] for match in split if match}
    if not params:
        return None
    groups = _groups(common.get("optimizer"))
    counts = [group["step"] for group in groups if group.get("step") is not None]
    steps = [whole(count) for count in counts]
    faults = [fault for count in counts if (fault := count_fault(count))]
    rates = (decimal(group.get("lr")) for group in groups)
    return Optimizer(
        next((step for step in steps if step is not None), None),
        len(params),
        len(params),
        len(groups),
        tuple(rate for rate in rates if rate is not None),
        tuple(slots),
        fault=miscounted("param_groups", faults[0]) if faults else "",
    )


def _groups(value: Any, depth: int = 0) -> list[dict[Any, Any]]:
    """Return the parameter groups, which are nested in one or two dictionaries."""
    if not isinstance(value, dict) or depth > 2:  # noqa: PLR2004 - see above
        return []
    groups = value.get("param_groups")
    if isinstance(groups, list):
        return [group for group in groups if isinstance(group, dict)]
    return [group for inner in list(value.values())[:64] for group in _groups(inner, depth + 1)]


def _schedule(common: dict[Any, Any], problems: list[Problem], prefix: str) -> Schedule | None:
    schedule = common.get("opt_param_scheduler")
    if not isinstance(schedule, dict):
        if common:
            problem_text = "it has no state of the schedule"
            problems.append(
                Problem(f"{prefix}{COMMON}", problem_text, "the schedule", cure=Remedy.UNKEPT)
            )
        return None
    return Schedule(whole(schedule.get("num_steps")))


def _random(index: Index) -> RandomStates | None:
    count = sum(part.startswith(_RANDOM) for part in index.slices)
    kinds = ("python", "numpy", "cpu", "cuda")
    return RandomStates(tuple(range(count)), kinds) if count else None


def _disagreements(
    folder: Folder, prefix: str, step: int | None, optimizer: Optimizer | None
) -> list[Problem]:
    match = _ITERATION.search(prefix or folder.url)
    steps_by_source = {
        "the folder's name": int(match[1]) if match else None,
        COMMON: step,
        "the optimizer": optimizer.step if optimizer else None,
    }
    steps = {name: value for name, value in steps_by_source.items() if value is not None}
    if len(set(steps.values())) < 2:  # noqa: PLR2004 - they agree
        return []
    problem_text = "they name different steps: " + ", ".join(
        f"{a} of {b}" for a, b in steps.items()
    )
    return [Problem(prefix or ".", problem_text, "the consistency of its files")]


def _facts(values: dict[Any, Any]) -> dict[str, Any]:
    names = {
        "tensor parallel": "tensor_model_parallel_size",
        "pipeline parallel": "pipeline_model_parallel_size",
        "of iterations": "train_iters",
    }
    facts = {name: whole(values.get(key)) for name, key in names.items()}
    return {name: value for name, value in facts.items() if value is not None}
