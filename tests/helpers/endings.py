"""What a run at a path or URL ended with."""

from __future__ import annotations

from resilient.storage.open import open_store
from resilient.testing.run_equality import differences
from resilient.testing.run_equality import ending as ending_of

__all__ = ["differences", "ending"]


def ending(url: object, ref: str = "latest") -> dict[str, object]:
    return ending_of(open_store(str(url)), ref)
