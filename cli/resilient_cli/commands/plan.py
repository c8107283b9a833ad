"""``resilient plan``: costs of saves and failures, and the best save interval."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from resilient.checkpoint.catalog import read_manifest
from resilient.checkpoint.generations import read_generations
from resilient.errors import ConfigError, UsageError
from resilient.goodput.event_log import read_records
from resilient.goodput.report import build_report
from resilient.goodput.save_planning import (
    measure_save_costs,
    parse_every,
    plan_tiers,
    stop_seconds,
)
from resilient.save_interval import observe
from resilient_cli.output import CommandResult, KeyValues, Table, human_size, show
from resilient_cli.repositories import Repo, committed_checkpoints, open_repository, output_of
from resilient_cli.views.text import NONE, count, duration, share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.goodput.report import GoodputReport
    from resilient.goodput.save_planning import SaveCosts, TierPlan, Times
    from resilient.storage.store import Store

_BOUNDS = {
    "": "not limited",
    "overhead": "limited by the share of time that saves may take",
    "landing": "limited by the time until a save is committed",
    "longest": "limited to one hour",
}


@dataclass(frozen=True, slots=True)
class Size:
    """Size of the newest checkpoint, with an empty name if there is no checkpoint."""

    checkpoint: str = ""
    size_bytes: int = 0
    ranks: int = 0


def build_plan_result(
    size: Size, costs: SaveCosts, tiers: Sequence[TierPlan], notice_seconds: float | None
) -> CommandResult:
    """Build the answer of ``plan``."""
    needed_seconds, fits = stop_seconds(costs), fits_notice(costs, notice_seconds)
    size_text = f"{human_size(size.size_bytes)}, {count(size.ranks, 'rank')}, {size.checkpoint}"
    pairs = [
        ("checkpoint", size_text if size.checkpoint else NONE),
        ("save", _times(costs.saving)),
        ("stall", _times(costs.stalling)),
    ]
    if costs.promoting.count:
        pairs.append(("promotion", _times(costs.promoting)))
    step = costs.step_seconds
    pairs.append(("step", _seconds(step) if step else NONE))
    pairs.append(("to stop", f"{_seconds(needed_seconds)}: a step, a save (p95), a margin"))
    if notice_seconds is not None:
        fit_text = {True: "fits", False: "does not fit", None: "unknown, no save was measured"}
        pairs.append(("notice", f"{_seconds(notice_seconds)}: {fit_text[fits]}"))
    blocks: list[KeyValues | Table | str] = [KeyValues(tuple(pairs))]
    for tier in tiers:
        blocks += ["", _explain_interval(tier), _table(tier, step)]
    if not tiers:
        blocks.append("No save was measured: name the folder of event files.")
    document = {
        "checkpoint": asdict(size) if size.checkpoint else None,
        "known": asdict(costs),
        "stop_seconds": needed_seconds,
        "notice_seconds": notice_seconds,
        "fits_notice": fits,
        "tiers": [_tier(tier) for tier in tiers],
    }
    return CommandResult("plan", "plan", document, tuple(blocks))


def fits_notice(costs: SaveCosts, notice_seconds: float | None) -> bool | None:
    """Check if a save fits a preemption notice; None without a notice or a measured save."""
    needed_seconds = stop_seconds(costs)
    return (
        None
        if needed_seconds is None or notice_seconds is None
        else needed_seconds <= notice_seconds
    )


def _tier(tier: TierPlan) -> dict[str, Any]:
    costs = {
        name: {"seconds": tier.seconds[name], "share": cost.share, **asdict(cost)}
        for name, cost in tier.expected.items()
    }
    return {"tier": tier.tier, "interval": asdict(tier.interval), "expected": costs}


def _explain_interval(tier: TierPlan) -> str:
    interval, operation = tier.interval, "save" if tier.tier == "saves" else "promotion"
    name = "Saves" if tier.tier == "saves" else "Durable tier"
    return (
        f"{name}: every {_seconds(interval.seconds)}. C {_seconds(interval.cost_seconds)} for a "
        f"{operation}, M {_seconds(interval.mtbf_seconds)} between failures: best "
        f"{_seconds(interval.best_seconds)}; {_BOUNDS[interval.bound]}."
    )


def _table(tier: TierPlan, step_seconds: float) -> Table:
    rows = []
    for name, cost in tier.expected.items():
        steps = f"{cost.lost_seconds / step_seconds:.1f}" if step_seconds else NONE
        rows.append(
            (
                *(name, _seconds(tier.seconds[name]), _seconds(cost.lost_seconds), steps),
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


Run = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[RUN]...",
        help="Folder of event files, or the output folder of the run; several for several hosts.",
    ),
]
Notice = Annotated[
    float | None,
    typer.Option(
        min=0, help="Seconds between a preemption notice and the preemption: 120 on EC2 spot."
    ),
]
Mtbf = Annotated[
    str, typer.Option(help="Time between failures, such as 30m or 6h, instead of the measured one.")
]
Every = Annotated[str, typer.Option(help="Another interval to compare: 5m, 30s, 500steps or auto.")]
DOES_NOT_FIT = 1


def plan(
    ctx: typer.Context,
    run: Run = None,
    *,
    repo: Repo = None,
    notice: Notice = None,
    mtbf: Mtbf = "",
    every: Every = "",
) -> int:
    """Show the size of a checkpoint, the cost of a save, and how often to save.

    The size is of the newest checkpoint in the repository. Times and failures come from the event
    files of the run; without them, failures come from the repository's generation records. Exit
    code 1: a save does not fit --notice, or its time is unknown.

    Example: resilient plan runs/mine --notice 120
    """
    if not run and not repo:
        raise UsageError(
            "no run was named: give RUN, or --repo, or both", hint="resilient plan RUN"
        )
    mtbf_seconds = _time(mtbf)
    interval = parse_every(every, "--every") if every else None
    records = read_records(run) if run else []
    goodput = build_report(records)
    costs, size = measure_save_costs(goodput, records), _size_from_events(goodput)
    if repo:
        store = open_repository(None, repo)
        size = _size_from_store(store) or size
        if not run:
            starts = [
                (generation.cause, generation.claimed_at) for generation in read_generations(store)
            ]
            costs = replace(costs, failures=observe(starts))
    requested_seconds = (
        (interval.seconds or interval.steps * costs.step_seconds) if interval else 0.0
    )
    tiers = plan_tiers(costs, mtbf_seconds, requested_seconds)
    show(build_plan_result(size, costs, tiers, notice), output_of(ctx))
    fits = notice is None or fits_notice(costs, notice)
    return 0 if fits else DOES_NOT_FIT


def _time(mtbf: str) -> float | None:
    if not mtbf:
        return None
    seconds = parse_every(mtbf, "--mtbf").seconds
    if not seconds:
        raise ConfigError(f"--mtbf {mtbf!r} is not a duration: use 30m, 6h")
    return seconds


def _size_from_events(goodput: GoodputReport) -> Size:
    if not goodput.saved:
        return Size()
    newest = goodput.saved[-1]
    ranks = {attempt.life.number: attempt.life.world_size for attempt in goodput.doings}
    return Size(newest.checkpoint, newest.size_bytes, ranks.get(newest.life, 0))


def _size_from_store(store: Store) -> Size | None:
    checkpoints = committed_checkpoints(store)
    if not checkpoints:
        return None
    manifest = read_manifest(store, checkpoints[0])
    ranks = len({file.rank for file in manifest.files})
    return Size(checkpoints[0].folder, manifest.size_bytes, ranks)
