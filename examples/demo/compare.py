"""Comparison of two runs, bit by bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.testing.run_equality import differences, ending

if TYPE_CHECKING:
    from resilient.storage.store import Store


def compare(left: Store, right: Store) -> dict[str, bool]:
    """Return True for each aspect of two runs that is the same in every bit."""
    a, b = ending(left), ending(right)
    ranks = sorted(name for name in a if name.startswith(("samples_", "rng_state_")))
    aspects = {
        "weights": ["model"],
        "optimizer": ["optimizer", "scheduler"],
        "sample order": [name for name in ranks if name.startswith("samples_")],
        "random state": [name for name in ranks if name.startswith("rng_state_")],
    }
    verdict = {
        aspect: bool(names) and not any(differences(a[name], b.get(name)) for name in names)
        for aspect, names in aspects.items()
    }
    histories = [state["trainer_state"]["log_history"] for state in (a, b)]
    return {**verdict, "loss history": bool(histories[0]) and not differences(*histories)}
