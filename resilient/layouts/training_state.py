"""Readers of optimizer, scheduler and random state in the form that torch and its trainers save.

A saved random state is valid if its generator would accept it. The generators are set by
``random.setstate``, ``numpy.random.set_state`` and ``torch.random.set_rng_state``, which raise an
error for an invalid state.
"""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from resilient.layouts.field_types import schedule_fault, states_fault
from resilient.layouts.json_files import decimal, whole
from resilient.layouts.model import Optimizer, Problem, RandomStates, Remedy, Schedule, Unreadable
from resilient.layouts.pickle_reader import PickledCall, TensorRef
from resilient.layouts.torch_zip import Archive, open_archive

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from resilient.storage.folder import DirectoryListing, Folder

WANTED = ("python", "numpy", "cpu")
"""Keys that the Trainer of Transformers reads from each file without a check."""
_PYTHON_VERSION, _PYTHON_NUMBERS = 3, 625
_NUMPY_WORDS = 624
_NUMPY_FIELDS = (3, 5)
_CPU_BYTES = 5056
_CPU_WORDS = 624
_CPU_HEAD = struct.Struct("<QiiQ")
"""Seed, number of words left, flag of seeding, index of the next word."""
OF_DEVICES = "the random state of CUDA"
"""A loss that affects only dropout on a GPU."""
_DEVICE_KEYS = ("cuda", "torch_cuda_manual_seed")
_DEVICE_BYTES = ((16,), (8,))
"""Lengths of a state: seed and offset, or only the seed."""
_OLDER_BYTES = 816
"""GPU state of torch before 2.1: 800 unused bytes, the seed and the offset."""
OLDER = "its state of CUDA has 816 bytes, as written by torch before 2.1: torch from 2.1 rejects it"
OLDER_HELP = "none: every copy has the same state, and only torch before 2.1 accepts it"


def check_rng_state(value: dict[Any, Any], kinds: dict[str, str]) -> str:
    """Return the reason why a generator rejects a state in a file; empty if it accepts all states.

    Args:
        value: Content of the file.
        kinds: Generator of each key.
    """
    for name, state in value.items():
        kind = kinds.get(name, "") if isinstance(name, str) else ""
        takes = _TAKEN.get(kind)
        if takes and not takes(state):
            return f"its `{name}` is not a state that the generator of {_OWNERS[kind]} accepts"
    return ""


def unset(value: dict[Any, Any], kinds: dict[str, str], archive: Archive) -> str:
    """Return the reason why torch's generator rejects the values of a state; empty without one.

    Source: ``at::mt19937::is_valid``, and ``CPUGeneratorImplStateLegacy`` of ATen for the layout.

    Args:
        value: Content of the file, already accepted by :func:`check_rng_state`.
        kinds: Generator of each key.
        archive: Archive that reads the bytes.

    Raises:
        StoreError: A file could not be read.
    """
    for name, state in value.items():
        if not isinstance(name, str) or kinds.get(name) != "cpu":
            continue
        head = archive.head(state, _CPU_HEAD.size)
        if len(head) != _CPU_HEAD.size:
            continue
        _, words_left, is_seeded, position = _CPU_HEAD.unpack(head)
        if not (is_seeded == 1 and 0 < words_left <= _CPU_WORDS and position <= _CPU_WORDS):
            return (
                f"its `{name}` is not a state that the generator of torch accepts: it was never set"
            )
    return ""


def check_rng_devices(states: Mapping[str, Any], *, is_alone: bool) -> Iterator[tuple[str, str]]:
    """Yield each file with lost or invalid CUDA states, and the reason.

    The tools only log such a state, and continue.

    Args:
        states: Content of each file.
        is_alone: Whether the file has the state of one device, not a list for all devices of a
            process.
    """
    counts = {name: _device_states(held_state) for name, held_state in states.items()}
    for name, (key, state) in counts.items():
        if not key:
            if names_with_devices := [
                other_name for other_name, (device_key, _) in counts.items() if device_key
            ]:
                yield name, f"it has no state of CUDA, but {names_with_devices[0]} has one"
            continue
        devices = [state] if is_alone else state
        is_taken = isinstance(devices, list | tuple) and all(map(_is_device, devices))
        if not is_taken or not devices:
            expected_form = "one device" if is_alone else "a list of devices"
            yield (
                name,
                f"its `{key}` is not a state of {expected_form}, as this many ranks store it",
            )


