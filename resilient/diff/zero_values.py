"""Detection of zeros in weights and moments that no training produces.

An update at a positive learning rate changes each number that has a nonzero moment. Four rules
follow from this fact. Each rule excludes zeros that an intact run can produce.

* **A weight of zeros only.** The weight is damaged if its moments are not all zero. But torch
  stores moments by the position of the parameter, so it is unknown which moments belong to a
  weight. The rule therefore counts weights and moments of one shape. A weight without moments
  (frozen) or with moments of zeros (no gradient) may be zero. If more weights are zero than this
  allows, the rule reports them. The rule ignores a weight that is zero in all layers, because a
  script may set it to zero, as for ``B`` of LoRA.
* **Whole pages of zeros in a weight.** The run of zeros begins or ends at a page of the file. For
  each weight of this shape, more than half of the moments at the same positions are not zero. The
  rule ignores unused rows of an embedding, because their moments are zero. Pruned weights have
  zeros, but rarely a run of a whole page at a page boundary.
* **Moments of zeros only.** All moments of all parameters are zero after an update. For a single
  parameter this is only a note, because its gradients may have been zero. This is common in the
  first updates of a model with weights of zeros. It is a loss if an older step has nonzero moments
  of this parameter.
* **One moment of Adam of zeros only.** The other moment shows a gradient so recent that this moment
  cannot be zero.

The rules for weights apply after two updates, because a warmup makes the first update at learning
rate 0. They also need a positive learning rate in each parameter group.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import numpy as np

from resilient.diff.other_steps import contradicts_older
from resilient.diff.tensor_reader import Elements
from resilient.diff.tensor_stats import ScannedTensor, values
from resilient.layouts.consistency import LAYER
from resilient.layouts.json_files import decimal
from resilient.layouts.model import MODEL, OPTIMIZER, Problem, Remedy, Unreadable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from resilient.layouts.model import Contents, Tensor
    from resilient.storage.folder import DirectoryListing, Folder

HOLE = "a loss of power causes this"
_SLOTS = ("exp_avg_sq", "exp_avg", "exp_inf", "momentum_buffer", "square_avg", "sum")
"""Names of state in the shape of its parameter; the first existing name is compared."""
_FIRST, _SECOND = "exp_avg", "exp_avg_sq"
_WIDE = ("F32", "F64", "BF16")
"""Dtypes in which the square of a gradient does not underflow."""
_ELEMENTS_MIN = 16
"""Minimum number of elements, because a few numbers may be zero by chance."""
_UPDATES_MIN = 2
_LONE_UPDATES_MIN = 8
_RUN_MAX = 1 << 16
"""Maximum number of elements of a run that are compared with moments."""
_NAMED_MAX = 16
_TINY = 1e-15
_SMALLEST = -36.0
"""Decimal exponent below which a number with 8 exponent bits may become zero."""
_STATE = "the optimizer's state"


_Moments = dict[str, dict[str, ScannedTensor]]
"""Moments by the name of their parameter and their own name."""


def odd_zeros(
    folder: Folder,
    listing: DirectoryListing,
    contents: Contents,
    scans: Sequence[ScannedTensor],
) -> Iterator[Problem]:
    """Yield problems of weights and moments with zeros that no training produces.

    Args:
        folder: Folder of the checkpoint.
        listing: Its files.
        contents: Its contents.
        scans: All weights and moments that were read.

    Raises:
        StoreError: A file could not be read.
    """
    moments = _moments(scans)
    if not moments or not _updates(contents):
        return
    yield from _zero_moments(folder, contents, moments)
    if _is_moved(contents):
        weights = [scan for scan in scans if scan.tensor.part == MODEL]
        yield from _zero_weights(contents, moments, weights)
        yield from _zero_runs(folder, listing, contents, moments, weights)


def _moments(scans: Sequence[ScannedTensor]) -> _Moments:
    moments: _Moments = defaultdict(dict)
    for scan in scans:
        owner, _, slot = scan.name.rpartition(".")
        if scan.tensor.part == OPTIMIZER and slot in _SLOTS:
            moments[owner][slot] = scan
    return moments


def _updates(contents: Contents) -> int:
    step = contents.optimizer.step if contents.optimizer else None
    return (contents.step or 0) if step is None else step


def _is_moved(contents: Contents) -> bool:
    """Return True if each group made an update at a positive rate."""
    optimizer = contents.optimizer
    if optimizer is None or _updates(contents) < _UPDATES_MIN:
        return False
    options = optimizer.options or tuple({"lr": rate} for rate in optimizer.rates)
    rates = [
        max(decimal(group.get(name)) or 0.0 for name in ("lr", "initial_lr")) for group in options
    ]
    return bool(rates) and all(rate > 0 for rate in rates)


def _zero_moments(folder: Folder, contents: Contents, moments: _Moments) -> Iterator[Problem]:
    """Yield the problems of moments that are zero after an update."""
    zero = [owner for owner, slots in moments.items() if _are_all_zero(slots)]
    if len(zero) == len(moments):
        problem_text = (
            f"all moments of all {len(zero)} parameters are zero after {_updates(contents)} "
            "updates: the collected moments start again"
        )
        place = _representative(moments[zero[0]]).place
        yield Problem(place, problem_text, _STATE, cure=Remedy.COPY)
        return
    yield from _lost_moments_of_adam(contents, moments)
    if zero:
        yield from _single_zero_moments(folder, contents, moments, zero)


def _single_zero_moments(
    folder: Folder, contents: Contents, moments: _Moments, zero: Sequence[str]
) -> Iterator[Problem]:
    """Yield the problem of single parameters whose moments are zero."""
    checked = [f"{name}.{_SECOND}" for name in zero[:_NAMED_MAX] if _SECOND in moments[name]]
    is_lost = contradicts_older(folder, contents, checked)
    if not is_lost and _updates(contents) < _LONE_UPDATES_MIN:
        return
    names = f"`{zero[0][:80]}`" + (f" and {len(zero) - 1} more" if zero[1:] else "")
    follows = (
        "those of an older step are not: the collected moments start again"
        if is_lost
        else "most others are not: a parameter without a gradient has such moments"
    )
    problem_text = (
        f"all moments of {names} are zero after {_updates(contents)} updates, but {follows}"
    )
    loses = _state_of(len(zero)) if is_lost else ""
    yield Problem(_representative(moments[zero[0]]).place, problem_text, loses, cure=Remedy.COPY)


def _lost_moments_of_adam(contents: Contents, moments: _Moments) -> Iterator[Problem]:
    """Yield the problem of a zero moment of Adam beside a nonzero moment."""
    found = [
        (slots[lost], kept)
        for slots in moments.values()
        if {_FIRST, _SECOND} <= slots.keys() and slots[_FIRST].tensor.elements >= _ELEMENTS_MIN
        for lost, kept in ((_FIRST, _SECOND), (_SECOND, _FIRST))
        if slots[lost].is_zero
        and slots[lost].tensor.dtype in _WIDE
        and _is_remembered(contents, kept, slots[kept].counts.top)
    ]
    if found:
        moment, kept = found[0]
        problem_text = (
            f"`{moment.name[:80]}` is zero in all {moment.tensor.elements} numbers, but `{kept}` "
            "is not: it starts again"
        )
        yield Problem(moment.place, problem_text, _state_of(len(found)), cure=Remedy.COPY)


def _is_remembered(contents: Contents, kept: str, top: float) -> bool:
    """Return True if a moment shows a gradient that must still affect the other moment."""
    if kept == _FIRST:
        return top > _TINY
    options = contents.optimizer.options if contents.optimizer else ()
    betas = [group.get("betas") for group in options]
    if not top or not betas or not all(isinstance(beta, tuple) and beta for beta in betas):
        return False
    first = min(beta[0] for beta in betas if beta)
    if not 0 < first < 1:
        return False
    # The gradient may have been that of the first update.
    exponent = math.log10(1 - first) + math.log10(top) / 2 + _updates(contents) * math.log10(first)
    return exponent > _SMALLEST


def _state_of(count: int) -> str:
    return f"{_STATE} of {count} parameter{'s' if count > 1 else ''}"


def _zero_weights(
    contents: Contents, moments: _Moments, weights: Sequence[ScannedTensor]
) -> Iterator[Problem]:
    """Yield problems of weights of zeros whose moments are not zero."""
    zero = [scan for scan in weights if scan.is_zero and scan.tensor.elements >= _ELEMENTS_MIN]
    if not zero:
        return
    counts, owners = (
        _shapes(contents),
        Counter(_representative(slots).shape for slots in moments.values()),
    )
    idle = Counter(
        _representative(slots).shape for slots in moments.values() if _are_all_zero(slots)
    )
    by_shape: dict[tuple[int, ...], list[ScannedTensor]] = defaultdict(list)
    for scan in _without_zero_roles(zero, contents.tensors):
        by_shape[scan.shape].append(scan)
    found = [
        scan
        for shape, of_shape in by_shape.items()
        if len(of_shape) > max(0, counts[shape] - owners[shape]) + idle[shape]
        for scan in of_shape
    ]
    for scan in found[:_NAMED_MAX]:
        problem_text = (
            f"all {scan.tensor.elements} numbers of `{scan.name[:80]}` are zero, but the moments "
            f"are not: {HOLE}"
        )
        yield Problem(scan.place, problem_text, is_fatal=True, cure=Remedy.COPY, tensor=scan.name)


def _shapes(contents: Contents) -> Counter[tuple[int, ...]]:
    """Return the number of weights of each shape, including weights that were not read."""
    return Counter(tensor.shape for tensor in contents.tensors if tensor.part == MODEL)


def _without_zero_roles(
    zero: Sequence[ScannedTensor], tensors: Sequence[Tensor]
) -> list[ScannedTensor]:
    """Return the weights that are not zero in all layers, and weights outside of layers."""
    zero_names = {scan.name for scan in zero}
    roles: dict[tuple[str, str], list[str]] = defaultdict(list)
    role_by_name: dict[str, tuple[str, str]] = {}
    for tensor in tensors:
        match = LAYER.fullmatch(tensor.name) if tensor.part == MODEL else None
        if match:
            role_by_name[tensor.name] = (match["stack"] or "", match["own"])
            roles[role_by_name[tensor.name]].append(tensor.name)
    layers_by_name = {name: roles[role] for name, role in role_by_name.items()}
    return [
        scan
        for scan in zero
        if len(layers := layers_by_name.get(scan.name, [])) <= 1
        or not zero_names.issuperset(layers)
    ]


def _zero_runs(
    folder: Folder,
    listing: DirectoryListing,
    contents: Contents,
    moments: _Moments,
    weights: Sequence[ScannedTensor],
) -> Iterator[Problem]:
    """Yield problems of weights with pages of zeros where the moments are not zero."""
    candidates = [
        (scan, run)
        for scan in weights
        if (run := scan.counts.run) and not scan.is_zero and not scan.counts.hole
    ]
    counts = _shapes(contents) if candidates else Counter()
    for scan, (first, length) in candidates[:_NAMED_MAX]:
        owners = [
            one for slots in moments.values() if (one := _representative(slots)).shape == scan.shape
        ]
        part = min(length, _RUN_MAX)
        if len(owners) >= counts[scan.shape] and all(
            _nonzero(folder, listing, owner.tensor, first, part) > part / 2 for owner in owners
        ):
            problem_text = (
                f"{length} numbers of `{scan.name[:80]}` from number {first} on are zero, whole "
                f"pages of the file, but their moments are not: {HOLE}"
            )
            yield Problem(
                scan.place, problem_text, is_fatal=True, cure=Remedy.COPY, tensor=scan.name
            )


def _nonzero(
    folder: Folder, listing: DirectoryListing, tensor: Tensor, first: int, count: int
) -> int:
    try:
        data = Elements(folder, listing, tensor).read(first, count)
    except Unreadable:
        return 0
    return int(np.count_nonzero(values(data, tensor.dtype)))


def _are_all_zero(slots: Mapping[str, ScannedTensor]) -> bool:
    """Return True if all moments of a parameter are zero."""
    return all(scan.is_zero for scan in slots.values())


def _representative(slots: Mapping[str, ScannedTensor]) -> ScannedTensor:
    """Return the moment that represents all moments of a parameter."""
    return next(slots[slot] for slot in _SLOTS if slot in slots)
