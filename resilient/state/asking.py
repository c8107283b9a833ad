"""Ask a module for its state in less time than its own ``state_dict()`` takes, for the same answer.

Asked at each step, torch's way through a model costs more than the copy of what it finds. Modules
that do as ``torch.nn.Module`` does, and have nothing hooked to it, are gone through here.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

from resilient.state.tree import PLAIN

if TYPE_CHECKING:
    from collections.abc import Mapping

_Module = torch.nn.Module
ASKED = frozenset({"state_dict", "_save_to_state_dict"})
"""What torch calls of a module that is asked for its state, by the names of methods."""


def state_of(stateful: Any) -> Mapping[str, Any]:
    """Return what ``stateful.state_dict()`` does; tensors of a module may not be detached.

    Crash: nothing was stored.
    """
    if isinstance(stateful, _Module):
        found: OrderedDict[str, Any] = OrderedDict()
        if _gather(stateful, "", found):
            return found
    return stateful.state_dict()  # type: ignore[no-any-return]  # what a Stateful of anyone returns


def asks_as_torch_does(module: torch.nn.Module) -> bool:
    """Say whether nothing in a module has a way of its own to say its state."""
    return _gather(module, "", {})


def has_torchs_ways(kind: type[torch.nn.Module]) -> bool:
    """Say whether a class of modules changes nothing of how torch asks for their state."""
    return (
        kind.state_dict is _Module.state_dict
        and kind._save_to_state_dict is _Module._save_to_state_dict  # noqa: SLF001
        and kind.get_extra_state is _Module.get_extra_state
    )


def _gather(module: torch.nn.Module, prefix: str, found: dict[str, Any]) -> bool:
    """Add the state of a module by name; False if it, or one in it, has a way of its own."""
    # What torch 2.13 does in Module.state_dict, for a class that changes nothing of it.
    own = vars(module)
    if (
        # A traced module keeps what it has where only its own way finds it.
        "_parameters" not in own
        or not has_torchs_ways(type(module))
        or not ASKED.isdisjoint(own)
        or own["_state_dict_pre_hooks"]
        or own["_state_dict_hooks"]
    ):
        return False
    for name, one in own["_parameters"].items():
        if isinstance(one, torch.nn.Parameter) and not _is_known(one):
            # Detached, as torch's own way does, one of a class of somebody else's is plain.
            return False
        if one is not None:
            found[prefix + name] = one
    if buffers := own["_buffers"]:
        passing = own["_non_persistent_buffers_set"]
        for name, one in buffers.items():
            if one is not None and name not in passing:
                found[prefix + name] = one
    return all(
        one is None or _gather(one, f"{prefix}{name}.", found)
        for name, one in own["_modules"].items()
    )


def _is_known(parameter: torch.nn.Parameter) -> bool:
    # torch's sharded tensors have a part here that is theirs.
    return type(parameter) in PLAIN or hasattr(parameter, "to_local")
