"""Whether the layers of a model have their weights under the same names (pure)."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from resilient.layouts.values import MODEL, Cure, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from resilient.layouts.values import Tensor

LAYER = re.compile(r"(?:(?P<stack>.*?)\.)?(?:h|layers?|blocks?)\.(?P<number>\d{1,6})\.(?P<own>.*)")
_ENOUGH = 3
"""Layers of which two say what the third should have; of two each may be of a kind of its own."""
LOSES = "a weight of a layer"


def odd_layers(tensors: Sequence[Tensor]) -> list[Problem]:
    """Return the weights that only one layer has, in place of one that all others have.

    Its tool loads such a file: what has no weight under its name there begins anew.

    Args:
        tensors: of the whole checkpoint.
    """
    stacks: dict[str, dict[int, dict[str, Tensor]]] = {}
    for one in tensors:
        match = LAYER.fullmatch(one.name) if one.part == MODEL else None
        if match:
            layers = stacks.setdefault(match["stack"] or "", {})
            layers.setdefault(int(match["number"]), {})[match["own"]] = one
    return [one for layers in stacks.values() for one in _odd(layers)]


def _odd(layers: Mapping[int, Mapping[str, Tensor]]) -> Iterator[Problem]:
    counts = Counter(own for layer in layers.values() for own in layer)
    common = {own for own, count in counts.items() if count == len(layers) - 1}
    shapes = {own: one.shape for layer in layers.values() for own, one in layer.items()}
    for layer in layers.values():
        lacking, alone = common - layer.keys(), [own for own in layer if counts[own] == 1]
        if len(lacking) != 1 or len(alone) != 1:
            continue
        (wanted,), (found,) = lacking, alone
        one, is_pair = layer[found], len(layers) < _ENOUGH
        if one.shape != shapes[wanted] or (is_pair and not _is_bit_apart(wanted, found)):
            continue
        what = (
            f"`{one.name[:80]}` is in no other layer, and `{wanted[:80]}` of "
            f"{'the other' if is_pair else 'all others'} is not in this one: one of both names "
            "is wrong, and its tool begins that weight anew"
        )
        yield Problem(one.files[0] if one.files else ".", what, LOSES, cure=Cure.COPY)
        if is_pair:
            return  # the other one says the same of this one


def _is_bit_apart(one: str, other: str) -> bool:
    first, second = one.encode(), other.encode()
    flips = int.from_bytes(first) ^ int.from_bytes(second)
    return len(first) == len(second) and flips.bit_count() == 1
