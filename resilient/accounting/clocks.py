"""The clocks of several hosts, held against each other."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from resilient.accounting.records import Record

TOLERANCE_MS = 2_000
"""Hosts begin a life within that; clocks that differ by less are believed."""


def align(records: Sequence[Record]) -> list[Record]:
    """Return the records with the times of all hosts as the first one's clock has them, by time.

    All hosts of a life leave its rendezvous together. So what their clocks say of that moment
    differs by their error, the median over all lives. Records of a host that met no other stay.
    """
    offsets = offsets_ms(records)
    if not any(offsets.values()):
        return list(records)
    moved = [replace(one, at_ms=one.at_ms - offsets.get(one.host, 0)) for one in records]
    return sorted(moved, key=lambda one: one.at_ms)


def offsets_ms(records: Sequence[Record]) -> Mapping[str, int]:
    """Return by how much each host's clock is ahead of the first host's, 0 within the tolerance."""
    met: dict[str, dict[str, int]] = defaultdict(dict)
    for one in records:
        if one.event == "WorkerGroupStarted" and one.host and one.text("attempt"):
            met[one.text("attempt")].setdefault(
                one.host, one.at_ms - one.milliseconds("start_seconds")
            )
    first = next((host for hosts in met.values() for host in hosts), "")
    ahead: dict[str, list[int]] = defaultdict(list)
    for hosts in met.values():
        for host, at_ms in hosts.items():
            if first in hosts:
                ahead[host].append(at_ms - hosts[first])
    medians = {host: round(statistics.median(values)) for host, values in ahead.items()}
    return {host: one if abs(one) > TOLERANCE_MS else 0 for host, one in medians.items()}
