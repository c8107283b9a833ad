"""Whether an optimizer's state is of the weights beside it (pure)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.layouts.values import MODEL, OPTIMIZER, Problem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.layouts.values import Tensor

_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""What an optimizer keeps in the shape of its parameter."""
_PAIR = {"exp_avg", "exp_avg_sq"}
_FLAT = "rank "
"""What the names of parts begin with that are cut over ranks; their shapes say nothing."""


def unfitting(tensors: Sequence[Tensor]) -> tuple[Problem, ...]:
    """Return what says that the optimizer belongs to other weights, or is not whole.

    Args:
        tensors: of the whole checkpoint.
    """
    shapes = {one.shape for one in tensors if one.part == MODEL}
    moments = [
        one
        for one in tensors
        if one.part == OPTIMIZER and one.name.endswith(_MOMENTS) and not one.name.startswith(_FLAT)
    ]
    odd = [one for one in moments if shapes and one.shape not in shapes]
    found = []
    if odd:
        what = (
            f"`{odd[0].name[:80]}` has the shape {list(odd[0].shape)}, and no weight has it: "
            "the optimizer is of another model"
        )
        found.append(Problem(_place(odd[0]), what, is_fatal=True))
    return (*found, *_halved(moments))


def _halved(moments: Sequence[Tensor]) -> list[Problem]:
    """Return the first parameter that has one moment of Adam where others have both."""
    held: dict[str, dict[str, Tensor]] = {}
    for one in moments:
        owner, _, slot = one.name.rpartition(".")
        held.setdefault(owner, {})[slot] = one
    if not any(_PAIR <= set(one) for one in held.values()):
        return []
    for owner, slots in held.items():
        lacking = _PAIR - set(slots)
        if len(lacking) == 1:
            place = _place(next(iter(slots.values())))
            what = f"`{owner[:80]}` has no `{lacking.pop()}`, as others have"
            return [Problem(place, what, is_fatal=True)]
    return []


def _place(tensor: Tensor) -> str:
    return tensor.files[0] if tensor.files else "."
