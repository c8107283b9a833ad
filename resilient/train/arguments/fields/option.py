"""How a field says its default and its help."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Value = TypeVar("Value")


def option(default: Value, help: str, *, is_secret: bool = False) -> Value:  # noqa: A002 - the key users of dataclasses know
    """Return a dataclass field with its help text as metadata.

    Args:
        default: its value when nobody says another.
        help: what it does, in one line.
        is_secret: never shown, never saved.
    """
    metadata = {"help": help, "is_secret": is_secret}
    made: Value = field(default=default, repr=not is_secret, metadata=metadata)
    return made


def made_by(factory: Callable[[], Any], help: str) -> Any:  # noqa: A002 - as above
    """Return a field whose default is made anew for each object, as lists must be."""
    return field(default_factory=factory, metadata={"help": help, "is_secret": False})
