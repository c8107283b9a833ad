"""Reader of Lightning's checkpoints: one file, or a sharded folder with an unsharded file.

Source: ``lightning.pytorch.trainer.connectors.checkpoint_connector`` and
``lightning.pytorch.strategies.fsdp`` 2.6. Lightning saves no random states in either form.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from resilient.layouts.consistency import check_base_rates, check_optimizer, check_update_count
from resilient.layouts.dcp import INDEX, optimizer_at, read_index
from resilient.layouts.field_types import schedule_fault
from resilient.layouts.json_files import decimal, whole
from resilient.layouts.model import MODEL, OPTIMIZER, Contents, Problem, Remedy, Unreadable
from resilient.layouts.torch_zip import open_archive, tensors_in
from resilient.layouts.training_state import (
    ahead,
    begins_anew,
    is_own_schedule,
    optimizer_of,
    schedule_of,
)

if TYPE_CHECKING:
    from resilient.layouts.model import Optimizer, Tensor
    from resilient.layouts.torch_zip import Archive
    from resilient.storage.folder import DirectoryListing, Folder

REST = "meta.pt"
"""File with the unsharded state of a sharded checkpoint."""
_VERSION = "pytorch-lightning_version"
_TITLE = "Trainer of Lightning"
_RESUME = "trainer.fit(model, ckpt_path='{path}')"
_FROM = "Model.load_from_checkpoint('{path}')"
_LOOPS = {
    "epoch_progress": "the epoch",
    "epoch_loop.batch_progress": "the batch in the epoch",
    "epoch_loop.automatic_optimization.optim_progress": "the step",
}
_PLACE = "the place in the data"


def is_run(value: Any) -> bool:
    """Return True if Lightning's Trainer wrote a torch file."""
    return isinstance(value, dict) and _VERSION in value


def is_sharded(listing: DirectoryListing) -> bool:
    """Return True if a folder is a sharded checkpoint of Lightning."""
    has_slices = INDEX in listing.sizes or any(file.endswith(".distcp") for file in listing.sizes)
    return REST in listing.sizes and has_slices


def read_run(archive: Archive) -> Contents:
    """Return the contents of a file of Lightning.

    Raises:
        Unreadable: The value exceeds the bounds.
        StoreError: The file could not be read.
    """
    value = archive.value
    weights = tensors_in(archive, value.get("state_dict"), MODEL)
    states = _list(value.get("optimizer_states"))
    optimizers = [
        optimizer
        for optimizer_state in states
        if (optimizer := optimizer_of(optimizer_state, archive)) is not None
    ]
    tensors = list(weights)
    for number, state in enumerate(states):
        # If there are several optimizers, each name gets the optimizer's number as a prefix.
        optimizer_states = state if len(states) == 1 else {number: state}
        tensors += tensors_in(archive, optimizer_states, OPTIMIZER)
    progress = _progress(archive, optimizers[0] if optimizers else None, tuple(tensors))
    problems = [] if weights else [_fatal(archive.name, "it has no weights")]
    if "optimizer_states" not in value:
        problem_text = "it holds weights but no optimizer's state, as with `save_weights_only=True`"
        problems.append(_fatal(archive.name, problem_text))
    elif len(optimizers) != len(states):
        problems.append(_fatal(archive.name, "an optimizer's state in it is invalid"))
    is_begun = bool(whole(value.get("global_step")))
    if value.get("optimizer_states") == [] and is_begun:
        # The loader pairs optimizers with states. An optimizer without a state silently restarts.
        problem_text = "its `optimizer_states` is empty, but it has made steps"
        problems.append(
            Problem(archive.name, problem_text, "the optimizer's state", cure=Remedy.COPY)
        )
    for optimizer_state in states:
        if optimizer_of(optimizer_state, archive) is not None:
            problems += check_optimizer(archive.name, optimizer_state, archive, is_begun=is_begun)
    problems += [
        _fatal(archive.name, optimizer.fault) for optimizer in optimizers[1:] if optimizer.fault
    ]
    schedules = _list(value.get("lr_schedulers"))
    problems += [
        _fatal(archive.name, f"a schedule in it: {fault}")
        for schedule in schedules[1:]
        if (fault := schedule_fault(schedule))
    ]
    if len(optimizers) == len(schedules) == 1:
        problems += check_update_count(archive.name, schedules[0], optimizers[0])
        problems += check_base_rates(archive.name, schedules[0], optimizers[0])
    return replace(progress, problems=(*problems, *progress.problems))


def read_sharded(folder: Folder, listing: DirectoryListing) -> Contents:
    """Return the contents of a folder of Lightning with sharded state.

    Raises:
        StoreError: A file could not be read.
    """
    try:
        index = read_index(folder, listing)
        archive = open_archive(folder, listing, REST)
    except Unreadable as error:
        at = REST if REST not in listing.sizes or INDEX in listing.sizes else INDEX
        return Contents("lightning", _TITLE, problems=(_fatal(at, str(error)),))
    optimizer = optimizer_at(folder, listing, index, "optimizer_0.")
    if not is_run(archive.value):
        problem = _fatal(REST, "it is not the file that Lightning writes there")
        return Contents("lightning", _TITLE, tensors=index.tensors, problems=(problem,))
    progress = _progress(archive, optimizer, index.tensors)
    optimizer_problems = () if optimizer else (_fatal(".", "it contains no optimizer"),)
    return replace(
        progress,
        title=f"{_TITLE}, FSDP with sharded state",
        world=index.ranks,
        problems=(*index.problems, *optimizer_problems, *progress.problems),
    )


