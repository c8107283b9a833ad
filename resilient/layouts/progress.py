"""Optimizers, schedules and random states, as torch and those around it keep them."""

from __future__ import annotations

import re
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from resilient.layouts.archives import Archive, open_archive
from resilient.layouts.documents import decimal, whole
from resilient.layouts.pickled import TensorRef
from resilient.layouts.randoms import (
    OF_DEVICES,
    OLDER,
    OLDER_HELP,
    WANTED,
    has_devices,
    has_older_devices,
    misfit,
    odd_devices,
    unset,
)
from resilient.layouts.values import Cure, Optimizer, Problem, RandomStates, Schedule, Unreadable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from resilient.storage.folder import Folder, Listing

_Found = TypeVar("_Found")
RANKS_OPENED_MAX = 32
"""Files of random states that are opened; of the others the listing must do."""
_RANKS_MAX = 1 << 20
_GAPS_MAX = 8
"""Ranks without a state that are named."""
_NUMBERED_LEAST = 2
"""Ranks of a Trainer that numbers their files: one rank alone does not."""
_REPAIR = "resilient ckpt repair {path}"
_BY_METRIC = {"best", "num_bad_epochs", "patience"}
"""Kept by the schedules that count evaluations: ReduceLROnPlateau, and GreedyLR of Transformers."""
_KINDS = {
    "python": "python", "random_state": "python", "numpy": "numpy", "numpy_random_seed": "numpy",
    "cpu": "cpu", "torch": "cpu", "torch_manual_seed": "cpu", "cuda": "cuda",
    "torch_cuda_manual_seed": "cuda", "torch.cuda": "cuda", "xpu": "xpu", "npu": "npu",
}  # fmt: skip


def required(found: _Found | None, what: str) -> _Found:
    """Return what was found.

    Raises:
        Unreadable: there is nothing.
    """
    if found is None:
        raise Unreadable(f"it is no state of {what}")
    return found


def optimizer_of(value: Any, archive: Archive | None) -> Optimizer | None:
    """Return the numbers of ``{state, param_groups}``, None of anything else."""
    state, groups = _field(value, "state"), _field(value, "param_groups")
    if not isinstance(state, dict) or not isinstance(groups, list):
        return None
    states = [one for one in state.values() if isinstance(one, dict)]
    steps = [one["step"] for one in states[:1] if "step" in one]
    step = archive.number(steps[0]) if archive and steps else steps[0] if steps else None
    slots = dict.fromkeys(str(name)[:80] for one in states[:1] for name in one)
    return Optimizer(
        whole(step),
        len(states),
        sum(len(_list(_field(one, "params"))) for one in groups),
        len(groups),
        _rates([_field(one, "lr") for one in groups], archive),
        tuple(slots),
    )


def device_of(value: Any) -> str:
    """Return where the state of an optimizer was when it was saved; empty where none says it.

    A counter of steps may be elsewhere: any part on a device of CUDA counts.
    """
    states = _field(value, "state")
    found = {
        one.storage.device
        for of in (states.values() if isinstance(states, dict) else ())
        for one in (of.values() if isinstance(of, dict) else ())
        if isinstance(one, TensorRef) and one.storage is not None
    }
    return next((one for one in sorted(found) if one.startswith("cuda")), "")


def ahead(place: str, optimizer: Optimizer | None, step: int | None) -> list[Problem]:
    """Return whether an optimizer made more updates than its training made steps."""
    if optimizer is None or optimizer.step is None or step is None or optimizer.step <= step:
        return []
    what = f"the optimizer made {optimizer.step} updates by step {step}"
    return [Problem(place, what, "the agreement of its files", cure=Cure.COPY)]


def _rates(found: Iterable[Any], archive: Archive | None) -> tuple[float, ...]:
    numbers = (archive.number(one) if archive else one for one in found)
    return tuple(rate for one in numbers if (rate := decimal(one)) is not None)


def schedule_of(value: Any, archive: Archive | None = None) -> Schedule | None:
    """Return where a schedule of torch, or of DeepSpeed, is; None of anything else."""
    names = ("last_epoch", "last_batch_iteration")
    name = next((one for one in names if isinstance(value, dict) and one in value), None)
    if name is None:
        return None
    rates = _rates(_list(value.get("_last_lr")), archive)
    if value.keys() >= _BY_METRIC:
        return Schedule(None, rates, whole(value[name]))
    return Schedule(whole(value[name]), rates)


