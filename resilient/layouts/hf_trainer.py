"""Reader of ``checkpoint-<step>`` folders of the Trainer of Transformers.

Source: ``transformers.trainer`` 5.23 and ``accelerate.utils.fsdp_utils``.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from resilient.layouts.accelerate import OPTIMIZERS, optimizer_half, read_model_half
from resilient.layouts.best_checkpoint import best_folder, folder_name, is_beside
from resilient.layouts.consistency import (
    behind,
    check_base_rates,
    check_learning_rates,
    check_model_config,
    check_scheduler,
    check_trainer_state,
    check_update_count,
    wrapped,
)
from resilient.layouts.deepspeed import SKIPPED, tag_of
from resilient.layouts.field_types import state_fault
from resilient.layouts.json_files import decimal, read_json, whole
from resilient.layouts.model import Contents, Problem, Remedy, Unreadable
from resilient.layouts.pickle_reader import PickledCall
from resilient.layouts.run_options import (
    BASES,
    are_bases_wrong,
    base_rates,
    check_options,
    options_of_run,
)
from resilient.layouts.torch_zip import open_archive
from resilient.layouts.training_state import ahead, read_random, required, schedule_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from resilient.layouts.accelerate import StateHalf
    from resilient.layouts.model import Optimizer, Schedule
    from resilient.layouts.run_options import RunOptions
    from resilient.storage.folder import DirectoryListing, Folder

STATE = "trainer_state.json"
RESUME = "trainer.train(resume_from_checkpoint='{path}')"
_REBUILD = "resilient ckpt repair {path}"
_SCHEDULE = "scheduler.pt"
_CONFIG = "config.json"
_SCALER = "scaler.pt"
_ARGUMENTS = "training_args.bin"
_NO_LENGTH = (1 << 63) - 1
"""Number of epochs of a run with data without a length: ``sys.maxsize``."""
_ALONE = "rng_state.pth"
_RANDOM = r"rng_state(?:_(\d{1,7}))?\.pth"
_VERSION = "5.23"
KEYS = {
    *("best_global_step", "best_metric", "best_model_checkpoint", "epoch", "eval_steps"),
    *("global_step", "is_hyper_param_search", "is_local_process_zero", "is_world_process_zero"),
    *("log_history", "logging_steps", "max_steps", "num_input_tokens_seen", "num_train_epochs"),
    *("save_steps", "stateful_callbacks", "total_flos", "train_batch_size", "trial_name"),
    "trial_params",
}
"""Keys that the loader of Transformers accepts; it raises for any other key."""
CONTROL = "TrainerControl"
"""Callback whose state each save of Transformers requires."""
NUMBERS = {"total_flos": 0.0, "train_batch_size": None}
"""Numbers that Transformers computes with, with their defaults; None for a number without one."""
# Transformers loads the schedule and the optimizer together, or neither.
_BOTH = "the optimizer's state and the schedule"


def is_trainer(listing: DirectoryListing) -> bool:
    """Return True if this Trainer wrote a folder, even if the state file is missing."""
    names = listing.sizes
    companion_files = {"training_args.bin", _SCHEDULE, *OPTIMIZERS} & set(names)
    return STATE in names or (
        bool(companion_files) and any(re.fullmatch(_RANDOM, name) for name in names)
    )


def read_trainer(folder: Folder, listing: DirectoryListing) -> Contents:
    """Return the contents of a checkpoint of this Trainer.

    Raises:
        StoreError: A file could not be read.
    """
    state, problems = _state(folder, listing)
    tag = tag_of(folder, listing)
    model = read_model_half(folder, listing, tag)
    optimizer = optimizer_half(folder, listing, model, _BOTH)
    arguments = read_arguments(folder, listing)
    run = options_of_run(folder.url, arguments, OPTIMIZERS[0], _SCHEDULE)
    schedule, schedule_problems = _schedule(folder, listing, model, optimizer, run)
    device = optimizer.device
    leftover, ranks = _leftovers_of_other_runs(listing, _ranks(model, arguments))
    rng, random_problems = read_random(
        folder, _without(listing, leftover), _RANDOM, world=ranks, stops=True, device=device
    )
    step = whole(state.get("global_step"))
    world = ranks or (max(rng.ranks) + 1 if rng else None)
    versions = _versions(folder, listing, model)
    name_step = _named_step(folder)
    skipped = _skipped(listing, model, optimizer, name_step if step is None else step, schedule)
    numbers = (step, schedule.step + skipped if schedule and schedule.step is not None else None)
    problems += [
        *model.problems,
        *optimizer.problems,
        *wrapped(model.tensors),
        *check_options(OPTIMIZERS[0], optimizer.optimizer if optimizer.is_in_one else None, run),
        *schedule_problems,
        *random_problems,
        *(Problem(name, text, cure=Remedy.NEEDLESS) for name, text in leftover.items()),
        *_rank_count_doubt(listing, ranks),
        *_config(folder, listing, model),
        *check_learning_rates(None if model.engine else optimizer.optimizer, schedule),
        *_behind(listing, model, optimizer, step, versions),
        *_disagreements(folder, *numbers, optimizer.optimizer),
        *_data_position_problem(arguments, state),
    ]
    return Contents(
        "hf-trainer",
        f"Trainer of Transformers{model.kind}",
        RESUME,
        (*model.tensors, *optimizer.tensors),
        step,
        decimal(state.get("epoch")),
        world,
        optimizer.optimizer,
        schedule,
        rng,
        _data(state),
        versions,
        _facts(state),
        tuple(problems),
        _not_imported(listing, tag),
    )


def read_arguments(folder: Folder, listing: DirectoryListing) -> PickledCall | None:
    """Return the arguments of the run as data; None if they cannot be read.

    Raises:
        StoreError: The file could not be read.
    """
    try:
        arguments = open_archive(folder, listing, _ARGUMENTS).value
    except Unreadable:
        return None
    return arguments if isinstance(arguments, PickledCall) else None


def _ranks(model: StateHalf, arguments: PickledCall | None) -> int | None:
    """Return the number of ranks of the run; None if it is unknown."""
    return model.engine.world if model.engine else _processes(arguments) or model.world


def _processes(arguments: PickledCall | None) -> int | None:
    """Return the number of training processes from the arguments of the run."""
    distributed = arguments.get("distributed_state") if arguments else None
    return whole(distributed.get("num_processes")) if isinstance(distributed, PickledCall) else None


def _leftovers_of_other_runs(
    listing: DirectoryListing, world: int | None
) -> tuple[dict[str, str], int | None]:
    """Return the random states of other runs, with reasons, and the number of ranks.

    A run of one process writes one file without a number. A larger run writes one numbered file per
    rank.

    Args:
        listing: Files of the checkpoint.
        world: Number of ranks according to other files; None if unknown.
    """
    numbered = _numbered(listing)
    is_alone = _ALONE in listing.sizes
    is_full = set(numbered) == set(range(len(numbered)))
    if world is None and is_alone and not is_full:
        world = 1
    if world is None or (world == 1 and not is_alone):
        return {}, world
    last = 0 if world == 1 else world
    names = [numbered[rank] for rank in sorted(numbered) if rank >= last]
    if world > 1 and is_alone and 0 in numbered:
        names.append(_ALONE)
    problem_text = (
        f"it belongs to a rank that the run of {world} did not have: a leftover of another run"
    )
    return dict.fromkeys(names, problem_text), world


def _without(listing: DirectoryListing, names: Collection[str]) -> DirectoryListing:
    sizes = {name: size for name, size in listing.sizes.items() if name not in names}
    return replace(listing, sizes=sizes)


def _numbered(listing: DirectoryListing) -> dict[int, str]:
    """Return the random states with a rank number in the name, by rank."""
    matches = ((re.fullmatch(_RANDOM, file), file) for file in listing.sizes)
    return {int(match[1]): file for match, file in matches if match and match[1]}


def _rank_count_doubt(listing: DirectoryListing, world: int | None) -> list[Problem]:
    """Return the problem of an unknown number of ranks: two runs have complete random states."""
    numbered = _numbered(listing)
    if world or not numbered or _ALONE not in listing.sizes:
        return []
    problem_text = (
        f"`{_ALONE}` is of a run of one process, `{numbered[max(numbered)]}` of one of "
        f"{max(numbered) + 1}, and which run this was is unknown: remove the files of the other "
        "run"
    )
    return [Problem(".", problem_text, is_fatal=True, cure=Remedy.COPY)]


def _not_imported(listing: DirectoryListing, tag: str) -> tuple[str, ...]:
    """Return reasons why our Trainer does not import a checkpoint that Transformers resumes."""
    names = [file for file in listing.sizes if tag and file.startswith(tag)]
    problems = []
    if any("mp_rank_01" in name or "expert" in name for name in names):
        problems.append("DeepSpeed cut its layers over ranks")
    if names and _SCHEDULE not in listing.sizes:
        problems.append("its schedule belongs to DeepSpeed")
    return tuple(problems)


def _state(folder: Folder, listing: DirectoryListing) -> tuple[dict[str, Any], list[Problem]]:
    try:
        state = read_json(folder, listing, STATE)
    except Unreadable as error:
        return {}, [Problem(STATE, str(error), is_fatal=True, help=_REBUILD)]
    if refusal := _refusal(state):
        return state, [Problem(STATE, refusal, is_fatal=True, help=_REBUILD)]
    return state, [
        *_best_checkpoint_problem(folder, state),
        *_batch_size(state),
        *check_trainer_state(STATE, state),
    ]


def _refusal(state: dict[str, Any]) -> str:
    """Return the reason why Transformers rejects a state; empty if it accepts the state."""
    if whole(state.get("global_step")) is None:
        return "it has no `global_step`"
    for name, default in NUMBERS.items():
        if name not in state and default is None:
            return f"it has no `{name}`, which Transformers computes with"
        if decimal(state.get(name, default)) is None:
            return f"its `{name}` is not a number, but Transformers computes with it"
    if unknown_keys := sorted(set(state) - KEYS):
        return f"it has `{unknown_keys[0][:80]}`, which Transformers {_VERSION} rejects"
    return state_fault(state) or _missing_control_problem(state)


def _missing_control_problem(state: dict[str, Any]) -> str:
    """Return the reason why the next save of Transformers raises; empty if it does not raise.

    A save looks up the control by name: ``self.state.stateful_callbacks["TrainerControl"]``.
    """
    callbacks = state.get("stateful_callbacks")
    if isinstance(callbacks, dict) and CONTROL in callbacks:
        return ""
    return f"its `stateful_callbacks` has no `{CONTROL}`, and the next save of Transformers raises"


def _batch_size(state: dict[str, Any]) -> list[Problem]:
    """Return the problem of a number that is no batch size; ``_refusal`` refuses other values."""
    size = state["train_batch_size"]
    if whole(size):
        return []
    problem_text = f"its `train_batch_size` is {size}, which is no size of a batch"
    return [Problem(STATE, problem_text, "the batch size that `auto_find_batch_size` had found")]


def _best_checkpoint_problem(folder: Folder, state: dict[str, Any]) -> list[Problem]:
    """Return the problem of a best checkpoint that is missing, or belongs to another step."""
    best, base = state.get("best_model_checkpoint"), best_folder(folder.url, state)
    if not isinstance(best, str):
        return []
    if folder_name(best) != base:
        step = state.get("best_global_step")
        problem_text = f"its best checkpoint `{best[:80]}` is not that of its best step, {step}"
    elif base != f"checkpoint-{state.get('global_step')}" and not is_beside(folder.url, best, base):
        problem_text = f"its best checkpoint `{best[:80]}` exists neither there nor beside this one"
    else:
        return []
    return [Problem(STATE, problem_text, "the best checkpoint")]


def _schedule(
    folder: Folder,
    listing: DirectoryListing,
    model: StateHalf,
    optimizer: StateHalf,
    run: RunOptions,
) -> tuple[Schedule | None, list[Problem]]:
    if model.engine is not None and _SCHEDULE not in listing.sizes:
        return model.engine.schedule, []
    try:
        archive = open_archive(folder, listing, _SCHEDULE)
        schedule = required(schedule_of(archive.value, archive), "a schedule")
    except Unreadable as error:
        is_fatal = listing.is_there(_SCHEDULE)
        return None, [Problem(_SCHEDULE, str(error), _BOTH, is_fatal=is_fatal)]
    # Engines and checkpoints that are sharded by name count groups differently.
    saved_optimizer = optimizer.optimizer if optimizer.is_in_one else None
    count_problems = check_update_count(_SCHEDULE, archive.value, saved_optimizer, OPTIMIZERS[0])
    return schedule, [
        *check_scheduler(_SCHEDULE, archive.value),
        *count_problems,
        *_base_rates(archive.value, saved_optimizer, run),
    ]


def _base_rates(value: Any, optimizer: Optimizer | None, run: RunOptions) -> list[Problem]:
    """Return the problem of the schedule's initial rates, with the loss that the run shows."""
    rate = decimal(run.planned.get("learning_rate"))
    problems = check_base_rates(_SCHEDULE, value, optimizer, rate)
    initial = [group.get("initial_lr") for group in (optimizer.options if optimizer else ())]
    if not are_bases_wrong(base_rates(value), initial, run):
        return problems
    return [problem if problem.is_fatal else replace(problem, loses=BASES) for problem in problems]