def has_devices(state: Any) -> bool:
    """Return True if a file has states of CUDA."""
    return bool(_device_states(state)[0])


def has_older_devices(state: Any) -> bool:
    """Return True if torch before 2.1 wrote a file's states of CUDA."""
    states = _device_states(state)[1]
    devices = states if isinstance(states, list | tuple) else [states]
    return any(
        isinstance(device, TensorRef) and device.shape == (_OLDER_BYTES,) for device in devices
    )


def _device_states(state: Any) -> tuple[str, Any]:
    value = state if isinstance(state, dict) else {}
    key = next((candidate for candidate in _DEVICE_KEYS if candidate in value), "")
    return key, value.get(key)


def _is_device(state: Any) -> bool:
    return isinstance(state, TensorRef) and state.dtype == "U8" and state.shape in _DEVICE_BYTES


def _is_python(state: Any) -> bool:
    if not isinstance(state, tuple) or len(state) != 3 or state[0] != _PYTHON_VERSION:  # noqa: PLR2004
        return False
    numbers = state[1]
    is_row = isinstance(numbers, tuple) and all(type(number) is int for number in numbers)
    return is_row and len(numbers) == _PYTHON_NUMBERS and 0 <= numbers[-1] < _PYTHON_NUMBERS


def _is_numpy(state: Any) -> bool:
    if not isinstance(state, tuple) or len(state) not in _NUMPY_FIELDS or state[0] != "MT19937":
        return False
    shape = _shape(state[1])
    return shape is None or shape == (_NUMPY_WORDS,)


def _shape(array: Any) -> Any:
    """Return the shape of an array; None for another form."""
    if isinstance(array, list | tuple):
        return (len(array),)
    state = array.state if isinstance(array, PickledCall) else None
    return state[1] if isinstance(state, tuple) and len(state) > 1 else None


def _is_cpu(state: Any) -> bool:
    return isinstance(state, TensorRef) and state.dtype == "U8" and state.shape == (_CPU_BYTES,)


_TAKEN = {"python": _is_python, "numpy": _is_numpy, "cpu": _is_cpu}
_OWNERS = {"python": "Python", "numpy": "NumPy", "cpu": "torch"}

_Found = TypeVar("_Found")
RANKS_OPENED_MAX = 32
"""Largest number of opened files of random states; of further files only the name is used."""
_RANKS_MAX = 1 << 20
_GAPS_MAX = 8
"""Largest number of ranks without a state that are named."""
_NUMBERED_LEAST = 2
"""Minimum number of ranks for which a Trainer numbers its files."""
_REPAIR = "resilient ckpt repair {path}"
_GROUPS_MAX = 4096
_ROW_MAX = 4
_BY_METRIC = {"best", "num_bad_epochs", "patience"}
"""Keys of schedulers that count evaluations: ReduceLROnPlateau, and GreedyLR of Transformers."""
_OF_TORCH = {"base_lrs", "_last_lr", "_step_count", "_schedulers"}
"""Keys of torch's schedulers. All but ChainedScheduler also have `last_epoch`."""
_KINDS = {
    "python": "python", "random_state": "python", "numpy": "numpy", "numpy_random_seed": "numpy",
    "cpu": "cpu", "torch": "cpu", "torch_manual_seed": "cpu", "cuda": "cuda",
    "torch_cuda_manual_seed": "cuda", "torch.cuda": "cuda", "xpu": "xpu", "npu": "npu",
}  # fmt: skip


def required(value: _Found | None, noun: str) -> _Found:
    """Return ``value`` if it is not None.

    Raises:
        Unreadable: The value is None.
    """
    if value is None:
        raise Unreadable(f"it is not a state of {noun}")
    return value


