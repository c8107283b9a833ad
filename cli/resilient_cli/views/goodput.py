"""Results of ``report`` and ``status``.

For a run without events, the results come from its repository.
"""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from resilient.goodput.timeline import TimeClass
from resilient_cli.output import CommandResult, KeyValues, Table, human_size
from resilient_cli.views.text import NONE, age, count, duration, share

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resilient.checkpoint.generations import Generation
    from resilient.goodput.report import GoodputReport
    from resilient.goodput.timeline import Fault
    from resilient_cli.survey import Survey
    from resilient_cli.views.listing import Listing

UNTOLD = "The run wrote no events here, so its time cannot be shown. To write events:"
KEEPS = "resilient train --events FOLDER SCRIPT"


def reporting_stored(found: Listing, page: str) -> CommandResult:
    """Return the result of ``report`` for a repository without events.

    Args:
        found: Contents of the repository.
        page: Path of the HTML page; empty if none was written.
    """
    began, ended = span_of(found)
    lives = [_life(found, generation) for generation in found.generations]
    document = {
        "events": False,
        "began": began,
        "ended": ended,
        "wall_ms": _milliseconds(began, ended),
        "spent_ms": dict.fromkeys((time_class.value for time_class in TimeClass), 0),
        "goodput": 0.0,
        "steps": _step(found),
        "max_steps": 0,
        "lost_steps": 0,
        "lives": lives,
        "faults": [],
        "causes": {},
        "checkpoints": len(found.surveys),
        "written_bytes": found.size_bytes,
        "intervals": [],
        "skew_ms": {},
        "page": page or None,
    }
    rows = tuple(_row(*pair) for pair in zip(lives, found.generations, strict=True))
    said = f"Step {_step(found)}, {count(len(lives), 'generation')}, "
    said += f"{count(len(found.surveys), 'checkpoint')}, {human_size(found.size_bytes)}."
    blocks: tuple[Table | str, ...] = (
        Table(("GEN", "CAUSE", "BEGAN", "RANKS", "FROM STEP", "SAVED UP TO"), rows),
        said,
        f"{UNTOLD} {KEEPS}",
        *([f"page: {page}"] if page else []),
    )
    return CommandResult("report", "account", document, blocks)


def standing_stored(found: Listing, now: str) -> CommandResult:
    """Return the result of ``status`` for a repository without events.

    Args:
        found: Contents of the repository.
        now: Current time for ages, ISO 8601.
    """
    began, ended = span_of(found)
    newest = _newest(found)
    ranks = max((_ranks(survey) for survey in found.surveys[:1]), default=0)
    document = {
        "events": False,
        "state": "unknown",
        "exit_code": None,
        "step": _step(found),
        "max_steps": 0,
        "steps_per_second": None,
        "left_ms": None,
        "told": ended,
        "lives": len(found.generations),
        "ranks": ranks,
        "faults": {},
        "lost_steps": 0,
        "checkpoint": newest.checkpoint.folder if newest else None,
        "committed": newest.manifest.created_at if newest and newest.manifest else None,
        "risk_steps": 0,
        "wall_ms": _milliseconds(began, ended),
        "goodput": 0.0,
    }
    saved_at = document["committed"]
    durable = f"{document['checkpoint']}" if newest else "nothing yet"
    durable += f", {age(saved_at, now)} ago" if isinstance(saved_at, str) else ""
    pairs = (
        ("state", "unknown: the run wrote no events here"),
        ("step", str(_step(found))),
        (
            "generation",
            f"{len(found.generations)}" + (f", {count(ranks, 'rank')}" if ranks else ""),
        ),
        ("durable", durable),
        ("next", KEEPS),
    )
    return CommandResult("status", "status", document, (KeyValues(pairs),), (str(_step(found)),))


def _row(row: dict[str, Any], life: Generation) -> tuple[str, ...]:
    last = (str(row["first_step"]), str(row["last_step"]))
    return (str(row["life"]), row["cause"], life.claimed_at, str(row["ranks"] or NONE), *last)


def span_of(found: Listing) -> tuple[str, str]:
    """Return the first and the last time recorded in a repository, ISO 8601; empty if none is."""
    told = sorted(_moments(found))
    return (told[0], told[-1]) if told else ("", "")


def _moments(found: Listing) -> Iterator[str]:
    yield from (generation.claimed_at for generation in found.generations)
    yield from (survey.manifest.created_at for survey in found.surveys if survey.manifest)


def _milliseconds(began: str, ended: str) -> int:
    if not began:
        return 0
    length = datetime.fromisoformat(ended) - datetime.fromisoformat(began)
    return round(1000 * length.total_seconds())


def _newest(found: Listing) -> Survey | None:
    """Return the checkpoint that a resume would use, otherwise the newest one."""
    intact = (survey for survey in found.surveys if survey.checkpoint == found.resume)
    return next(intact, next(iter(found.surveys), None))