def _behind(
    listing: DirectoryListing,
    model: StateHalf,
    optimizer: StateHalf,
    step: int | None,
    versions: Mapping[str, str],
) -> list[Problem]:
    # Versions before 5 save no scaler. A DeepSpeed engine has its own scaler.
    is_old = versions.get("transformers", "").startswith("4.")
    may_skip = is_old or _SCALER in listing.sizes or model.engine is not None
    return behind(optimizer.optimizer, step, may_skip=may_skip)


def _skipped(
    listing: DirectoryListing,
    model: StateHalf,
    optimizer: StateHalf,
    step: int | None,
    schedule: Schedule | None,
) -> int:
    """Return the number of updates that a scaler of fp16 skipped.

    The scheduler and the optimizer lag by this number, because a skipped update changes neither.
    """
    if schedule is None or schedule.step is None or step is None:
        return 0
    behind_by = step - schedule.step
    if model.engine is not None:
        skipped_steps = whole(model.engine.facts.get(SKIPPED))
        return behind_by if skipped_steps and behind_by == skipped_steps else 0
    updates = optimizer.optimizer.step if optimizer.optimizer else None
    is_alike = updates in (schedule.step, None)
    return behind_by if _SCALER in listing.sizes and behind_by > 0 and is_alike else 0


def _named_step(folder: Folder) -> int | None:
    """Return the step in the folder's name."""
    match = re.search(r"checkpoint-(\d{1,12})/?$", folder.url)
    return int(match[1]) if match else None


