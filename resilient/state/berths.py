"""Live tensors that a checkpoint may be read straight into, before all of it is proved.

Reading into memory of its own and copying from there takes twice the memory, and most of the time
of a load is then spent on pages that nobody touched before. What is read in place is proved where
it lies. So while a checkpoint is read, live tensors hold bytes of it that nobody has proved, and
if it turns out damaged they hold a mixture. That does no harm under three conditions, and only
tensors for which all three hold are here:

1. Whatever is loaded next overwrites all of it. The part is one that every checkpoint must hold,
   and takes its state as a whole: a module, whose ``load_state_dict`` is strict, or an optimizer,
   which replaces its state. So an older checkpoint leaves nothing behind of a damaged one.
2. It is loaded from this checkpoint if the checkpoint is whole: every tensor of the part has its
   name, dtype and shape there, and the checkpoint holds no other of this part. What can be known
   not to fit is found before anything is touched.
3. No two of them share memory.

Who reads in place and finds nothing whole must not go on: ``Checkpointer.resume`` raises, and its
``save`` refuses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from resilient.errors import UnsavableState
from resilient.state.dtypes import DTYPE_NAMES
from resilient.state.optimizer import NamedOptimizer
from resilient.state.tree import PLAIN, local_of, named_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from resilient.format.manifest import Manifest
    from resilient.state.capture import Part

Berths = dict[str, torch.Tensor]
"""Live tensors by the names under which they are stored, which may be overwritten."""


def berths_of(parts: Mapping[str, Part]) -> dict[str, Berths]:
    """Return by part name the live tensors that may be filled before the part is loaded.

    Parts that tensors may not be read into in place are left out, and are loaded as ever.

    Crash: reads only.

    Args:
        parts: what will be loaded into; asked for their state.
    """
    found = {name: _live(name, part) for name, part in parts.items()}
    berths = {name: one for name, one in found.items() if one}
    sharing = _sharing(berths)
    return {name: one for name, one in berths.items() if name not in sharing}


def fitting(berths: Mapping[str, Berths], manifest: Manifest) -> Berths:
    """Return those tensors whose parts are stored just as they are here.

    Args:
        berths: by part.
        manifest: of the checkpoint that will be read.
    """
    stored: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {name: {} for name in berths}
    for entry in manifest.tensors:
        if entry.part in stored:
            stored[entry.part][entry.name] = (entry.dtype, entry.shape)
    return {
        path: tensor
        for name, live in berths.items()
        if stored[name]
        == {path: (DTYPE_NAMES.get(one.dtype), tuple(one.shape)) for path, one in live.items()}
        for path, tensor in live.items()
    }


def _live(name: str, part: Part) -> Berths | None:
    """Return all tensors of a part, tied ones once; None if it is not to be filled in place."""
    if part.optional or part.document or part.scope != "replicated":
        return None
    state = _whole_state(part.stateful)
    if state is None:
        return None
    found: Berths = {}
    known: set[tuple[Any, ...]] = set()
    for path, tensor in named_tensors(state, name):
        memory = _memory(tensor, path)
        if memory is None:
            return None
        key = (memory.data_ptr(), tensor.dtype, tensor.shape, memory.stride())
        if not tensor.numel() or key not in known:
            found[path] = tensor
            known.add(key)
    return found


def _whole_state(stateful: Any) -> Any:
    """Return the state of what takes a state as a whole, with the very tensors that it holds."""
    if isinstance(stateful, NamedOptimizer):
        return stateful.state_dict()
    kind = type(stateful)
    if not isinstance(stateful, nn.Module) or (
        kind.load_state_dict is not nn.Module.load_state_dict
        or kind.state_dict is not nn.Module.state_dict
    ):
        return None
    return dict(stateful.state_dict(keep_vars=True))


def _memory(tensor: torch.Tensor, path: str) -> torch.Tensor | None:
    """Return the host memory of a tensor if bytes can be read into it as they lie."""
    if type(tensor) not in PLAIN and not hasattr(tensor, "to_local"):
        return None
    try:
        memory = local_of(tensor, path)
    except UnsavableState:
        return None
    is_plain = memory.device.type == "cpu" and memory.layout == torch.strided
    if not is_plain or memory.is_conj() or memory.is_neg():
        return None
    return memory if memory.is_contiguous() else None


def _sharing(berths: Mapping[str, Berths]) -> set[str]:
    """Return the parts of which a tensor shares memory with another one."""
    found: set[str] = set()
    furthest, whose = 0, ""
    for start, stop, part in sorted(_spans(berths)):
        if start < furthest:
            found |= {part, whose}
        if stop > furthest:
            furthest, whose = stop, part
    return found


def _spans(berths: Mapping[str, Berths]) -> Iterable[tuple[int, int, str]]:
    for name, live in berths.items():
        for path, tensor in live.items():
            memory = local_of(tensor, path)
            if memory.numel():
                yield memory.data_ptr(), memory.data_ptr() + memory.nbytes, name
