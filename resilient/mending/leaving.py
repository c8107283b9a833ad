"""What is left out, because its tool stops at it broken and goes on without it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from resilient.comparison.stale_copies import STALE
from resilient.layouts.plain import ALONE
from resilient.layouts.randoms import OF_DEVICES, OLDER
from resilient.mending.case import looked_through

if TYPE_CHECKING:
    from resilient.mending.case import Case

_RANDOM = re.compile(r"(?:rng_state(?:_\d{1,7})?\.pth|random_states_\d{1,7}\.pkl)")
_OPTIMIZER, _SCHEDULE = "optimizer.pt", "scheduler.pt"
_SLICED = re.compile(r"optimizer_\d{1,4}/")
_ENGINE = re.compile(r"global_step(?:\d{1,12}|\*)/")
_OF_ENGINE = ("latest", "zero_to_fp32.py", "zero_to_torch.py")
_OF_RUN = ("scheduler.pt", "trainer_state.json", "scaler.pt")
_NEW = "DeepSpeed resumes only whole engines: a new training begins from these weights"
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
        if _RANDOM.fullmatch(name) and name in case.listing.sizes and not _is_kept(case, name):
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
        _leave_slices(case)
        _leave_engine(case)


def _is_kept(case: Case, name: str) -> bool:
    """Return True for a file of which a resume takes the rest, or all of an older step."""
    told = [one for one in case.problems if one.place == name]
    return all(one.loses == OF_DEVICES or one.what.startswith(STALE) for one in told)


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


def _leave_slices(case: Case) -> None:
    """Leave out the optimizer of FSDP if slices of it are lost: the weights restart without it."""
    places = [one.place for one in case.fatal()]
    folders = {match[0] for one in places if (match := _SLICED.match(one))}
    if not folders or not all(_SLICED.match(one) for one in places):
        return
    names = [one for one in case.listing.sizes if one.startswith(tuple(folders))]
    _restart(case, [*names, _SCHEDULE], ", ".join(sorted(folders)), "its tool goes on")


def _leave_engine(case: Case) -> None:
    """Leave a model to begin from if parts of an engine of DeepSpeed are lost.

    DeepSpeed stops at a folder without them, and the weights are in a file of their own.
    """
    places = [one.place for one in case.fatal()]
    is_lost = any(_ENGINE.match(one) for one in places)
    if not is_lost or not all(_ENGINE.match(one) or one in _OF_ENGINE for one in places):
        return
    names = [
        one
        for one in case.listing.sizes
        if _ENGINE.match(one) or one in _OF_ENGINE or _RANDOM.fullmatch(one) or one in _OF_RUN
    ]
    folders = sorted({match[0] for one in names if (match := _ENGINE.match(one))})
    step = case.contents.step
    name = f"weights-{step}" if step is not None else "weights"
    _restart(case, names, ", ".join(folders) or _OF_ENGINE[0], "`from_pretrained`", name)


def _restart(case: Case, names: list[str], what: str, source: str, name: str = "") -> None:
    """Leave files out if what stays are whole weights, and name the losses."""
    trial = case.draft.copy()
    for one in names:
        if one in case.listing.sizes:
            trial.drop(one)
    if name:
        trial.renamed(name)
    _, problems = looked_through(trial)
    if any(one.is_fatal and one.what != ALONE for one in problems):
        return
    case.draft.take(trial)
    follows = _NEW if name else _BEGINS
    case.losses |= dict.fromkeys(("the optimizer's state", "the schedule"), follows)
    if name:
        case.losses |= dict.fromkeys(("random state", "the place in the data"), _NEW)
    case.done(what, "left out with what goes with it: the weights are whole", source)