def _disagreements(
    folder: Folder, step: int | None, schedule: int | None, optimizer: Optimizer | None
) -> list[Problem]:
    """Return the problem of files of different steps; skipped updates are already subtracted."""
    steps_by_source = {
        "the folder's name": _named_step(folder),
        STATE: step,
        "the schedule": schedule,
    }
    steps = {name: value for name, value in steps_by_source.items() if value is not None}
    problems = []
    if len(set(steps.values())) > 1:
        problem_text = "they name different steps: " + ", ".join(
            f"{a} of {b}" for a, b in steps.items()
        )
        problems.append(Problem(".", problem_text, "the consistency of its files", is_fatal=False))
    return [*problems, *ahead(".", optimizer, step)]


def _data(state: dict[str, Any]) -> dict[str, Any]:
    """Return the data position, which the Trainer computes from the step."""
    batch = whole(state.get("train_batch_size"))
    tokens = whole(state.get("num_input_tokens_seen"))
    epoch, step = decimal(state.get("epoch")), whole(state.get("global_step"))
    fields = {"epoch": epoch, "step": step, "batch_size_per_rank": batch, "tokens": tokens or None}
    return {name: value for name, value in fields.items() if value is not None}


def _data_position_problem(arguments: PickledCall | None, state: dict[str, Any]) -> list[Problem]:
    """Return the problem that the loader cannot restore the data position.

    A stream has no length, so the Trainer skips its batches as in a first pass.
    """
    epoch = decimal(state.get("epoch"))
    problems = []
    if state.get("num_train_epochs") == _NO_LENGTH and epoch is not None and epoch >= 1:
        problems.append(
            f"its data have no length, and it is in pass {int(epoch) + 1} over them: Transformers "
            "can restore the position only in the first pass"
        )
    if arguments is not None and arguments.get("ignore_data_skip") is True:
        problems.append("its run has `ignore_data_skip`: a resume starts the data again")
    return [
        Problem(".", reason, "the place in the data", cure=Remedy.UNKEPT) for reason in problems[:1]
    ]


