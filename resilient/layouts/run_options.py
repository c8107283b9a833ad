"""Detection of damaged optimizer and scheduler options in a checkpoint of Transformers.

``Optimizer.load_state_dict`` takes the options, such as the weight decay, from the checkpoint. A
damaged option therefore changes each later update. The arguments of the run and the checkpoints of
other steps show the original value. A script may also change an option on purpose from some step
on. A difference from older steps alone, or from newer steps alone, is therefore no proof of damage.
The only exceptions are flags such as ``maximize``, which no script changes during a run.

The arguments say nothing about an optimizer that the script created. The Trainer's own optimizer is
recognized by its two groups, with and without weight decay, and by the learning rate of the
arguments. An empty group trains nothing, so its options contradict nothing. They only show who made
the optimizer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from resilient.layouts.json_files import decimal
from resilient.layouts.model import ADAM_ALONE, Problem, Remedy, Unreadable
from resilient.layouts.neighbours import nearest_steps, steps_beside
from resilient.layouts.pickle_reader import PickledCall
from resilient.layouts.torch_zip import open_archive
from resilient.layouts.training_state import optimizer_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from resilient.layouts.model import Optimizer

ARGUMENTS = ("learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay")
LOSES = "the options of the optimizer"
BASES = "the initial rates of the schedule"
_FLAGS = ("maximize", "amsgrad", "nesterov", "centered", "decoupled_weight_decay")
_NUMBERS = (
    *("betas", "eps", "weight_decay", "momentum", "dampening", "alpha", "lr_decay", "rho"),
    *("lambd", "momentum_decay", "initial_lr"),
)
_CYCLED = ("betas", "momentum")
"""Options that a cyclic schedule changes at each step."""
_TRAINER_GROUPS = 2
_DEFAULT_DECAY = 0.01
"""Weight decay of torch's AdamW in groups that set no other."""
_APART = 1e-6
_DEPTH_MAX = 4
_UNKNOWN = object()


@dataclass(frozen=True, slots=True)
class OtherStep:
    """Options at another step of the run.

    Attributes:
        name: Name of its folder.
        distance: Its distance in steps; negative for an older step.
        groups: Options of each group.
        bases: Initial rates of the schedule.
    """

    name: str
    distance: int
    groups: tuple[Mapping[str, Any], ...]
    bases: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a run, according to files other than those of one checkpoint's optimizer.

    Attributes:
        planned: Arguments of the run by name, as far as they are known.
        is_plain: Whether the arguments give no options of the optimizer as text.
        beside: The steps beside the checkpoint.
        is_of_trainer: Whether the Trainer made the optimizer, and not the script.
    """

    planned: Mapping[str, Any] = field(default_factory=dict)
    is_plain: bool = False
    beside: tuple[OtherStep, ...] = ()
    is_of_trainer: bool = False


def options_of_run(
    url: str, arguments: PickledCall | None, optimizer_name: str, schedule_name: str
) -> RunOptions:
    """Return the options that the arguments and the steps beside a checkpoint show.

    Args:
        url: URL of the checkpoint.
        arguments: Arguments of the run, None if they cannot be read.
        optimizer_name: Name of the optimizer's file.
        schedule_name: Name of the schedule's file.

    Raises:
        StoreError: A file could not be read.
    """
    planned = {name: arguments.get(name) for name in ARGUMENTS} if arguments else {}
    is_plain = arguments is not None and not arguments.get("optim_args")
    beside = []
    distances = {path.name: distance for distance, path in steps_beside(url)}
    for folder, listing in nearest_steps(url):
        name = folder.url.rstrip("/").rpartition("/")[2]
        try:
            archive = open_archive(folder, listing, optimizer_name)
            optimizer = optimizer_of(archive.value, archive)
            schedule = open_archive(folder, listing, schedule_name).value
        except Unreadable:
            continue
        if optimizer is not None:
            bases = base_rates(schedule)
            beside.append(OtherStep(name, distances[name], optimizer.options, bases))
    return RunOptions(planned, is_plain, tuple(beside))


def plain_arguments(arguments: PickledCall | None) -> dict[str, Any]:
    """Return the arguments of a run that are plain values; text in place of enumeration members.

    Args:
        arguments: Arguments of the run, None if they cannot be read.
    """
    states = arguments.state if arguments and isinstance(arguments.state, tuple) else None
    fields: dict[str, Any] = {}
    for state in states or (arguments.state if arguments else None,):
        fields |= state if isinstance(state, dict) else {}
    plain = {name: _plain(value) for name, value in fields.items()}
    return {name: value for name, value in plain.items() if value is not _UNKNOWN}


def _plain(value: Any, depth: int = 0) -> Any:
    """Return a plain value, or ``_UNKNOWN``."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, PickledCall):
        is_member = len(value.args) == 1 and isinstance(value.args[0], str) and value.state is None
        return value.args[0] if is_member else _UNKNOWN
    if depth < _DEPTH_MAX and isinstance(value, list | tuple):
        items = [_plain(item, depth + 1) for item in value]
        return _UNKNOWN if any(item is _UNKNOWN for item in items) else items
    if depth < _DEPTH_MAX and isinstance(value, dict):
        entries = {key: _plain(item, depth + 1) for key, item in value.items()}
        return _UNKNOWN if any(item is _UNKNOWN for item in entries.values()) else entries
    return _UNKNOWN


