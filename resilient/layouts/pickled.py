"""What a pickle holds that plain values cannot say: names, calls, and tensors kept elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Name:
    """What a pickle would import."""

    module: str
    name: str

    @property
    def dotted(self) -> str:
        """Both parts with a dot between."""
        return f"{self.module}.{self.name}"


class Unordered(list[Any]):
    """The elements of a set, in no order that means anything."""


@dataclass(slots=True, eq=False)
class Made:
    """What a pickle would call, and what it would put into the result."""

    name: Any
    args: Any = ()
    state: Any = None
    items: list[Any] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """The dotted name of what would be called."""
        return self.name.dotted if isinstance(self.name, Name) else ""

    def get(self, attribute: str, default: Any = None) -> Any:
        """Return an attribute that the state would set."""
        for one in self.state if isinstance(self.state, tuple) else (self.state,):
            if isinstance(one, dict) and attribute in one:
                return one[attribute]
        return default


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A reference to bytes beside the pickle: what torch calls a storage.

    ``device`` is where it was when it was saved, as ``cuda:0``.
    """

    dtype: str
    key: str
    elements: int
    device: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class TensorRef:
    """A tensor whose bytes are elsewhere; ``offset`` and ``strides`` in elements."""

    dtype: str
    shape: tuple[int, ...]
    storage: Stored | None = None
    offset: int = 0
    strides: tuple[int, ...] | None = None
