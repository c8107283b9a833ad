"""What the ranks' answers about their keepers amount to: pure, called by the coordinator."""

from __future__ import annotations

from typing import Any


def first_if_all(boards: list[Any]) -> Any:
    """Return the first rank's board if every rank has one."""
    return boards[0] if all(boards) else None


def way(shown: list[Any]) -> dict[str, Any]:
    """Return why not all can hand over, if so, and whether any has to be streamed."""
    reasons = [
        f"rank {rank}: {one['why_not']}" if len(shown) > 1 else one["why_not"]
        for rank, one in enumerate(shown)
        if one["why_not"]
    ]
    return {"why_not": next(iter(reasons), ""), "streams": any(one["streams"] for one in shown)}


def is_any_gone(shown: list[Any]) -> bool:
    """Say whether any rank has lost its keeper."""
    return any(one["gone"] for one in shown)
