"""``optim_args``: text or a dict, to typed options that an optimizer has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError
from resilient.train.arguments.words import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping

_YES, _NO = ("true", "1", "yes"), ("false", "0", "no")


def parse_options(given: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Return options as a dict; text is ``key=value,key=value``, as in Transformers.

    Raises:
        ConfigError: a pair has no key or no value.
    """
    if not given:
        return {}
    if not isinstance(given, str):
        return dict(given)
    pairs = [pair.partition("=") for pair in given.replace(" ", "").split(",")]
    if not all(key and equals and value for key, equals, value in pairs):
        raise ConfigError(f"`optim_args`={given!r} is not key=value,key=value")
    return {key: value for key, _, value in pairs}


def typed(name: str, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``options`` in the types of ``defaults``; only what was given.

    Args:
        name: of the optimizer, for errors.
        options: what was given.
        defaults: what the optimizer has; each value's type says what text means. A type itself
            stands for an option without a default.

    Raises:
        ConfigError: the optimizer has no such option, or the value is of another type.
    """
    for option in options:
        if option not in defaults:
            raise ConfigError(
                f"`optim_args` name `{option}`, which `{name}` does not have"
                f"{did_you_mean(option, list(defaults))}: "
                f"it has {', '.join(defaults) or 'none'}"
            )
    return {option: _as(defaults[option], option, value) for option, value in options.items()}


def _as(like: Any, option: str, value: Any) -> Any:
    kind = like if isinstance(like, type) else type(like)
    word = str(value).lower()
    if kind is bool and word in (*_YES, *_NO):
        return word in _YES
    if kind in (int, float, str):
        try:
            return kind(value)
        except (TypeError, ValueError):
            pass
    raise ConfigError(f"`optim_args` has `{option}`={value!r}, which is no {kind.__name__}")
