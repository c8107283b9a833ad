"""Weights that the configuration, the optimizer, an index or another step contradict (pure).

Up to four sources give the shape and the dtype of a weight. The file that most others contradict
counts as damaged.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from resilient.layouts.model import ITEM_BITS, MODEL, OPTIMIZER, Problem, Remedy

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from resilient.layouts.model import Tensor

_FIRST_MOMENTS = (".exp_avg", ".momentum_buffer", ".square_avg")
"""State that is stored once per parameter, in its shape and dtype."""
_FLAT = "rank "
_FLOATS = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_WIDTHS_OF_ONE = (1, 2, 3, 4)
"""Multiples of the model's width along an axis of a layer: projections stack it."""
_VOTES = 2
_PRECISION = "the precision of the weights"


@dataclass(frozen=True, slots=True)
class Witnesses:
    """Facts about the weights from other files.

    Attributes:
        config: Configuration of the model.
        index: Bytes of all weights according to their index; None without one.
        beside: Weights of another step, by name.
        beside_name: Name of that step.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    index: int | None = None
    beside: Mapping[str, Tensor] = field(default_factory=dict)
    beside_name: str = "another step"


def odd_weight(tensors: Sequence[Tensor], references: Witnesses) -> Problem | None:
    """Return the first weight whose shape most other files contradict.

    Args:
        tensors: Tensors of the checkpoint.
        references: Facts from other files.
    """
    weights = [tensor for tensor in tensors if tensor.part == MODEL]
    moments = Counter(moment.shape for moment in _moments(tensors))
    counts = Counter(weight.shape for weight in weights)
    missing_shapes, extra_shapes = moments - counts, counts - moments
    total = sum(weight.size_bytes for weight in weights)
    for weight in weights:
        neighbour_weight = references.beside.get(weight.name)
        shapes = (
            [neighbour_weight.shape]
            if neighbour_weight and neighbour_weight.shape != weight.shape
            else []
        )
        shapes += [
            shape
            for shape in missing_shapes
            if extra_shapes[weight.shape] and _differs_in_one_axis(weight.shape, shape)
        ]
        for shape in dict.fromkeys(shapes):
            votes = _votes(
                weight,
                shape,
                references,
                is_lacking=missing_shapes[shape] > 0 and extra_shapes[weight.shape] > 0,
            )
            odd_names = [name for name, is_against in votes.items() if is_against]
            against = [name for name, is_against in votes.items() if is_against is False]
            if _is_total(references.index, total, weight, shape):
                odd_names.append("the index")
            if len(odd_names) >= _VOTES and len(odd_names) > len(against):
                problem_text = (
                    f"`{weight.name[:80]}` has the shape {list(weight.shape)}, but "
                    f"{_joined(odd_names)} say {list(shape)}: the weight is damaged"
                )
                return Problem(
                    _place(weight),
                    problem_text,
                    is_fatal=True,
                    cure=Remedy.COPY,
                    tensor=weight.name,
                )
    return None


def _votes(
    weight: Tensor, shape: tuple[int, ...], references: Witnesses, *, is_lacking: bool
) -> dict[str, bool | None]:
    """Return for each source: the other shape (True), this shape (False), or neither (None)."""
    neighbour_weight = references.beside.get(weight.name)
    return {
        "the optimizer": True if is_lacking else None,
        "config.json": _by_config(weight.shape, shape, references.config),
        references.beside_name: None
        if neighbour_weight is None
        else neighbour_weight.shape == shape,
    }


def _by_config(
    own: tuple[int, ...], other: tuple[int, ...], config: Mapping[str, Any]
) -> bool | None:
    """Return True if a configuration has the other shape's axis, False for the weight's own."""
    if not _differs_in_one_axis(own, other):
        return None
    own_extent, other_extent = next((a, b) for a, b in zip(own, other, strict=True) if a != b)
    sizes = {value for value in config.values() if type(value) is int and value > 1}
    widths = {times * size for size in sizes for times in _WIDTHS_OF_ONE}
    is_mine, is_theirs = own_extent in widths, other_extent in widths
    return None if is_mine == is_theirs else is_theirs


def _differs_in_one_axis(own: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(own) == len(other) and sum(a != b for a, b in zip(own, other, strict=True)) == 1


def _is_total(recorded: int | None, total: int, weight: Tensor, shape: tuple[int, ...]) -> bool:
    """Return True if an index counts the bytes of the other shape instead of this one."""
    if recorded is None or recorded == total:
        return False
    elements = 1
    for axis in shape:
        elements *= axis
    return total - weight.size_bytes + elements * ITEM_BITS.get(weight.dtype, 0) // 8 == recorded


def odd_dtypes(tensors: Sequence[Tensor], references: Witnesses) -> Iterator[Problem]:
    """Yield weights whose dtype most files contradict, or a configuration with a wrong dtype.

    Args:
        tensors: Tensors of the checkpoint.
        references: Facts from other files.
    """
    weights = [
        tensor for tensor in tensors if tensor.part == MODEL and tensor.dtype in _FLOATS.values()
    ]
    moments = _moments(tensors)
    moment_dtypes = {moment.dtype for moment in moments}
    dtype_text = references.config.get("dtype", references.config.get("torch_dtype"))
    stated_dtype = (
        _FLOATS.get(dtype_text.removeprefix("torch.")) if isinstance(dtype_text, str) else None
    )
    is_trained = len(moments) >= len(weights) > 0
    outliers = []
    for weight in weights:
        neighbour_weight = references.beside.get(weight.name)
        votes = {
            "config.json": stated_dtype,
            "the optimizer": next(iter(moment_dtypes))
            if len(moment_dtypes) == 1 and is_trained
            else None,
            references.beside_name: neighbour_weight.dtype if neighbour_weight else None,
        }
        dtype_by_name = {
            name: dtype for name, dtype in votes.items() if dtype and dtype != weight.dtype
        }
        agreeing_names = [name for name, dtype in votes.items() if dtype == weight.dtype]
        if (
            len(dtype_by_name) >= _VOTES
            and len(set(dtype_by_name.values())) == 1
            and not agreeing_names
        ):
            outliers.append((weight, dtype_by_name))
    if outliers:
        first, dtype_by_name = outliers[0]
        problem_text = (
            f"{len(outliers)} of its weights are {first.dtype}, including `{first.name[:80]}`, but "
            f"{_joined(list(dtype_by_name))} say {next(iter(dtype_by_name.values()))}: they were "
            "rounded"
        )
        yield Problem(_place(first), problem_text, _PRECISION, cure=Remedy.COPY)
    dtypes = {weight.dtype for weight in weights}
    if (
        stated_dtype
        and len(dtypes) == 1
        and stated_dtype not in dtypes
        and moment_dtypes == dtypes
        and is_trained
    ):
        problem_text = f"its `dtype` is {dtype_text}, but weights and optimizer are {dtypes.pop()}"
        consequence = "`from_pretrained` of this folder would create another model"
        yield Problem("config.json", f"{problem_text}: {consequence}")


def _moments(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [
        tensor
        for tensor in tensors
        if tensor.part == OPTIMIZER
        and tensor.name.endswith(_FIRST_MOMENTS)
        and not tensor.name.startswith(_FLAT)
    ]


def _joined(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def _place(tensor: Tensor) -> str:
    return tensor.files[0] if tensor.files else "."
