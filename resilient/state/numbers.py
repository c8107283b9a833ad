"""Plain numbers of measured values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilient.errors import UnsavableState

if TYPE_CHECKING:
    from collections.abc import Mapping


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as plain numbers; tensors of one element are their value.

    Raises:
        UnsavableState: one is no number.
    """
    plain = {}
    for name, value in metrics.items():
        try:
            plain[name] = float(value.detach() if hasattr(value, "detach") else value)
        except (TypeError, ValueError, RuntimeError) as error:
            path = f"metrics/{name}"
            raise UnsavableState(
                f"`{path}` is no number: it is a {type(value).__name__}",
                path=path,
                hint="give one number for each name, of a tensor its mean() or item()",
            ) from error
    return plain


_PLAIN = frozenset({type(None), bool, int, float, str})


def plain_value(value: Any) -> Any:
    """Return a logged value with NumPy numbers and one-element tensors as Python numbers.

    Dicts, lists and tuples are converted inside. All other values stay as they are.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, dict):
        return {name: plain_value(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(one) for one in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value.item() if _elements(value) == 1 else value


def plain_log(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a log as plain values.

    Raises:
        UnsavableState: an entry is neither a number nor text, nor a dict or list of them.
    """
    plain = {name: plain_value(value) for name, value in logs.items()}
    for name, value in plain.items():
        odd = _odd_one(value)
        if odd is not None:
            raise UnsavableState(
                f"cannot log `{name}`: {_described(odd)} is no number and no text, and the log is "
                "saved with each checkpoint; older checkpoints are intact",
                path=f"log_history/{name}",
                hint=f"log one number for each name, as `{name}_0`, or the mean as `{name}`",
            )
    return plain


def _elements(value: Any) -> int:
    """Return the number of elements of an array, a tensor or a NumPy number; 0 of others."""
    if not callable(getattr(value, "item", None)):
        return 0
    count = getattr(value, "numel", None)
    size = count() if callable(count) else getattr(value, "size", 0)
    return size if isinstance(size, int) else 0


def _odd_one(value: Any) -> Any:
    """Return the first value inside that is not plain, None if there is none."""
    if isinstance(value, dict):
        inside = [*value.values(), *(name for name in value if type(name) is not str)]
        return next((one for one in map(_odd_one, inside) if one is not None), None)
    if isinstance(value, list):
        return next((one for one in map(_odd_one, value) if one is not None), None)
    return None if type(value) in _PLAIN else value


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    kind = f"a value of the class `{type(value).__name__}`"
    return kind if shape is None else f"{kind} with the shape {tuple(shape)}"