def _progress(
    archive: Archive, optimizer: Optimizer | None, tensors: tuple[Tensor, ...]
) -> Contents:
    """Return the contents except weights and optimizers, which may be in other files."""
    value = archive.value
    schedules = _list(value.get("lr_schedulers"))
    schedule = next(
        (item for item in (schedule_of(state, archive) for state in schedules) if item), None
    )
    version = value.get(_VERSION)
    step, epoch = whole(value.get("global_step")), decimal(value.get("epoch"))
    return Contents(
        "lightning",
        _TITLE,
        _RESUME,
        tensors,
        step,
        epoch,
        optimizer=optimizer,
        schedule=schedule,
        data=_data(value),
        versions={"lightning": version[:40]} if isinstance(version, str) else {},
        facts=_facts(value),
        problems=(
            *_schedule_lost(archive, schedules),
            *_loop_problems(archive, step),
            *ahead(archive.name, optimizer, step),
            Problem(
                archive.name,
                "Lightning keeps no random states",
                "the random state",
                cure=Remedy.UNKEPT,
            ),
        ),
    )


def _schedule_lost(archive: Archive, schedules: list[Any]) -> list[Problem]:
    if "lr_schedulers" not in archive.value:
        return [_fatal(archive.name, "it has no `lr_schedulers`, which its loader needs")]
    for schedule in schedules:
        # Lightning passes each state unchanged to its scheduler, which may have any class.
        is_known = schedule_of(schedule, archive) is not None or begins_anew(schedule)
        if not is_known and not is_own_schedule(schedule):
            return [_fatal(archive.name, "the state of a schedule in it is invalid")]
    states = _list(archive.value.get("optimizer_states"))
    groups = [group for state in states for group in _list(_at(state, "param_groups"))]
    has_schedule = any(_at(group, "initial_lr") is not None for group in groups)
    if any(begins_anew(schedule) or (not schedule and has_schedule) for schedule in schedules):
        # torch loads only the existing values, and keeps all other values of step 0.
        problem_text = "the state of a schedule in it has no `last_epoch`"
        return [Problem(archive.name, problem_text, "the schedule", cure=Remedy.COPY)]
    if not schedules and has_schedule:
        # The loader pairs schedulers with states. A scheduler without a state silently restarts.
        problem_text = "the optimizer had a schedule, but the file has none"
        return [Problem(archive.name, problem_text, "the schedule", cure=Remedy.COPY)]
    return []


def _loop_problems(archive: Archive, step: int | None) -> list[Problem]:
    """Return problems of the data position and of the step in the loops' state."""
    value = archive.value
    loop = _at(value.get("loops"), "fit_loop")
    if not isinstance(loop, dict):
        return [
            Problem(
                archive.name,
                "it has no progress of its loops",
                f"{_PLACE} and the step",
                cure=Remedy.COPY,
            )
        ]
    # The loader silently uses zero for missing values.
    problems = [
        Problem(archive.name, f"its loops have no `{name}`", loses, cure=Remedy.COPY)
        for name, loses in _LOOPS.items()
        if not isinstance(_at(loop, name), dict)
    ]
    progress = _at(loop, "epoch_loop.automatic_optimization.optim_progress")
    step_count = whole(_down(progress, "optimizer", "step", "total", "completed"))
    manual = whole(
        _down(loop, "epoch_loop.manual_optimization.optim_step_progress", "total", "completed")
    )
    counted_steps = (step_count or 0) + (manual or 0)
    if step_count is not None and step is not None and counted_steps != step:
        problem_text = f"its loops made {counted_steps} steps, but it states {step}"
        problems.append(
            Problem(archive.name, problem_text, "the agreement of its parts", cure=Remedy.COPY)
        )
    batches = _at(loop, "epoch_loop.batch_progress")
    is_within = not _at(batches, "is_last_batch") and whole(_down(batches, "current", "completed"))
    loader_state = _down(loop, "state_dict", "combined_loader")
    if is_within and not loader_state:
        problem_text = "it was saved within an epoch, and its loader stores no position"
        problems.append(Problem(archive.name, problem_text, _PLACE, cure=Remedy.UNKEPT))
    return problems


def _data(value: dict[Any, Any]) -> dict[str, Any]:
    batches = _down(value.get("loops"), "fit_loop", "epoch_loop.batch_progress")
    fields = {
        "epoch": whole(value.get("epoch")),
        "batch in it": whole(_down(batches, "current", "completed")),
        "batches in all": whole(_down(batches, "total", "completed")),
    }
    return {name: fact for name, fact in fields.items() if fact is not None}


def _facts(value: dict[Any, Any]) -> dict[str, Any]:
    callbacks = value.get("callbacks")
    by_callback = callbacks if isinstance(callbacks, dict) else {}
    names = [name.partition("{")[0][:60] for name in by_callback if isinstance(name, str)]
    best = next(
        (
            _at(callback, "best_model_path")
            for callback in by_callback.values()
            if _at(callback, "dirpath")
        ),
        None,
    )
    hyper_parameters = value.get("hyper_parameters")
    facts = {
        "callbacks": ", ".join(names[:8]),
        "best checkpoint": best[:300] if isinstance(best, str) else None,
        "hyperparameters": len(hyper_parameters) if isinstance(hyper_parameters, dict) else None,
    }
    return {name: fact for name, fact in facts.items() if fact}


def _fatal(place: str, problem_text: str) -> Problem:
    return Problem(place, problem_text, is_fatal=True, help=_FROM)


def _down(value: Any, *names: str) -> Any:
    for name in names:
        value = _at(value, name)
    return value


def _at(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