def read_random(
    folder: Folder,
    listing: Listing,
    pattern: str,
    *,
    world: int | None = None,
    stops: bool = False,
    device: str = "",
) -> tuple[RandomStates | None, list[Problem]]:
    """Return the random states of all ranks, and which cannot be read.

    Args:
        folder: where they are.
        listing: what is there.
        pattern: of the file names; its group is the rank, none: there is one rank.
        world: ranks there were at least, where something else tells.
        stops: whether it is the Trainer of Transformers, which stops at one that is broken, though
            not at one that is missing, and numbers the files of two ranks or more.
        device: where the optimizer was, where that is known.
    """
    found: dict[int, str] = {}
    for name in (*listing.sizes, *listing.outside):
        if match := re.fullmatch(pattern, name):
            found[int(match[1] or 0)] = name
    values: dict[str, Any] = {}
    problems = []
    for _, name in sorted(found.items())[:RANKS_OPENED_MAX]:
        values[name], why = _opened(folder, listing, name, WANTED if stops else ())
        if why:
            help_ = _REPAIR if stops else ""
            problems.append(Problem(name, why, "random state", is_fatal=stops, help=help_))
    if not found:
        return None, [Problem(".", "no random states are saved", "random state", cure=Cure.COPY)]
    last = max(found) + 1
    if stops and _is_numbered(pattern, found.values()):
        last = max(last, _NUMBERED_LEAST)
    last = max(last, world) if world and world < _RANKS_MAX else last
    gaps = list(islice((rank for rank in range(last) if rank not in found), _GAPS_MAX))
    if gaps:
        what = f"ranks without a random state: {', '.join(map(str, gaps))}"
        problems.append(Problem(".", what, "random state", cure=Cure.COPY))
    is_alone = stops and not _is_numbered(pattern, found.values())
    problems += _of_devices(values, device, is_alone=is_alone)
    return RandomStates(tuple(sorted(found)), _kinds(values[found[min(found)]])), problems


def _of_devices(values: dict[str, Any], device: str, *, is_alone: bool) -> list[Problem]:
    """Return where states of CUDA are lost: all of them where the optimizer was on one."""
    whole_ones = {name: one for name, one in values.items() if isinstance(one, dict)}
    if device.startswith("cuda") and not any(map(has_devices, whole_ones.values())):
        what = f"no random states of CUDA are saved, and the optimizer was on {device}"
        return [Problem(".", what, OF_DEVICES, cure=Cure.COPY)] if whole_ones else []
    old = [name for name, one in whole_ones.items() if has_older_devices(one)]
    found = [Problem(name, OLDER, OF_DEVICES, help=OLDER_HELP) for name in old]
    odd = odd_devices(whole_ones, is_alone=is_alone)
    rest = (Problem(name, why, OF_DEVICES, cure=Cure.COPY) for name, why in odd if name not in old)
    return [*found, *rest]


def _is_numbered(pattern: str, names: Iterable[str]) -> bool:
    return any((match := re.fullmatch(pattern, one)) and match[1] for one in names)


def _opened(
    folder: Folder, listing: Listing, name: str, wanted: tuple[str, ...]
) -> tuple[Any, str]:
    """Return what a file of random states holds, and why it is none; empty where it is one."""
    try:
        archive = open_archive(folder, listing, name)
    except Unreadable as error:
        return None, str(error)
    value = archive.value
    if not isinstance(value, dict) or not any(one in value for one in _KINDS):
        return value, "it holds no random states"
    lacking = [one for one in wanted if one not in value]
    if lacking:
        return value, f"it has no `{lacking[0]}`"
    return value, misfit(value, _KINDS) or unset(value, _KINDS, archive)


def _kinds(value: Any) -> tuple[str, ...]:
    names = value if isinstance(value, dict) else {}
    return tuple(dict.fromkeys(_KINDS[one] for one in names if one in _KINDS))


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _list(value: Any) -> list[Any] | tuple[Any, ...]:
    return value if isinstance(value, list | tuple) else []
