"""Times that a clock which was set meanwhile cannot bend (pure).

Each record says, beside the time of day, the seconds of its machine since that was started, which
nobody can set. All processes of one start of a machine share them, so what they tell differs by
what went by. The time of day is only asked where on the calendar that lies: what most of them say.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from resilient.clock import boot_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from resilient.accounting.records import Record
    from resilient.clock import Clock


def steady(records: Iterable[Record]) -> list[Record]:
    """Return the records by time, each as long after another as went by on their machine.

    Those that do not say which machine's seconds they tell keep their time of day.
    """
    told = list(records)
    offsets = _offsets_ms(told)
    return sorted((_moved(one, offsets) for one in told), key=lambda one: one.at_ms)


def present_ms(records: Iterable[Record], clock: Clock, now_ms: int) -> int:
    """Return the present where :func:`steady` would put a record that this process told now.

    Args:
        records: of the run, as told.
        clock: of this process.
        now_ms: its time of day, for a run of which nothing was told on this machine.
    """
    boot = boot_name()
    offset_ms = _offsets_ms(one for one in records if one.text("boot") == boot).get(boot)
    return now_ms if offset_ms is None else round(1000 * clock.monotonic_seconds()) + offset_ms


def _offsets_ms(records: Iterable[Record]) -> Mapping[str, int]:
    """Return what to add to the milliseconds of each start of a machine."""
    found: dict[str, list[int]] = defaultdict(list)
    for one in records:
        if _is_steady(one):
            found[one.text("boot")].append(one.at_ms - _since_boot_ms(one))
    return {boot: statistics.median_low(offsets) for boot, offsets in found.items()}


def _moved(one: Record, offsets: Mapping[str, int]) -> Record:
    if not _is_steady(one):
        return one
    return replace(one, at_ms=max(0, _since_boot_ms(one) + offsets[one.text("boot")]))


def _is_steady(one: Record) -> bool:
    return bool(one.text("boot")) and one.number("monotonic", -1.0) >= 0.0


def _since_boot_ms(one: Record) -> int:
    return one.milliseconds("monotonic")
