"""What is left out, because its tool stops at it broken and goes on without it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from resilient.layouts.randoms import OF_DEVICES, OLDER

if TYPE_CHECKING:
    from resilient.mending.case import Case

_RANDOM = re.compile(r"(?:rng_state(?:_\d{1,7})?\.pth|random_states_\d{1,7}\.pkl)")
_OPTIMIZER, _SCHEDULE = "optimizer.pt", "scheduler.pt"
_DRAWN = (
    "dropout and augmentation draw other numbers than they would have: a stream of this tool is "
    "where its draws left it, which no seed and no step give back"
)
_BEGINS = "begins anew: Transformers takes both together, or neither"
_UNREAD = {
    "config.json": (
        "the model's configuration",
        "a resume does not need it; `from_pretrained` of this folder does",
    ),
    "training_args.bin": ("the run's arguments", "a resume takes those of its own script"),
}
_LOST = (
    "{}, and they are lost: they were where their draws left them, which no seed, no step and no "
    "other rank give back. Those of Python, NumPy, torch and each GPU are made anew as the script "
    "seeds them, so dropout, augmentation and samplers draw other numbers than they would have"
)
_OF_DEVICES = (
    "the state of a GPU's generator is where its draws left it; no seed, no step and no other rank "
    "give it back, and its tool goes on with other numbers there; a resume on CPUs takes none of it"
)


def leave_out(case: Case) -> None:
    """Leave out broken random states, and of the Trainer a broken optimizer with its schedule."""
    for name in case.broken():
        if (
            _RANDOM.fullmatch(name)
            and name in case.listing.sizes
            and not _is_of_devices(case, name)
        ):
            case.losses["random state"] = _DRAWN
            case.draft.drop(name)
            case.done(name, "left out: it is broken", "its tool goes on without it")
    for one in case.problems:
        if one.loses == "random state" and one.place == ".":
            case.refused["."] = _LOST.format(one.what)
        if one.loses == OF_DEVICES:
            case.refused.setdefault(one.place, one.what if one.what == OLDER else _OF_DEVICES)
    if case.contents.layout == "hf-trainer":
        _leave_unread(case)
        _leave_optimizer(case)


def _is_of_devices(case: Case, name: str) -> bool:
    """Say whether no more than the states of CUDA is wrong with a file, which CPUs do not take."""
    return {one.loses for one in case.problems if one.place == name} == {OF_DEVICES}


def _leave_unread(case: Case) -> None:
    """Leave out what no resume needs."""
    for name, (what, follows) in _UNREAD.items():
        if name in case.broken() and name in case.listing.sizes:
            case.losses[what] = follows
            case.draft.drop(name)
            case.done(name, "left out: it is broken", "its tool goes on without it")


def _leave_optimizer(case: Case) -> None:
    pair = {_OPTIMIZER, _SCHEDULE}
    broken = pair & {one.place for one in case.fatal()}
    others = [one for one in case.fatal() if one.place not in pair]
    if not broken or others:
        return
    case.losses["the optimizer's state"] = _BEGINS
    case.losses["the schedule"] = _BEGINS
    for name in pair:
        case.draft.drop(name)
    case.done(", ".join(sorted(broken)), "left out with what goes with it", "its tool goes on")
