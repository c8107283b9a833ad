"""Detection of weights whose shape or dtype most other files of a checkpoint contradict.

A weight has a shape and a dtype in its own file. Up to four other sources also show the shape or
the dtype: the configuration, the optimizer, an index, and the checkpoint of another step. A file
that most other sources contradict counts as damaged. All functions are pure.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from resilient.layouts.model import ADAM_ALONE, ITEM_BITS, MODEL, OPTIMIZER, Problem, Remedy

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from resilient.layouts.model import Contents, Tensor

_FIRST_MOMENTS = (".exp_avg", ".momentum_buffer", ".square_avg")
"""State with the shape and dtype of its parameter."""
_FLAT = "rank "
_FLOATS = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_WIDTHS_OF_ONE = (1, 2, 3, 4)
"""Multiples of the model's width along an axis of a layer, because projections are stacked."""
_VOTES = 2
PRECISION = "the precision of the weights"
_MOMENT_PRECISION = "the precision of the optimizer's moments"
_NARROW = ("F16", "BF16")
_INTEGERS = {"I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64", "BOOL"}


@dataclass(frozen=True, slots=True)
class Witnesses:
    """Facts about the weights from other files.

    Attributes:
        config: Configuration of the model.
        index: Bytes of all weights according to their index; None without one.
        beside: Weights of another step beside the checkpoint, by name.
        is_older: Whether that step is older.
        beside_name: Name of that step.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    index: int | None = None
    beside: Mapping[str, Tensor] = field(default_factory=dict)
    beside_name: str = "another step"
    is_older: bool = False


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
    """Return each source's vote: the other shape (True), this shape (False), or neither (None)."""
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
    """Return True if a configuration states the axis of the other shape, False for this shape."""
    if not _differs_in_one_axis(own, other):
        return None
    own_extent, other_extent = next((a, b) for a, b in zip(own, other, strict=True) if a != b)
    sizes = {value for value in config.values() if type(value) is int and value > 1}
    widths = {times * size for size in sizes for times in _WIDTHS_OF_ONE}
    fits_own, fits_other = own_extent in widths, other_extent in widths
    return None if fits_own == fits_other else fits_other


