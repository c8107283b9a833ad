"""What became of launchers that were asked to leave."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from resilient_cli.render import Answer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.accounting.agents import Agent


def stopped(found: Sequence[Agent]) -> Answer:
    """Return how each launcher ended, as far as it said it."""
    lines = tuple(_said(one) for one in found)
    ids = tuple(str(one.pid) for one in found)
    return Answer("stop", "stop", {"agents": [asdict(one) for one in found]}, lines, ids)


def _said(one: Agent) -> str:
    if one.exit_code is None:
        return f"pid {one.pid}: asked to save and leave"
    return f"pid {one.pid}: exit {one.exit_code}, {one.reason}"
