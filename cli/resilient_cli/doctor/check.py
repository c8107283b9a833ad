"""One thing that was looked at, and what was found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

OK, WARNING = "ok", "warning"


@dataclass(frozen=True, slots=True)
class Check:
    """What one look found.

    Attributes:
        name: of what was looked at.
        is_ok: whether it is as training needs it.
        found: what it is.
        hint: what to do about it; empty if nothing.
    """

    name: str
    is_ok: bool
    found: str
    hint: str = ""

    @property
    def verdict(self) -> str:
        """``ok`` or ``warning``."""
        return OK if self.is_ok else WARNING

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able value."""
        return asdict(self)
