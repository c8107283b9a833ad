"""Whether an optimizer's state is of the weights beside it (pure).

Source: ``torch.optim.Optimizer``: loading compares no shapes, so that the first step raises.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from resilient.layouts.values import MODEL, OPTIMIZER, Cure, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from resilient.layouts.values import Tensor

_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""What an optimizer keeps in the shape of its parameter."""
_PAIR = {"exp_avg", "exp_avg_sq"}
_FLAT = "rank "
"""What the names of parts begin with that are cut over ranks; their shapes say nothing."""
_OWNER = re.compile(r"(?P<of>.*?)(?:^|(?<=\.))state\.(?P<name>.+)")
_ANOTHER = "the optimizer is of another model"
_Shape = tuple[int, ...]


def unfitting(
    tensors: Sequence[Tensor], *, is_lenient: bool = False, is_hurt: bool = False
) -> tuple[Problem, ...]:
    """Return what says that the optimizer belongs to other weights, or is not whole.

    Args:
        tensors: of the whole checkpoint.
        is_lenient: whether its tool goes on where weights are lost.
        is_hurt: whether files are known to be broken; what they had is then not missed again.
    """
    weights = [one for one in tensors if one.part == MODEL]
    moments = [
        one
        for one in tensors
        if one.part == OPTIMIZER and one.name.endswith(_MOMENTS) and not one.name.startswith(_FLAT)
    ]
    if not weights:
        return tuple(_halved(moments))
    found = [*_unlike(moments), *_misshapen(weights, moments, is_lenient=is_lenient)]
    # A file of weights that cannot be read was told already.
    found = [one for one in found if not (is_hurt and one.loses)]
    return (*found[:1], *_halved(moments))


def _unlike(moments: Sequence[Tensor]) -> Iterator[Problem]:
    """Yield the parameters whose moments have not all one shape."""
    first: dict[str, Tensor] = {}
    for one in moments:
        owner, _, slot = one.name.rpartition(".")
        other = first.setdefault(owner, one)
        if other.shape != one.shape:
            what = (
                f"`{owner[:80]}` has `{other.name.rpartition('.')[2]}` of the shape "
                f"{list(other.shape)} and `{slot}` of {list(one.shape)}: the first step stops"
            )
            yield Problem(_place(one), what, is_fatal=True)


def _misshapen(
    weights: Sequence[Tensor], moments: Sequence[Tensor], *, is_lenient: bool
) -> Iterator[Problem]:
    """Yield the optimizers that have a parameter which no weight is, or more than there are."""
    named = {one.name.removeprefix("model."): one.shape for one in weights}
    owners: dict[tuple[str, str], dict[str, Tensor]] = {}
    for one in moments:
        match = _OWNER.fullmatch(one.name.rpartition(".")[0])
        if match:
            owners.setdefault((_place_of(one), match["of"]), {})[match["name"]] = one
    for of_one in owners.values():
        for name, one in of_one.items():
            shape = named.get(name.removeprefix("model."), one.shape)
            if shape != one.shape:
                what = (
                    f"`{one.name[:80]}` has the shape {list(one.shape)}, its weight {list(shape)}"
                )
                yield Problem(_place(one), f"{what}: {_ANOTHER}", is_fatal=True)
        counts = Counter(one.shape for one in weights)
        held = Counter(one.shape for one in of_one.values())
        if odd := [one for one in of_one.values() if held[one.shape] > counts[one.shape]]:
            # Positions do not say which weight is whose.
            yield (
                _beyond(counts, held, odd[0])
                if counts - held
                else _lost(weights, held, odd[0], is_lenient=is_lenient)
            )


def _beyond(weights: Counter[_Shape], held: Counter[_Shape], odd: Tensor) -> Problem:
    """Return that an optimizer has more moments of a shape than there are weights."""
    count = weights[odd.shape]
    of = f"{count} weights have it, and {held[odd.shape]} moments" if count else "no weight has it"
    what = f"`{odd.name[:80]}` has the shape {list(odd.shape)}, and {of}: {_ANOTHER}"
    return Problem(_place(odd), what, is_fatal=True)


def _lost(
    weights: Sequence[Tensor], held: Counter[_Shape], odd: Tensor, *, is_lenient: bool
) -> Problem:
    """Return that there are moments of weights that are not there, and all others have theirs."""
    lost, places = held.total() - len(weights), {_place(one) for one in weights}
    follows = "begins those anew" if is_lenient else "stops at that"
    what = (
        f"the optimizer has the state of {held.total()} weights, and {lost} of them are not here, "
        f"one of the shape {list(odd.shape)} among them: its tool {follows}"
    )
    place = places.pop() if len(places) == 1 else "."
    loses = f"{lost} of {held.total()} weights"
    return Problem(place, what, loses, is_fatal=not is_lenient, cure=Cure.COPY)


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


def _place_of(tensor: Tensor) -> str:
    """Return the file of one that is in one; those cut over files are of one optimizer."""
    return tensor.files[0] if len(tensor.files) == 1 and "/" not in tensor.files[0] else ""