def optimizer_of(value: Any, archive: Archive | None) -> Optimizer | None:
    """Return the summary of ``{state, param_groups}``; None for any other value."""
    state, groups = _field(value, "state"), _field(value, "param_groups")
    if not isinstance(state, dict) or not isinstance(groups, list):
        return None
    states = [
        parameter_state for parameter_state in state.values() if isinstance(parameter_state, dict)
    ]
    steps = [parameter_state["step"] for parameter_state in states[:1] if "step" in parameter_state]
    step = archive.number(steps[0]) if archive and steps else steps[0] if steps else None
    slots = dict.fromkeys(
        str(name)[:80] for parameter_state in states[:1] for name in parameter_state
    )
    sizes = tuple(len(_list(_field(group, "params"))) for group in groups)
    return Optimizer(
        whole(step),
        len(states),
        sum(sizes),
        len(groups),
        _rates([_field(group, "lr") for group in groups], archive),
        tuple(slots),
        tuple(_options(group, archive) for group in groups[:_GROUPS_MAX]),
        states_fault(state, archive),
        sizes[:_GROUPS_MAX],
    )


def _options(group: Any, archive: Archive | None) -> dict[str, Any]:
    """Return the options of a group that are booleans, numbers or short rows of numbers."""
    options: dict[str, Any] = {}
    for name, value in group.items() if isinstance(group, dict) else ():
        if not isinstance(name, str) or name == "params":
            continue
        if isinstance(value, bool):
            options[name] = value
            continue
        row = value if isinstance(value, list | tuple) else [value]
        numbers = _rates(row, archive) if len(row) <= _ROW_MAX else ()
        if numbers and len(numbers) == len(row):
            options[name] = numbers if row is value else numbers[0]
    return options


def device_of(value: Any) -> str:
    """Return the device of an optimizer's state at the save; empty if unknown.

    A step counter may be on another device, so any tensor on a CUDA device counts.
    """
    states = _field(value, "state")
    devices = {
        tensor.storage.device
        for of in (states.values() if isinstance(states, dict) else ())
        for tensor in (of.values() if isinstance(of, dict) else ())
        if isinstance(tensor, TensorRef) and tensor.storage is not None
    }
    return next((device for device in sorted(devices) if device.startswith("cuda")), "")


def ahead(place: str, optimizer: Optimizer | None, step: int | None) -> list[Problem]:
    """Return the problem of an optimizer with more updates than training steps."""
    if optimizer is None or optimizer.step is None or step is None or optimizer.step <= step:
        return []
    problem_text = f"the optimizer made {optimizer.step} updates by step {step}"
    return [Problem(place, problem_text, "the consistency of its files", cure=Remedy.COPY)]


def _rates(values: Iterable[Any], archive: Archive | None) -> tuple[float, ...]:
    numbers = (archive.number(item) if archive else item for item in values)
    return tuple(rate for number in numbers if (rate := decimal(number)) is not None)


def schedule_of(value: Any, archive: Archive | None = None) -> Schedule | None:
    """Return the position of a scheduler of torch or DeepSpeed; None for any other value."""
    names = ("last_epoch", "last_batch_iteration")
    name = next(
        (candidate for candidate in names if isinstance(value, dict) and candidate in value), None
    )
    if name is None:
        return _chained(value, archive)
    rates = _rates(_list(value.get("_last_lr")), archive)
    if value.keys() >= _BY_METRIC:
        return Schedule(None, rates, whole(value[name]), schedule_fault(value))
    return Schedule(whole(value[name]), rates, fault=schedule_fault(value))


def _chained(value: Any, archive: Archive | None) -> Schedule | None:
    """Return the position of torch's ChainedScheduler, taken from its inner schedulers."""
    inner = _list(_field(value, "_schedulers"))
    schedules = [schedule_of(schedule, archive) for schedule in inner]
    if not schedules or schedules[0] is None or None in schedules:
        return None
    rates = _rates(_list(value.get("_last_lr")), archive)
    return replace(schedules[0], rates=rates, fault=schedule_fault(value))


def is_own_schedule(value: Any) -> bool:
    """Return True for a state that only a scheduler class of the script can load.

    Tools pass such a state to the class unchanged. The state of a torch scheduler, an optimizer or
    a generator in this place is damage.
    """
    if not isinstance(value, dict) or optimizer_of(value, None) is not None:
        return False
    is_other = value.keys() & {*_OF_TORCH, *_KINDS}
    has_weights = bool(value) and all(
        isinstance(field_value, TensorRef) for field_value in value.values()
    )
    return not is_other and not has_weights


def begins_anew(value: Any) -> bool:
    """Return True for a state with which torch's schedulers silently restart."""
    return isinstance(value, dict) and "last_epoch" not in value and "base_lrs" in value