def _differs_in_one_axis(own: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(own) == len(other) and sum(a != b for a, b in zip(own, other, strict=True)) == 1


def _is_total(recorded: int | None, total: int, weight: Tensor, shape: tuple[int, ...]) -> bool:
    """Return True if the total of an index fits the other shape instead of this shape."""
    if recorded is None or recorded == total:
        return False
    elements = 1
    for axis in shape:
        elements *= axis
    return total - weight.size_bytes + elements * ITEM_BITS.get(weight.dtype, 0) // 8 == recorded


def odd_names(tensors: Sequence[Tensor], references: Witnesses) -> Iterator[Problem]:
    """Yield problems of weights that only this checkpoint or only another step has.

    A run never removes weights, but may add weights. Other files may use other names, for example
    for tied weights.

    Args:
        tensors: Tensors of the checkpoint.
        references: Facts from other files.
    """
    weights = {tensor.name: tensor for tensor in tensors if tensor.part == MODEL}
    beside = references.beside
    files = {name for weight in weights.values() for name in weight.files}
    if not references.is_older or files != {name for one in beside.values() for name in one.files}:
        return
    place = files.pop() if len(files) == 1 else "."
    if lost := [name for name in beside if name not in weights]:
        problem_text = (
            f"`{lost[0][:80]}` is missing, but {references.beside_name} has it: it would start "
            "again with new numbers"
        )
        loses = f"{len(lost)} of {len(beside)} weights"
        yield Problem(place, problem_text, loses, is_fatal=True, cure=Remedy.COPY)
    if added := [name for name in weights if name not in beside]:
        problem_text = (
            f"`{added[0][:80]}` is in it, but not in {references.beside_name}: a model without "
            "this weight ignores it"
        )
        yield Problem(place, problem_text, cure=Remedy.NEEDLESS)


def odd_dtypes(tensors: Sequence[Tensor], references: Witnesses) -> Iterator[Problem]:
    """Yield problems of weights, or of a configuration, with a dtype that most files contradict.

    Weights of a narrower dtype were rounded. Weights of a wider dtype lost nothing, because a
    resume casts them. :func:`wider_copies` returns these weights.

    Args:
        tensors: Tensors of the checkpoint.
        references: Facts from other files.
    """
    outliers = _outliers(tensors, references)
    wide = {weight for weight, _ in wider_copies(tensors, references)}
    for is_wide in (False, True):
        found = [outlier for outlier in outliers if (outlier[0] in wide) == is_wide]
        if not found:
            continue
        first, dtype_by_name = found[0]
        dtype = next(iter(dtype_by_name.values()))
        follows = f"a resume casts them to {dtype}" if is_wide else "they were rounded"
        problem_text = (
            f"{len(found)} of its weights are {first.dtype}, including `{first.name[:80]}`, but "
            f"{_joined(list(dtype_by_name))} say {dtype}: {follows}"
        )
        loses, cure = ("", Remedy.NEEDLESS) if is_wide else (PRECISION, Remedy.COPY)
        yield Problem(_place(first), problem_text, loses, cure=cure)
    yield from _odd_config(tensors, references)


def integer_weights(tensors: Sequence[Tensor], references: Witnesses) -> Iterator[Problem]:
    """Yield the first weight of integers that was saved as floating-point numbers in the run.

    torch trains no integers. So moments of a shape belong to weights of floating-point numbers.

    Args:
        tensors: Tensors of the checkpoint.
        references: Facts from other files.
    """
    weights = [tensor for tensor in tensors if tensor.part == MODEL]
    float_counts = Counter(weight.shape for weight in weights if weight.dtype not in _INTEGERS)
    moments = [moment for moment in _moments(tensors) if moment.dtype in _FLOATS.values()]
    moment_counts = Counter(moment.shape for moment in moments)
    for weight in weights:
        if weight.dtype not in _INTEGERS:
            continue
        neighbour_weight = references.beside.get(weight.name)
        evidence = []
        if moment_counts[weight.shape] > float_counts[weight.shape]:
            evidence.append("the optimizer trains floating-point numbers of its shape")
        if neighbour_weight is not None and neighbour_weight.dtype not in _INTEGERS:
            evidence.append(f"it is {neighbour_weight.dtype} in {references.beside_name}")
        if evidence:
            problem_text = (
                f"`{weight.name[:80]}` is {weight.dtype}, but {' and '.join(evidence)}: its "
                "fractions are lost"
            )
            yield Problem(
                _place(weight), problem_text, is_fatal=True, cure=Remedy.COPY, tensor=weight.name
            )
            return


def wider_copies(tensors: Sequence[Tensor], references: Witnesses) -> list[tuple[Tensor, str]]:
    """Return weights of a wider dtype than most files state, with the stated dtype.

    Args:
        tensors: Tensors of the checkpoint.
        references: Facts from other files.
    """
    return [
        (weight, dtype)
        for weight, dtype_by_name in _outliers(tensors, references)
        if ITEM_BITS[dtype := next(iter(dtype_by_name.values()))] < ITEM_BITS[weight.dtype]
    ]


def _outliers(
    tensors: Sequence[Tensor], references: Witnesses
) -> list[tuple[Tensor, dict[str, str]]]:
    """Return the weights whose dtype most files contradict, with the dtype from each file."""
    weights, moment_dtypes = _float_weights(tensors), _moment_dtypes(tensors)
    is_trained = len(_moments(tensors)) >= len(weights)
    outliers = []
    for weight in weights:
        neighbour_weight = references.beside.get(weight.name)
        votes = {
            "config.json": _stated_dtype(references.config),
            "the optimizer": next(iter(moment_dtypes))
            if len(moment_dtypes) == 1 and is_trained
            else None,
            references.beside_name: neighbour_weight.dtype if neighbour_weight else None,
        }
        dtype_by_name = {
            name: dtype for name, dtype in votes.items() if dtype and dtype != weight.dtype
        }
        agreeing_names = [name for name, dtype in votes.items() if dtype == weight.dtype]
        is_outvoted = len(dtype_by_name) >= _VOTES and not agreeing_names
        if is_outvoted and len(set(dtype_by_name.values())) == 1:
            outliers.append((weight, dtype_by_name))
    return outliers


def _odd_config(tensors: Sequence[Tensor], references: Witnesses) -> Iterator[Problem]:
    """Yield the problem of a configuration whose dtype differs from weights and optimizer."""
    weights, moment_dtypes = _float_weights(tensors), _moment_dtypes(tensors)
    dtypes, stated_dtype = {weight.dtype for weight in weights}, _stated_dtype(references.config)
    if (
        stated_dtype
        and len(dtypes) == 1
        and stated_dtype not in dtypes
        and moment_dtypes == dtypes
        and len(_moments(tensors)) >= len(weights)
    ):
        problem_text = (
            f"its `dtype` is {_dtype_text(references.config)}, but weights and optimizer are "
            f"{dtypes.pop()}"
        )
        consequence = "`from_pretrained` of this folder would create another model"
        yield Problem("config.json", f"{problem_text}: {consequence}")


def odd_moments(contents: Contents, references: Witnesses) -> Iterator[Problem]:
    """Yield the problem of 16-bit moments beside wider weights.

    torch's Adam keeps moments in the dtype of their weights, even after a load. Other optimizers
    may keep their moments in fewer bits, so only groups of torch's Adam are checked.

    Args:
        contents: Contents of the checkpoint.
        references: Facts from other files.
    """
    groups = contents.optimizer.options if contents.optimizer else ()
    dtypes = {weight.dtype for weight in _float_weights(contents.tensors)}
    moment_dtypes = _moment_dtypes(contents.tensors)
    voted_dtypes = {_stated_dtype(references.config)} | {
        weight.dtype for weight in references.beside.values() if weight.dtype in _FLOATS.values()
    }
    is_stated = not voted_dtypes & set(_NARROW)
    if (
        groups
        and all(group.keys() >= ADAM_ALONE for group in groups)
        and is_stated
        and dtypes
        and not dtypes & set(_NARROW)
        and (narrow := sorted(moment_dtypes & set(_NARROW)))
    ):
        moment = next(one for one in _moments(contents.tensors) if one.dtype in narrow)
        problem_text = (
            f"`{moment.name[:80]}` is {moment.dtype}, but the weights are "
            f"{' and '.join(sorted(dtypes))}, and torch's Adam keeps both in one dtype: it was "
            "rounded"
        )
        yield Problem(_place(moment), problem_text, _MOMENT_PRECISION, cure=Remedy.COPY)


def _float_weights(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [
        tensor for tensor in tensors if tensor.part == MODEL and tensor.dtype in _FLOATS.values()
    ]


def _moment_dtypes(tensors: Sequence[Tensor]) -> set[str]:
    return {moment.dtype for moment in _moments(tensors)}


def _dtype_text(config: Mapping[str, Any]) -> Any:
    return config.get("dtype", config.get("torch_dtype"))


def _stated_dtype(config: Mapping[str, Any]) -> str | None:
    """Return the dtype in a configuration as a safetensors name."""
    text = _dtype_text(config)
    return _FLOATS.get(text.removeprefix("torch.")) if isinstance(text, str) else None


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
