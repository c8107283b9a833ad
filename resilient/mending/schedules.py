"""A schedule that is lost, from the optimizer's groups, the step, and what kind it was.

The optimizer keeps the rate of each group and the one it began with, so two of a schedule's
numbers are there to the bit; the step is the third. Its kind comes from another step of the run,
or from the arguments. What counts more than steps (a plateau's patience) is not made up.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from resilient.layouts.archives import Archive, open_archive
from resilient.layouts.documents import whole
from resilient.layouts.pickled import Made
from resilient.layouts.values import Unreadable
from resilient.mending.pickling import torch_file

if TYPE_CHECKING:
    from resilient.mending.case import Case
    from resilient.storage.folder import Folder, Listing

_OF_TRAINER, _OF_ACCELERATE = "scheduler.pt", re.compile(r"scheduler(_\d{1,4})?\.bin")
ARGUMENTS, _SCALER = "training_args.bin", "scaler.pt"
_STEADY = {
    *(
        "base_lrs",
        "lr_lambdas",
        "_is_initial",
        "_get_lr_called_within_step",
        "verbose",
        "step_size",
    ),
    *("gamma", "T_max", "eta_min", "total_iters", "factor", "start_factor", "end_factor", "power"),
    *("total_steps", "milestones"),
}
"""What of a schedule's state is the same at each step."""
_COUNTED = {"last_epoch", "_step_count", "_last_lr"}
_LAMBDAS = {
    *("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "inverse_sqrt"),
    *("constant_with_warmup", "cosine_with_min_lr", "cosine_warmup_with_min_lr"),
    "warmup_stable_decay",
}
"""The kinds of Transformers whose state is that of torch's `LambdaLR`."""
_NO_KIND = (
    "nothing says which kind it was: neither another step of the run, beside this one or named "
    f"with `--from`, nor {ARGUMENTS}"
)


def mend_schedules(case: Case) -> None:
    """Write schedules anew that are lost, or of another step."""
    if case.contents.layout == "hf-trainer":
        _mend(case, _OF_TRAINER, "optimizer.pt")
    if case.contents.layout == "accelerate":
        places = {one.place for one in case.problems} | set(case.listing.sizes)
        for name in sorted(one for one in places if _OF_ACCELERATE.fullmatch(one)):
            _mend(case, name, name.replace("scheduler", "optimizer"))


def _mend(case: Case, name: str, optimizer: str) -> None:
    step = step_of(case, without="schedule")
    if not case.is_broken(name) and not _is_odd(case, step):
        return
    try:
        groups = _groups(case.draft, case.listing, optimizer)
    except Unreadable as error:
        case.refused[name] = f"its rates would be in {optimizer}: {error}"
        return
    if step is None:
        case.refused[name] = "nothing says of which step it was"
        return
    try:
        value, source = _value(case, name, groups, step)
        root = name.rpartition(".")[0]
        case.draft.put(name, torch_file(value, root))
    except Unreadable as error:
        case.refused[name] = str(error)
        return
    case.done(
        name, f"written anew, at step {value['last_epoch']}", f"the rates in {optimizer}, {source}"
    )


def step_of(case: Case, *, without: str = "") -> int | None:
    """Return the step that most of a checkpoint's files say, None without a majority.

    Args:
        case: the checkpoint.
        without: ``schedule`` or ``state``, when that is what is in doubt.
    """
    found = case.contents
    name = re.search(r"checkpoint-(\d{1,12})/?$", case.draft.url)
    named = int(name[1]) if name and found.layout == "hf-trainer" else None
    said = {
        "name": named,
        "state": found.step,
        "schedule": found.schedule.step if found.schedule else None,
        "optimizer": found.optimizer.step if found.optimizer else None,
    }
    updates = said["optimizer"]
    if _SCALER in case.listing.sizes and named and updates and updates < named:
        # A scaler of fp16 skipped updates: the optimizer and its schedule count fewer than steps.
        said = {key: one for key, one in said.items() if one != updates}
    votes = Counter(one for key, one in said.items() if one is not None and key != without)
    ranked = votes.most_common(2)
    if not ranked or (len(ranked) > 1 and ranked[0][1] == ranked[1][1]):
        return None
    return ranked[0][0]


def _is_odd(case: Case, step: int | None) -> bool:
    """Say whether the schedule alone is of another step than the rest."""
    schedule, optimizer = case.contents.schedule, case.contents.optimizer
    if schedule is None or not any(one.place == "." for one in case.problems):
        return False
    if case.contents.layout == "hf-trainer":
        return step is not None and schedule.step not in (step, None)
    if not optimizer or not optimizer.rates or optimizer.rates == schedule.rates:
        return False
    # accelerate steps a schedule once for each rank; where it counts right, either may be wrong.
    return not optimizer.step or schedule.step is None or schedule.step % optimizer.step != 0


def _groups(folder: Folder, listing: Listing, name: str) -> list[tuple[float, float]]:
    """Return the rate that each group began with, and that of now."""
    archive = open_archive(folder, listing, name)
    groups = archive.value.get("param_groups") if isinstance(archive.value, dict) else None
    found = []
    for one in groups if isinstance(groups, list) else ():
        first, now = (_rate(archive, one, key) for key in ("initial_lr", "lr"))
        if first is None or now is None:
            raise Unreadable("its groups had no schedule")
        found.append((first, now))
    if not found:
        raise Unreadable("it has no groups")
    return found


def _rate(archive: Archive, group: Any, key: str) -> float | None:
    return archive.number(group.get(key)) if isinstance(group, dict) else None


def _value(
    case: Case, name: str, groups: list[tuple[float, float]], step: int
) -> tuple[dict[str, Any], str]:
    rates = [now for _, now in groups]
    for other in case.near:
        try:
            theirs = open_archive(other.folder, other.listing, name).value
        except Unreadable:
            continue
        return _from_another(case, theirs, other.contents, step, rates), other.url
    kind = arguments_of(case.draft, case.listing).get("lr_scheduler_type")
    if kind not in _LAMBDAS:
        raise Unreadable(f"a schedule of the kind `{str(kind)[:40]}`" if kind else _NO_KIND)
    bases: list[Any] = [first for first, _ in groups]
    value = {
        "base_lrs": bases,
        "last_epoch": step,
        "_step_count": step + 1,
        "_is_initial": False,
        "_get_lr_called_within_step": False,
        "_last_lr": rates,
        "lr_lambdas": [None for _ in groups],
    }
    return value, ARGUMENTS


def _from_another(
    case: Case, theirs: Any, contents: Any, step: int, rates: list[float]
) -> dict[str, Any]:
    """Return a schedule at another step than that it is made from."""
    last = whole(theirs.get("last_epoch")) if isinstance(theirs, dict) else None
    strange = sorted(str(one)[:40] for one in set(theirs or ()) - _STEADY - _COUNTED)
    if last is None or strange:
        raise Unreadable(f"its kind counts more than steps: {', '.join(strange) or 'no step'}")
    updates = contents.optimizer.step if contents.optimizer else None
    # accelerate steps a schedule once for each rank.
    each = last // updates if case.contents.layout == "accelerate" and updates else 1
    if case.contents.layout == "accelerate" and (not updates or each * updates != last):
        raise Unreadable("another step does not say how often it moves")
    count = whole(theirs.get("_step_count"))
    more = {"_step_count": each * step + count - last} if count is not None else {}
    return {**theirs, **more, "last_epoch": each * step, "_last_lr": rates}


def arguments_of(folder: Folder, listing: Listing) -> dict[str, Any]:
    """Return the plain values of the arguments of Transformers' Trainer; empty without.

    Raises:
        StoreError: they could not be read.
    """
    try:
        value = open_archive(folder, listing, ARGUMENTS).value
    except Unreadable:
        return {}
    state = value.state if isinstance(value, Made) else None
    found = {}
    for key, one in state.items() if isinstance(state, dict) else ():
        # A member of an enumeration is a call with its value.
        plain = (
            one.args[0]
            if isinstance(one, Made) and isinstance(one.args, tuple) and one.args
            else one
        )
        if isinstance(key, str) and isinstance(plain, str | int | float | None):
            found[key] = plain
    return found
