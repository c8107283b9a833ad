"""The answer of ``plan``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from resilient.accounting.planning import stop_seconds
from resilient_cli.render import Answer, Facts, Table, human_size
from resilient_cli.views.words import NONE, count, duration, share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.accounting.planning import Known, TierPlan, Times

_BOUNDS = {
    "": "the formula alone",
    "overhead": "bounded by the share of time that saves may take",
    "landing": "bounded by what a save takes to be whole",
    "longest": "bounded by an hour",
}


@dataclass(frozen=True, slots=True)
class Size:
    """Of the newest checkpoint; its name is empty where there is none."""

    checkpoint: str = ""
    size_bytes: int = 0
    ranks: int = 0


def planning(
    size: Size, known: Known, tiers: Sequence[TierPlan], notice_seconds: float | None
) -> Answer:
    """Return the answer of ``plan``."""
    needed, fits = stop_seconds(known), fits_notice(known, notice_seconds)
    shown = f"{human_size(size.size_bytes)}, {count(size.ranks, 'rank')}, {size.checkpoint}"
    pairs = [
        ("checkpoint", shown if size.checkpoint else NONE),
        ("save", _times(known.saving)),
        ("stall", _times(known.stalling)),
    ]
    if known.promoting.count:
        pairs.append(("promotion", _times(known.promoting)))
    step = known.step_seconds
    pairs.append(("step", _seconds(step) if step else NONE))
    pairs.append(("to stop", f"{_seconds(needed)}: a step, a save (p95), a margin"))
    if notice_seconds is not None:
        word = {True: "fits", False: "does not fit", None: "not known, no save was measured"}
        pairs.append(("notice", f"{_seconds(notice_seconds)}: {word[fits]}"))
    blocks: list[Facts | Table | str] = [Facts(tuple(pairs))]
    for one in tiers:
        blocks += ["", _reasoning(one), _table(one, step)]
    if not tiers:
        blocks.append("No save was measured: name the folder of event files.")
    document = {
        "checkpoint": asdict(size) if size.checkpoint else None,
        "known": asdict(known),
        "stop_seconds": needed,
        "notice_seconds": notice_seconds,
        "fits_notice": fits,
        "tiers": [_tier(one) for one in tiers],
    }
    return Answer("plan", "plan", document, tuple(blocks))


def fits_notice(known: Known, notice_seconds: float | None) -> bool | None:
    """Say whether a save fits a notice; None if nobody asked, or nothing was measured."""
    needed = stop_seconds(known)
    return None if needed is None or notice_seconds is None else needed <= notice_seconds


def _tier(one: TierPlan) -> dict[str, Any]:
    costs = {
        name: {"seconds": one.seconds[name], "share": cost.share, **asdict(cost)}
        for name, cost in one.expected.items()
    }
    return {"tier": one.tier, "interval": asdict(one.interval), "expected": costs}


def _reasoning(one: TierPlan) -> str:
    found, what = one.interval, "save" if one.tier == "saves" else "promotion"
    name = "Saves" if one.tier == "saves" else "Durable tier"
    return (
        f"{name}: every {_seconds(found.seconds)}. C {_seconds(found.cost_seconds)} for a {what}, "
        f"M {_seconds(found.mtbf_seconds)} between failures: best {_seconds(found.best_seconds)}; "
        f"{_BOUNDS[found.bound]}."
    )


def _table(one: TierPlan, step_seconds: float) -> Table:
    rows = []
    for name, cost in one.expected.items():
        steps = f"{cost.lost_seconds / step_seconds:.1f}" if step_seconds else NONE
        rows.append(
            (
                *(name, _seconds(one.seconds[name]), _seconds(cost.lost_seconds), steps),
                *(share(cost.saving_share, 1), share(cost.lost_share, 1), share(cost.share, 1)),
            )
        )
    columns = ("INTERVAL", "EVERY", "LOST PER FAILURE", "STEPS", "SAVING", "DONE AGAIN", "TOGETHER")
    return Table(columns, tuple(rows))


def _times(times: Times) -> str:
    if times.p50 is None or times.p95 is None:
        return NONE
    return f"p50 {_seconds(times.p50)}, p95 {_seconds(times.p95)} ({count(times.count, 'save')})"


def _seconds(seconds: float | None) -> str:
    return duration(None if seconds is None else 1000 * seconds)