def read_random(
    folder: Folder,
    listing: DirectoryListing,
    pattern: str,
    *,
    world: int | None = None,
    stops: bool = False,
    device: str = "",
) -> tuple[RandomStates | None, list[Problem]]:
    """Return the random states of all ranks, and the problems of unreadable ones.

    Args:
        folder: Folder of the checkpoint.
        listing: Its files.
        pattern: Pattern of the file names; its group is the rank. A name without a number belongs
            to rank 0.
        world: Minimum number of ranks, if other files state it.
        stops: Whether the tool is the Trainer of Transformers. The Trainer fails at a broken file,
            but ignores a missing file. It numbers the files of two or more ranks.
        device: Device of the optimizer, if known.
    """
    kinds: dict[int, str] = {}
    for name in (*listing.sizes, *listing.outside):
        if match := re.fullmatch(pattern, name):
            kinds[int(match[1] or 0)] = name
    values: dict[str, Any] = {}
    problems = []
    for _, name in sorted(kinds.items())[:RANKS_OPENED_MAX]:
        values[name], reason = _opened(folder, listing, name, WANTED if stops else ())
        if reason:
            help_ = _REPAIR if stops else ""
            problems.append(Problem(name, reason, "random state", is_fatal=stops, help=help_))
    if not kinds:
        return None, [Problem(".", "no random states are saved", "random state", cure=Remedy.COPY)]
    last = max(kinds) + 1
    if stops and _is_numbered(pattern, kinds.values()):
        last = max(last, _NUMBERED_LEAST)
    last = max(last, world) if world and world < _RANKS_MAX else last
    gaps = list(islice((rank for rank in range(last) if rank not in kinds), _GAPS_MAX))
    if gaps:
        problem_text = f"ranks without a random state: {', '.join(map(str, gaps))}"
        problems.append(Problem(".", problem_text, "random state", cure=Remedy.COPY))
    is_alone = stops and not _is_numbered(pattern, kinds.values())
    problems += _device_problems(values, device, is_alone=is_alone)
    return RandomStates(tuple(sorted(kinds)), _kinds(values[kinds[min(kinds)]])), problems


def _device_problems(values: dict[str, Any], device: str, *, is_alone: bool) -> list[Problem]:
    """Return the problems of lost CUDA states; all may be missing if the run used no GPU."""
    whole_ones = {name: value for name, value in values.items() if isinstance(value, dict)}
    if device.startswith("cuda") and not any(map(has_devices, whole_ones.values())):
        problem_text = f"no random states of CUDA are saved, but the optimizer was on {device}"
        return [Problem(".", problem_text, OF_DEVICES, cure=Remedy.COPY)] if whole_ones else []
    older_names = [name for name, value in whole_ones.items() if has_older_devices(value)]
    problems = [Problem(name, OLDER, OF_DEVICES, help=OLDER_HELP) for name in older_names]
    findings = check_rng_devices(whole_ones, is_alone=is_alone)
    device_problems = (
        Problem(name, reason, OF_DEVICES, cure=Remedy.COPY)
        for name, reason in findings
        if name not in older_names
    )
    return [*problems, *device_problems]


def _is_numbered(pattern: str, names: Iterable[str]) -> bool:
    return any((match := re.fullmatch(pattern, name)) and match[1] for name in names)


def _opened(
    folder: Folder, listing: DirectoryListing, name: str, names: tuple[str, ...]
) -> tuple[Any, str]:
    """Return the content of a file of random states, and the reason if it is invalid."""
    try:
        archive = open_archive(folder, listing, name)
    except Unreadable as error:
        return None, str(error)
    value = archive.value
    if not isinstance(value, dict) or not any(kind in value for kind in _KINDS):
        return value, "it holds no random states"
    missing_keys = [key for key in names if key not in value]
    if missing_keys:
        return value, f"it has no `{missing_keys[0]}`"
    return value, check_rng_state(value, _KINDS) or unset(value, _KINDS, archive)


def _kinds(value: Any) -> tuple[str, ...]:
    names = value if isinstance(value, dict) else {}
    return tuple(dict.fromkeys(_KINDS[name] for name in names if name in _KINDS))


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _list(value: Any) -> list[Any] | tuple[Any, ...]:
    return value if isinstance(value, list | tuple) else []
