"""Matching of tensor names between two checkpoints, with and without wrappers.

Model parameters are matched by name. In each checkpoint, the module first removes the prefix that a
wrapper, a loop or a script added. Among several candidates, it removes the prefix that makes most
names match. Optimizer state is matched by the name of its parameter. One checkpoint may number its
parameters, as torch does, while the other checkpoint names them. Numbers are then mapped to names
only if an order of names is known and every shape fits.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from resilient.layouts.model import MODEL, OPTIMIZER

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from resilient.diff.model import CheckpointView
    from resilient.layouts.model import Tensor

_WRAPPERS = {
    *("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"),
    *("_forward_module", "_dpp_module"),
}
_STATE = re.compile(r"(?:[^ ]*?\.)?state\.(.+)\.([^.]+)")
_FIRSTS_MAX = 4
Key = tuple[str, str, str]
"""Part, name of the tensor or of its parameter, and for an optimizer the slot."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One tensor on both sides; None for a side without it."""

    name: str
    before: Tensor | None
    after: Tensor | None


def matched(before: CheckpointView, after: CheckpointView) -> tuple[list[Pair], list[str]]:
    """Return the pairs of tensors, and notes about tensors that could not be matched."""
    before_tensors, after_tensors = _models(before), _models(after)
    cuts = _prefixes(before_tensors, after_tensors)
    notes: list[str] = []
    keys = [_keyed(side, cut) for side, cut in zip((before, after), cuts, strict=True)]
    keys = _by_name(keys, (before, after), cuts, notes)
    names = sorted({*keys[0], *keys[1]}, key=_natural)
    return [Pair(_key_text(key), keys[0].get(key), keys[1].get(key)) for key in names], notes


def bare(name: str) -> str:
    """Return a name without the names of wrapper modules."""
    parts = [component for component in name.split(".") if component not in _WRAPPERS]
    return ".".join(parts) or name


def _key_text(key: Key) -> str:
    part, name, slot = key
    return f"{part}/{name}{f'.{slot}' if slot else ''}"


def _natural(key: Key) -> tuple[str, list[tuple[int, str]], str]:
    """Return a sort key that puts h.2 before h.10."""
    words = re.split(r"(\d+)", key[1])
    return key[0], [(int(word), "") if word.isdecimal() else (-1, word) for word in words], key[2]


def _models(side: CheckpointView) -> dict[str, Tensor]:
    return {bare(tensor.name): tensor for tensor in side.tensors if tensor.part == MODEL}


def _prefixes(value: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> tuple[str, str]:
    """Return the prefix to remove on each side so that most names match."""
    if not value or not other or value.keys() == other.keys():
        return "", ""
    best, best_count = ("", ""), -1
    shapes_by_prefix = {
        after_prefix: _shapes(other, after_prefix) for after_prefix in _candidates(other)
    }
    for before_prefix in _candidates(value):
        before_shapes = _shapes(value, before_prefix)
        for after_prefix, after_shapes in shapes_by_prefix.items():
            match_count = len(before_shapes & after_shapes)
            if match_count > best_count:
                best, best_count = (before_prefix, after_prefix), match_count
    return best


def _candidates(names: Mapping[str, Tensor]) -> list[str]:
    """Return candidate prefixes: none, the most common first words, and the shared prefix."""
    firsts = Counter(name.partition(".")[0] for name in names if "." in name)
    prefixes = ["", *(f"{word}." for word, _ in firsts.most_common(_FIRSTS_MAX))]
    common_prefixes = _shared(names)
    return list(dict.fromkeys([*prefixes, *common_prefixes]))


def _shared(names: Iterable[str]) -> list[str]:
    words = [name.split(".")[:-1] for name in names]
    notes: list[str] = []
    for column in zip(*words, strict=False):
        if len(set(column)) > 1:
            break
        notes.append((notes[-1] if notes else "") + f"{column[0]}.")
    return notes


def _shapes(names: Mapping[str, Tensor], prefix: str) -> set[tuple[str, tuple[int, ...]]]:
    return {(name.removeprefix(prefix), tensor.shape) for name, tensor in names.items()}


def _keyed(side: CheckpointView, prefix: str) -> dict[Key, Tensor]:
    tensor_by_key: dict[Key, Tensor] = {}
    for tensor in side.tensors:
        key = _key(tensor, prefix)
        # Two tensors that would get the same key keep their original names.
        tensor_by_key[(tensor.part, tensor.name, "") if key in tensor_by_key else key] = tensor
    return tensor_by_key


def _key(tensor: Tensor, prefix: str) -> Key:
    if tensor.part == MODEL:
        return MODEL, bare(tensor.name).removeprefix(prefix), ""
    match = _STATE.fullmatch(tensor.name) if tensor.part == OPTIMIZER else None
    if match is None:
        return tensor.part, tensor.name, ""
    name = bare(match[1])
    return OPTIMIZER, name if name.isdecimal() else name.removeprefix(prefix), match[2]


def _by_name(
    keys: list[dict[Key, Tensor]],
    sides: tuple[CheckpointView, CheckpointView],
    cuts: tuple[str, str],
    notes: list[str],
) -> list[dict[Key, Tensor]]:
    """Return the keys with parameter numbers replaced by names, if one side has names."""
    numbered = [_numbers(dotted) for dotted in keys]
    if bool(numbered[0]) == bool(numbered[1]):
        return keys
    numbered_side = 0 if numbered[0] else 1
    named_keys = keys[1 - numbered_side]
    if not any(part == OPTIMIZER and slot for part, _, slot in named_keys):
        return keys
    for side, cut in zip(sides, cuts, strict=True):
        order = [bare(name).removeprefix(cut) for name in side.order]
        if _fits(keys[numbered_side], named_keys, order):
            keys[numbered_side] = _renamed(keys[numbered_side], order)
            return keys
    notes.append(
        "the optimizer's parameters have numbers on one side and names on the other, and no "
        "recorded order of names fits all shapes: its state was not compared"
    )
    for dotted in keys:
        for key in [key for key in dotted if key[0] == OPTIMIZER]:
            del dotted[key]
    return keys


def _numbers(keys: Mapping[Key, Tensor]) -> bool:
    names = [name for part, name, slot in keys if part == OPTIMIZER and slot]
    return bool(names) and all(name.isdecimal() for name in names)


def _fits(
    numbered: Mapping[Key, Tensor], named_keys: Mapping[Key, Tensor], order: Sequence[str]
) -> bool:
    """Return True if the state of each number has the shapes of the name at this position."""
    optimizer_keys = [key for key in numbered if key[0] == OPTIMIZER and key[2]]
    if not optimizer_keys or max(int(name) for _, name, _ in optimizer_keys) >= len(order):
        return False
    pairs = [
        (numbered[key], named_keys.get((OPTIMIZER, order[int(key[1])], key[2])))
        for key in optimizer_keys
    ]
    shapes = [
        (tensor.shape, named_tensor.shape)
        for tensor, named_tensor in pairs
        if named_tensor is not None
    ]
    return len(shapes) * 2 > len(pairs) and all(
        numbered_shape == named_shape for numbered_shape, named_shape in shapes
    )


def _renamed(numbered: Mapping[Key, Tensor], order: Sequence[str]) -> dict[Key, Tensor]:
    return {
        (part, order[int(name)], slot) if part == OPTIMIZER and slot else (part, name, slot): value
        for (part, name, slot), value in numbered.items()
    }