def _step(found: Listing) -> int:
    newest = _newest(found)
    return newest.checkpoint.step if newest else 0


def _ranks(survey: Survey) -> int:
    size: Any = survey.manifest.world.get("size") if survey.manifest else None
    return size if isinstance(size, int) else 0


def _life(found: Listing, life: Generation) -> dict[str, Any]:
    saved = [survey for survey in found.surveys if survey.checkpoint.generation == life.number]
    first = life.parent.step if life.parent else 0
    return {
        "life": life.number,
        "cause": life.cause,
        "ranks": max(map(_ranks, saved), default=0),
        "first_step": first,
        "last_step": max((saved_survey.checkpoint.step for saved_survey in saved), default=first),
    }


def reporting(found: GoodputReport, page: str) -> CommandResult:
    """Return the result of ``report``.

    Args:
        found: Goodput report of the run.
        page: Path of the HTML page; empty if none was written.
    """
    spent = {kind.value: length for kind, length in found.spent_ms.items()}
    rows = tuple(
        (name, duration(length), share(length, found.wall_ms))
        for name, length in spent.items()
        if length
    )
    causes = tuple(
        (
            cause,
            str(repair.count),
            duration(repair.mttr_ms),
            str(repair.lost_steps),
            duration(repair.lost_ms),
        )
        for cause, repair in found.repairs.items()
    )
    blocks: tuple[Table | str, ...] = (
        Table(("CLASS", "TIME", "SHARE"), rows),
        Table(
            ("ATTEMPT", "AFTER", "CAUSE", "WHERE", "DETAIL", "DOWN", "LOST STEPS", "LOST TIME"),
            tuple(_fault_row(found, fault) for fault in found.faults),
        ),
        Table(("CAUSE", "FAULTS", "MTTR", "LOST STEPS", "LOST TIME"), causes),
        *_closing(found),
        *([f"page: {page}"] if page else []),
    )
    return CommandResult("report", "account", _document(found, spent, page), blocks)


def _fault_row(found: GoodputReport, fault: Fault) -> tuple[str, ...]:
    where = f"{fault.host or '?'} r{fault.rank}" if fault.rank >= 0 else fault.host or NONE
    return (
        str(fault.life),
        duration(fault.at_ms - found.began_ms),
        fault.cause,
        where,
        fault.detail or NONE,
        duration(fault.down_ms),
        str(fault.lost_steps),
        duration(fault.lost_ms),
    )


def _closing(found: GoodputReport) -> list[str]:
    written, now = sum(save.written_bytes for save in found.saved), found.now
    of = f" of {now.max_steps}" if now.max_steps else ""
    lines = [f"Clock of host {host}: corrected by {-ms} ms." for host, ms in found.skew_ms.items()]
    lines.append(
        f"Step {now.step}{of}, {count(len(found.doings), 'attempt')}, "
        f"{count(len(found.saved), 'checkpoint')}, {human_size(written)} written."
    )
    lines.append(
        f"Goodput {share(found.goodput, 1)} of {duration(found.wall_ms)}; "
        f"{count(found.lost_steps, 'step')} lost."
    )
    return lines


def _document(found: GoodputReport, spent: dict[str, int], page: str) -> dict[str, Any]:
    return {
        "began": moment(found.began_ms),
        "ended": moment(found.ended_ms),
        "wall_ms": found.wall_ms,
        "spent_ms": spent,
        "goodput": found.goodput,
        "steps": found.now.step,
        "max_steps": found.now.max_steps,
        "lost_steps": found.lost_steps,
        "lives": [
            {
                "life": attempt.life.number,
                "cause": attempt.life.cause,
                "ranks": attempt.life.world_size,
                "first_step": attempt.first_step,
                "last_step": attempt.last_step,
            }
            for attempt in found.doings
        ],
        "faults": [
            {
                **{name: one_of for name, one_of in asdict(fault).items() if name != "lost"},
                "at": moment(fault.at_ms),
                "lost_ms": fault.lost_ms,
            }
            for fault in found.faults
        ],
        "causes": {cause: asdict(repair) for cause, repair in found.repairs.items()},
        "checkpoints": len(found.saved),
        "written_bytes": sum(save.written_bytes for save in found.saved),
        "intervals": [
            {
                "began_ms": interval.began_ms,
                "length_ms": interval.length_ms,
                "class": interval.spent.value,
            }
            | {"life": interval.life}
            for interval in found.intervals
        ],
        "skew_ms": dict(found.skew_ms),
        "page": page or None,
    }


def moment(at_ms: int) -> str:
    """Format a time, given in milliseconds since 1970, as ISO 8601 in UTC."""
    at = datetime.fromtimestamp(at_ms / 1000, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
