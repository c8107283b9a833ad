"""Reader of checkpoints in one file: weights, a script's state, a pickled module or TorchScript.

If torch loads a pickled module, it runs the code that the pickle names. A TorchScript file contains
a program. This module reads both kinds as data, and their weights as plain tensors.

Source: ``torch.nn.Module.__getstate__`` and ``torch/csrc/jit/serialization``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from resilient.layouts.consistency import check_base_rates, check_optimizer, check_update_count
from resilient.layouts.json_files import decimal, read_header, whole
from resilient.layouts.model import (
    MODEL,
    OPTIMIZER,
    OTHER,
    Contents,
    Optimizer,
    Problem,
    Remedy,
    Schedule,
    Unreadable,
)
from resilient.layouts.pickle_names import how_to_load
from resilient.layouts.pickle_reader import DEPTH_MAX, LEAVES_MAX, PickledCall, TensorRef
from resilient.layouts.torch_zip import tensors_in
from resilient.layouts.training_state import ahead, optimizer_of, schedule_of
from resilient.layouts.weights import read_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resilient.layouts.model import Tensor
    from resilient.layouts.torch_zip import Archive
    from resilient.storage.folder import DirectoryListing, Folder

_PARAMETERS, _BUFFERS, _MODULES = "_parameters", "_buffers", "_modules"
_PROGRAM = "__torch__"
_CONSTANTS = "constants.pkl"
_IN_CODE = "it is the module itself, and loading it runs what its pickle names: `{}` and others"
_AS_PROGRAM = "it is a TorchScript program, which runs a model and cannot continue its training"
_SCAN = "resilient ckpt scan {path}"
_LOAD_PROGRAM = "torch.jit.load('{path}')"
_WEIGHTS = "the optimizer, the schedule, the random state and the data position"


def is_module(value: Any) -> bool:
    """Return True if a value of an archive is a torch module."""
    if not isinstance(value, PickledCall) or not isinstance(value.state, dict):
        return False
    return {_PARAMETERS, _BUFFERS, _MODULES} <= set(value.state)


def is_program(archive: Archive) -> bool:
    """Return True if an archive is a TorchScript program."""
    value = archive.value
    is_made = isinstance(value, PickledCall) and value.kind.startswith(_PROGRAM)
    return is_made and _CONSTANTS in archive.members


def read_module(archive: Archive) -> Contents:
    """Return the contents of a module or a program, whose weights cannot resume a training.

    Raises:
        Unreadable: The value exceeds the bounds.
    """
    value = archive.value
    if is_program(archive):
        problem = Problem(archive.name, _AS_PROGRAM, _WEIGHTS, is_fatal=True, help=_LOAD_PROGRAM)
        title, layout, resume = "a TorchScript program", "torchscript", _LOAD_PROGRAM
    else:
        problem_text = _IN_CODE.format(value.kind[:80] or "its class")
        problem = Problem(archive.name, problem_text, _WEIGHTS, is_fatal=True, help=_SCAN)
        title, layout, resume = "a torch module, saved as an object", "torch-module", _SCAN
    return Contents(
        layout,
        title,
        resume,
        tensors_of(archive, value),
        facts={"class": value.kind[:200]} if value.kind else {},
        problems=(problem,),
    )


def tensors_of(archive: Archive, module: Any, root: str = "") -> tuple[Tensor, ...]:
    """Return the parameters and buffers of a module by their state-dict names.

    Args:
        archive: Archive of the module.
        module: The module.
        root: Prefix of each name.

    Raises:
        Unreadable: The value exceeds the bounds.
    """
    tensor_by_name: dict[str, TensorRef] = {}
    pending_modules: list[tuple[str, int, Any]] = [(root, 0, module)]
    visited_count = 0
    while pending_modules:
        prefix, depth, value = pending_modules.pop()
        visited_count += 1
        if depth > DEPTH_MAX or visited_count > LEAVES_MAX:
            raise Unreadable("endless nesting of modules")
        fields = _fields(value)
        tensor_by_name |= {
            f"{prefix}{key}": field_value
            for key, field_value in fields
            if isinstance(field_value, TensorRef)
        }
        submodules = [
            (key, field_value)
            for key, field_value in fields
            if isinstance(field_value, PickledCall)
        ]
        pending_modules += [
            (f"{prefix}{key}.", depth + 1, field_value) for key, field_value in reversed(submodules)
        ]
    return tensors_in(archive, tensor_by_name, MODEL)


def _fields(module: Any) -> list[tuple[Any, Any]]:
    """Return the tensors and the submodules of a module by name."""
    state = module.state if isinstance(module, PickledCall) else None
    if not isinstance(state, dict):
        return []
    if not is_module(module):
        # A program stores all attributes in one dictionary.
        return list(state.items()) if module.kind.startswith(_PROGRAM) else []
    parts = (state[name] for name in (_PARAMETERS, _BUFFERS, _MODULES))
    return [pair for part in parts if isinstance(part, dict) for pair in part.items()]


TORCH_TITLE = "a single file of torch"
WEIGHTS_ONLY = "the optimizer, the schedule, the random state and the data position"
ALONE = "it holds only weights, to start a new training from"
_LOAD_FILE = "model.load_state_dict(safetensors.torch.load_file('{path}'))"
_FROM_PRETRAINED = "AutoModel.from_pretrained('{path}')"
_WANTED = {
    ("rng", "random"): "the random state",
    (*("data", "sampler", "loop", "loader"), *("step", "iter", "epoch")): "the place in the data",
}
_STEPS = ("global_step", "step", "iteration", "iter", "num_steps", "steps")
_EPOCHS = ("epoch", "current_epoch", "epochs_trained")
_OPTIMIZER_NAMES = ("optim", "opt")
_LISTED_MAX = 16
"""Largest number of optimizers read from a list."""
_SCHEDULE_NAMES = ("sched", "lr_sched")


def read_safetensors(folder: Folder, listing: DirectoryListing, name: str) -> Contents:
    """Return the contents of a safetensors file."""
    title = "a single file of safetensors"
    try:
        tensors, meta = read_header(folder, listing, name)
    except Unreadable as error:
        return Contents("safetensors", title, problems=(Problem(name, str(error), is_fatal=True),))
    return Contents(
        "safetensors",
        title,
        _LOAD_FILE,
        tensors,
        facts={str(key)[:80]: str(value)[:200] for key, value in list(meta.items())[:16]},
        problems=(Problem(name, ALONE, WEIGHTS_ONLY, is_fatal=True, help=_LOAD_FILE),),
    )


def read_state(archive: Archive, layout: str, title: str) -> Contents:
    """Return the contents of a script's own dictionary; the type or the name identifies a value.

    Raises:
        Unreadable: The value exceeds the bounds.
        StoreError: The file could not be read.
    """
    value = archive.value
    fields = value if isinstance(value, dict) else {}
    optimizer, schedule = _optimizer(fields, archive), _schedule(fields, archive)
    tensors = _tensors(archive)
    problems = [] if tensors else [Problem(archive.name, "it contains no tensor", is_fatal=True)]
    missing_parts = [
        *(("the optimizer's state",) if optimizer is None else ()),
        *(("the schedule",) if schedule is None else ()),
    ]
    words = [key.lower() for key in fields if isinstance(key, str)]
    for word_parts, label in _WANTED.items():
        if not any(part in word for part in word_parts for word in words):
            missing_parts.append(label)
    load, stops = how_to_load(archive.names)
    if optimizer is None and schedule is None and tensors:
        problems = [Problem(archive.name, ALONE, is_fatal=True, help=load)]
    problems += [
        Problem(archive.name, f"it has no {part[4:]}", part, cure=Remedy.UNKEPT)
        for part in missing_parts
    ]
    for key, _ in _modules(archive):
        label = f"`{key}` in it is the module itself: `torch.load` with `weights_only` rejects it"
        problems.append(Problem(archive.name, label, cure=Remedy.NEEDLESS))
    if stops and not _modules(archive):
        problems.append(Problem(archive.name, stops, cure=Remedy.NEEDLESS))
    step = _first(fields, _STEPS, whole)
    problems += ahead(archive.name, optimizer, step)
    is_begun = bool(step or (schedule and schedule.step))
    for state in _states(fields):
        problems += check_optimizer(archive.name, state, archive, is_begun=is_begun)
    states = [candidate for candidate in fields.values() if schedule_of(candidate) is not None]
    if len(states) == 1 and len(list(_states(fields))) == 1:
        problems += check_update_count(archive.name, states[0], optimizer)
        problems += check_base_rates(archive.name, states[0], optimizer)
    return Contents(
        layout,
        title,
        load,
        tensors,
        step=step,
        epoch=_first(fields, _EPOCHS, decimal),
        optimizer=optimizer,
        schedule=schedule,
        facts={"keys": ", ".join(str(name)[:40] for name in list(fields)[:12])}
        if optimizer
        else {},
        problems=tuple(problems),
    )


def read_model_folder(folder: Folder, listing: DirectoryListing) -> Contents:
    """Return the contents of a folder of weights with the file names of Transformers."""
    tensors, problems = read_weights(folder, listing)
    problems.append(Problem(".", ALONE, WEIGHTS_ONLY, is_fatal=True, help=_FROM_PRETRAINED))
    return Contents(
        "hf-model",
        "a model as `save_pretrained` writes it",
        _FROM_PRETRAINED,
        tensors,
        problems=tuple(problems),
    )


def _tensors(archive: Archive) -> tuple[Tensor, ...]:
    """Return the tensors; the key identifies tensors of optimizers."""
    tensors = archive.tensors(MODEL)
    for key, value in _modules(archive):
        tensors += tensors_of(archive, value, f"{key}.")
    fields = archive.value if isinstance(archive.value, dict) else {}
    parts = {key: _part(key, value) for key, value in fields.items()}
    by_text = {str(key): part for key, part in parts.items() if isinstance(key, str | int)}
    return tuple(
        replace(tensor, part=by_text.get(_head(tensor.name, by_text), MODEL)) for tensor in tensors
    )


def _modules(archive: Archive) -> list[tuple[str, Any]]:
    """Return the modules that a script stored in its dictionary."""
    fields = archive.value if isinstance(archive.value, dict) else {}
    return [(str(key)[:80], value) for key, value in fields.items() if is_module(value)]


def _head(name: str, metadata: dict[str, str]) -> str:
    """Return the known first key of a path; keys may contain dots."""
    head = name.partition(".")[0]
    return head if head in metadata else name


def _part(key: Any, value: Any) -> str:
    if isinstance(key, str) and key.lower().startswith(_OPTIMIZER_NAMES):
        return OPTIMIZER
    if optimizer_of(value, None) is not None:
        return OPTIMIZER
    is_state = isinstance(key, str) and ("rng" in key.lower() or "random" in key.lower())
    return OTHER if is_state else MODEL


def _optimizer(fields: dict[Any, Any], archive: Archive) -> Optimizer | None:
    first = next(_states(fields), None)
    return None if first is None else optimizer_of(first, archive)


def _states(fields: dict[Any, Any]) -> Iterator[dict[Any, Any]]:
    """Yield optimizer states: the value, its fields, and elements of lists in its fields."""
    for value in (fields, *fields.values()):
        for state in value[:_LISTED_MAX] if isinstance(value, list) else (value,):
            if optimizer_of(state, None) is not None:
                yield state


def _schedule(fields: dict[Any, Any], archive: Archive) -> Schedule | None:
    for value in (fields, *fields.values()):
        schedule = value[0] if isinstance(value, list) and value else value
        parsed_schedule = schedule_of(schedule, archive)
        if parsed_schedule is not None:
            return parsed_schedule
    return None


def _first(fields: dict[Any, Any], names: tuple[str, ...], read: Any) -> Any:
    values = (read(fields[name]) for name in names if name in fields)
    return next((item for item in values if item is not None), None)
