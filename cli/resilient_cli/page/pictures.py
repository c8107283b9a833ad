"""Reads tensors and draws how their numbers are spread."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from resilient.comparison.histograms import histogram
from resilient.comparison.naming import matched
from resilient.errors import KeyNotFound
from resilient.layouts.values import Unreadable
from resilient_cli.page.histograms import histograms
from resilient_cli.page.tensors import name_of
from resilient_cli.views.comparing import is_counter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from resilient.comparison.histograms import Histogram
    from resilient.comparison.values import Comparison, Side
    from resilient.layouts.values import Tensor

    Told = Callable[[int, int], None]

PICTURES_MAX = 200
"""Of a page in a file: so many tensors have pictures in it, the first or the most different."""
_BLOCKS_MAX = 8
_UNKNOWN = "<p>The numbers of this dtype are not known.</p>"


def picture_of(side: Side, name: str, told: Told) -> str:
    """Return the pictures of one tensor.

    Raises:
        KeyNotFound: there is no such tensor.
        Unreadable: it cannot be read by ranges, or is damaged.
        StoreError: it could not be read.
    """
    tensor = next((one for one in side.tensors if name_of(one) == name), None)
    if tensor is None:
        raise _no_such(name)
    found = histogram(side, tensor, told)
    return histograms([found], [side.name]) if found else _UNKNOWN


def picture_of_both(before: Side, after: Side, name: str, told: Told) -> str:
    """Return the pictures of a tensor of two checkpoints, over each other.

    Raises:
        KeyNotFound: one of them has no such tensor.
        Unreadable: it cannot be read by ranges, or is damaged.
        StoreError: it could not be read.
    """
    pair = next((one for one in matched(before, after)[0] if one.name == name), None)
    if pair is None or pair.before is None or pair.after is None:
        raise _no_such(name)
    found = _of_both(before, after, (pair.before, pair.after), told)
    return histograms(found, [before.name, after.name]) if found else _UNKNOWN


def pictures_of(side: Side, told: Told) -> dict[str, str]:
    """Return the pictures of the first tensors of a checkpoint, by name; a look into each."""
    found: dict[str, str] = {}
    wanted = [one for one in side.tensors if one.elements][:PICTURES_MAX]
    for nth, tensor in enumerate(wanted, 1):
        with suppress(Unreadable):
            spread = histogram(side, tensor, blocks_max=_BLOCKS_MAX)
            found[name_of(tensor)] = histograms([spread], [side.name]) if spread else _UNKNOWN
        told(nth, len(wanted))
    return found


def pictures_of_both(found: Comparison, told: Told) -> dict[str, str]:
    """Return the pictures of the tensors that differ most, by name; a look into each."""
    before, after = found.before, found.after
    pairs = {one.name: (one.before, one.after) for one in matched(before, after)[0]}
    told_apart = [one for one in found.tensors if one.measures and not is_counter(one)]
    differ = [one.name for one in told_apart if not one.is_equal]
    names = [name for name in differ if name in pairs][:PICTURES_MAX]
    drawn: dict[str, str] = {}
    for nth, name in enumerate(names, 1):
        one, other = pairs[name]
        if one is not None and other is not None and one.elements:
            with suppress(Unreadable):
                spread = _of_both(before, after, (one, other), lambda *_: None, _BLOCKS_MAX)
                names_of = [_called(before, "A"), _called(after, "B")]
                drawn[name] = histograms(spread, names_of) if spread else _UNKNOWN
        told(nth, len(names))
    return drawn


def _called(side: Side, letter: str) -> str:
    return f"{letter}: {side.name}"


def _of_both(
    before: Side,
    after: Side,
    pair: tuple[Tensor, Tensor],
    told: Told,
    blocks_max: int | None = None,
) -> Sequence[Histogram]:
    options = {} if blocks_max is None else {"blocks_max": blocks_max}
    one = histogram(before, pair[0], lambda done, of: told(done, 2 * of), **options)
    other = histogram(after, pair[1], lambda done, of: told(of + done, 2 * of), **options)
    return [one, other] if one and other else []


def _no_such(name: str) -> KeyNotFound:
    return KeyNotFound(f"there is no tensor `{name[:200]}`", key=name)
