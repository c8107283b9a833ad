"""Changes that hooks make to the checkpoint dictionary of a trainer.

Before a save, a trainer passes a dictionary with all state to its hooks, which may change the
dictionary. A checkpoint already contains the state, as its parts ``model``, ``optimizer`` and
others. The save therefore stores only the changes of the hooks.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

from resilient.errors import IncompatibleCheckpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_PLAIN = (type(None), bool, int, float, str, bytes)
Path = tuple[Any, ...]


def outline(value: Any) -> Any:
    """Return a copy of nested dicts, lists and tuples that shares every other value."""
    return _rebuilt(value, (), lambda item, _: item)


def host_copy(value: Any) -> Any:
    """Return nested containers with a copy of each tensor in host memory."""
    return _rebuilt(value, (), lambda item, _: _copied(item))


def is_same(left: Any, right: Any) -> bool:
    """Return whether two outlines have the same tensor memory, objects and plain values."""
    if left is right or type(left) is not type(right):
        return left is right
    if isinstance(left, dict):
        return list(left) == list(right) and all(is_same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(is_same, left, right))
    if isinstance(left, torch.Tensor):
        return _memory(left) == _memory(right)
    return type(left) in _PLAIN and bool(left == right)


def changes_of(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that hooks added, replaced or removed.

    A tensor that is also in ``before`` is stored as a reference to its position in ``before``. If a
    hook moves or copies weights inside the dictionary, the checkpoint therefore stores these
    weights only once.

    Args:
        before: Outline of the dictionary before the hooks.
        after: The dictionary after the hooks.
    """
    places: dict[Any, Path] = {}
    _rebuilt(before, (), lambda value, path: _note(places, value, path))
    shared: list[list[list[Any]]] = []

    def leaf(leaf_value: Any, path: Path) -> Any:
        place = places.get(_memory(leaf_value)) if isinstance(leaf_value, torch.Tensor) else None
        if place is None:
            return leaf_value
        shared.append([list(path), list(place)])
        return None

    changed = {
        key: _rebuilt(value, (key,), leaf)
        for key, value in after.items()
        if key not in before or not is_same(before[key], value)
    }
    removed = [key for key in before if key not in after]
    return {"changed": changed, "removed": removed, "shared": shared}


def with_changes(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dictionary with the saved changes of the hooks.

    Args:
        base: The state before the hooks; hooks may keep its memory.
        changes: Result of :func:`changes_of`.

    Raises:
        IncompatibleCheckpoint: A tensor that the hooks refer to does not exist in ``base``.
    """
    shared = {tuple(path): tuple(place) for path, place in changes["shared"]}

    def leaf(leaf_value: Any, path: Path) -> Any:
        return _copied(_at(base, shared[path])) if path in shared else leaf_value

    changed = {key: _rebuilt(value, (key,), leaf) for key, value in changes["changed"].items()}
    remaining_items = {
        key: value for key, value in base.items() if key not in set(changes["removed"])
    }
    return {**remaining_items, **changed}


def _rebuilt(value: Any, path: Path, leaf: Callable[[Any, Path], Any]) -> Any:
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _rebuilt(item, (*path, key), leaf)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_rebuilt(item, (*path, at), leaf) for at, item in enumerate(value))
    return leaf(value, path)


def _note(places: dict[Any, Path], value: Any, path: Path) -> None:
    if isinstance(value, torch.Tensor) and value.numel():
        places.setdefault(_memory(value), path)


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.device, tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride())


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _at(base: Any, place: Path) -> Any:
    value = base
    for key in place:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError) as error:
            raise IncompatibleCheckpoint(
                f"hooks of the checkpoint refer to `{'/'.join(map(str, place))}`, "
                "which this run does not have",
                hint="start with the model and optimizers that wrote the checkpoint",
            ) from error
    return value