def _versions(folder: Folder, listing: DirectoryListing, model: StateHalf) -> dict[str, str]:
    versions = dict(model.engine.versions) if model.engine else {}
    try:
        version = read_json(folder, listing, _CONFIG).get("transformers_version")
    except Unreadable:
        version = None
    return {**({"transformers": version[:40]} if isinstance(version, str) else {}), **versions}


def _config(folder: Folder, listing: DirectoryListing, model: StateHalf) -> list[Problem]:
    """Return the problems of the configuration; the file may be missing."""
    if _CONFIG not in listing.sizes:
        return []
    try:
        return check_model_config(_CONFIG, read_json(folder, listing, _CONFIG), model.tensors)
    except Unreadable as error:
        problem_text = f"{error}; Transformers reads it as it resumes"
        return [Problem(_CONFIG, problem_text, is_fatal=True, help=_REBUILD)]


def _facts(state: dict[str, Any]) -> dict[str, Any]:
    history = state.get("log_history")
    best = state.get("best_model_checkpoint")
    facts = {
        "of steps": whole(state.get("max_steps")),
        "of epochs": decimal(state.get("num_train_epochs")),
        "entries of its log": len(history) if isinstance(history, list) else None,
        "best metric": decimal(state.get("best_metric")),
        "best checkpoint": best[:300] if isinstance(best, str) else None,
    }
    return {name: value for name, value in facts.items() if value is not None}