def base_rates(value: Any) -> tuple[float | None, ...]:
    """Return the initial rates of a schedule's own state."""
    rates = value.get("base_lrs") if isinstance(value, dict) else None
    return tuple(decimal(rate) for rate in rates) if isinstance(rates, list) else ()


def check_options(place: str, optimizer: Optimizer | None, run: RunOptions) -> list[Problem]:
    """Return the problem of the first option that the run contradicts.

    Args:
        place: File of the optimizer.
        optimizer: Summary of the optimizer.
        run: Options of the run.
    """
    groups = optimizer.options if optimizer else ()
    empty_groups = {at for at, size in enumerate(optimizer.sizes if optimizer else ()) if not size}
    run = replace(run, is_of_trainer=_is_of_trainer(groups, empty_groups, run))
    beside = [step for step in run.beside if len(step.groups) == len(groups)]
    found = {
        (at, name): problem
        for at, group in enumerate(groups)
        if at not in empty_groups
        for name in (*_FLAGS, *_NUMBERS)
        if name in group and not (name in _CYCLED and "max_momentum" in group)
        if (problem := _contradiction(place, (at, name), groups, beside, run))
    }
    if not beside and len({name for _, name in found}) > 1:
        return []  # a script that made the optimizer chose several of its options
    return sorted(found.values(), key=lambda problem: not problem.loses)[:1]


def _contradiction(
    place: str,
    option: tuple[int, str],
    groups: Sequence[Mapping[str, Any]],
    beside: Sequence[OtherStep],
    run: RunOptions,
) -> Problem | None:
    at, name = option
    value = groups[at][name]
    others = [(step, step.groups[at].get(name)) for step in beside]
    if any(_is_same(value, other) for _, other in others):
        return None
    planned = _planned(option, groups, run)
    by_arguments = planned is not None and not _is_same(value, planned)
    values = [other for _, other in others]
    agreed = values[0] if values and all(_is_same(values[0], other) for other in values) else None
    if agreed is None and not by_arguments:
        return None
    is_proven = by_arguments and (run.is_of_trainer or _is_same(agreed, planned))
    is_between = {step.distance > 0 for step, _ in others} == {True, False}
    is_proven |= agreed is not None and len(others) > 1 and (is_between or name in _FLAGS)
    told = planned if by_arguments else agreed
    names = " and ".join(step.name for step, _ in others)
    has = "have" if others[1:] else "has"
    source = "the arguments of its run have" if by_arguments else f"{names} beside it {has}"
    problem_text = (
        f"`{name}` of its group {at} is {value}, but {source} {told}: the next step uses that of "
        "the group"
    )
    return Problem(place, problem_text, LOSES if is_proven else "", cure=Remedy.COPY)


def _planned(option: tuple[int, str], groups: Sequence[Mapping[str, Any]], run: RunOptions) -> Any:
    """Return the value that the arguments give an option of Adam; None if they give none."""
    at, name = option
    group, argument = groups[at], run.planned.get
    if not (ADAM_ALONE <= group.keys() and run.is_plain):
        return None
    betas = tuple(decimal(argument(key)) for key in ("adam_beta1", "adam_beta2"))
    epsilon, betas_or_none = decimal(argument("adam_epsilon")), None if None in betas else betas
    if run.is_of_trainer:
        decay = _decay_by_trainer(at, run)
        values = {"betas": betas_or_none, "eps": epsilon, "weight_decay": decay}
        return {**values, "maximize": False, "amsgrad": False}.get(name)
    is_alike = group.get("initial_lr") == decimal(argument("learning_rate"))
    return betas_or_none if is_alike and group.get("eps") == epsilon and name == "betas" else None


def _is_of_trainer(
    groups: Sequence[Mapping[str, Any]], empty_groups: Collection[int], run: RunOptions
) -> bool:
    """Return True for groups as the Trainer makes them."""
    rate = decimal(run.planned.get("learning_rate"))
    if len(groups) != _TRAINER_GROUPS or not all(
        ADAM_ALONE <= group.keys() and rate is not None and group.get("initial_lr") == rate
        for group in groups
    ):
        return False
    decays = [group.get("weight_decay") for group in groups]
    # The optimizer of a script has the default of its class in all groups.
    return decays != [_DEFAULT_DECAY] * _TRAINER_GROUPS and all(
        _is_same(decays[at], _decay_by_trainer(at, run)) for at in empty_groups
    )


def _decay_by_trainer(group: int, run: RunOptions) -> float | None:
    """Return the weight decay of a group; the second one has the parameters without decay."""
    return decimal(run.planned.get("weight_decay")) if group == 0 else 0.0


def _is_same(left: Any, right: Any) -> bool:
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(_is_same, left, right))
    if isinstance(left, int | float) and isinstance(right, int | float):
        return math.isclose(left, right, rel_tol=_APART)
    return bool(left == right)


def are_bases_wrong(rates: Sequence[float | None], initial: Sequence[Any], run: RunOptions) -> bool:
    """Return True if the arguments or two other steps contradict a schedule's initial rates.

    Args:
        rates: Initial rates in the schedule.
        initial: Initial rates in the optimizer.
        run: Options of the run.
    """
    if any(_is_same(tuple(rates), step.bases) for step in run.beside):
        return False
    planned = decimal(run.planned.get("learning_rate"))
    is_planned = planned is not None and all(rate == planned for rate in initial)
    bases = {step.bases for step in run.beside}
    return is_planned or (len(bases) == 1 and len(run.beside) > 1)
