"""Results of ``report`` and ``status``.

For a run without events, the results come from the repository of the run.
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

NO_EVENTS_NOTE = "The run wrote no events here, so its time cannot be shown. To write events:"
EVENTS_COMMAND = "resilient train --events FOLDER SCRIPT"


def build_stored_report_result(repository: Listing, page: str) -> CommandResult:
    """Return the result of ``report`` for a repository without events.

    Args:
        repository: Contents of the repository.
        page: Path of the HTML page; empty if none was written.
    """
    began, end = span_of(repository)
    generations = [
        _generation_to_json(repository, generation) for generation in repository.generations
    ]
    document = {
        "events": False,
        "began": began,
        "ended": end,
        "wall_ms": _milliseconds(began, end),
        "spent_ms": dict.fromkeys((time_class.value for time_class in TimeClass), 0),
        "goodput": 0.0,
        "steps": _step(repository),
        "max_steps": 0,
        "lost_steps": 0,
        "lives": generations,
        "faults": [],
        "causes": {},
        "checkpoints": len(repository.surveys),
        "written_bytes": repository.size_bytes,
        "intervals": [],
        "skew_ms": {},
        "page": page or None,
    }
    rows = tuple(_row(*pair) for pair in zip(generations, repository.generations, strict=True))
    text = f"Step {_step(repository)}, {count(len(generations), 'generation')}, "
    text += f"{count(len(repository.surveys), 'checkpoint')}, {human_size(repository.size_bytes)}."
    blocks: tuple[Table | str, ...] = (
        Table(("GEN", "CAUSE", "BEGAN", "RANKS", "FROM STEP", "SAVED UP TO"), rows),
        text,
        f"{NO_EVENTS_NOTE} {EVENTS_COMMAND}",
        *([f"page: {page}"] if page else []),
    )
    return CommandResult("report", "account", document, blocks)


def build_stored_status_result(repository: Listing, now: str) -> CommandResult:
    """Return the result of ``status`` for a repository without events.

    Args:
        repository: Contents of the repository.
        now: Current time for ages, ISO 8601.
    """
    began, end = span_of(repository)
    newest = _newest(repository)
    ranks = max((_ranks(survey) for survey in repository.surveys[:1]), default=0)
    document = {
        "events": False,
        "state": "unknown",
        "exit_code": None,
        "step": _step(repository),
        "max_steps": 0,
        "steps_per_second": None,
        "left_ms": None,
        "told": end,
        "lives": len(repository.generations),
        "ranks": ranks,
        "faults": {},
        "lost_steps": 0,
        "checkpoint": newest.checkpoint.folder if newest else None,
        "committed": newest.manifest.created_at if newest and newest.manifest else None,
        "risk_steps": 0,
        "wall_ms": _milliseconds(began, end),
        "goodput": 0.0,
    }
    saved_at = document["committed"]
    durable = f"{document['checkpoint']}" if newest else "nothing yet"
    durable += f", {age(saved_at, now)} ago" if isinstance(saved_at, str) else ""
    pairs = (
        ("state", "unknown: the run wrote no events here"),
        ("step", str(_step(repository))),
        (
            "generation",
            f"{len(repository.generations)}" + (f", {count(ranks, 'rank')}" if ranks else ""),
        ),
        ("durable", durable),
        ("next", EVENTS_COMMAND),
    )
    return CommandResult(
        "status", "status", document, (KeyValues(pairs),), (str(_step(repository)),)
    )


def _row(row: dict[str, Any], generation: Generation) -> tuple[str, ...]:
    step_cells = (str(row["first_step"]), str(row["last_step"]))
    return (
        str(row["life"]),
        row["cause"],
        generation.claimed_at,
        str(row["ranks"] or NONE),
        *step_cells,
    )


def span_of(repository: Listing) -> tuple[str, str]:
    """Return the first and the last recorded time of a repository, ISO 8601; empty if unknown."""
    moments = sorted(_moments(repository))
    return (moments[0], moments[-1]) if moments else ("", "")


def _moments(repository: Listing) -> Iterator[str]:
    yield from (generation.claimed_at for generation in repository.generations)
    yield from (survey.manifest.created_at for survey in repository.surveys if survey.manifest)


def _milliseconds(began: str, end: str) -> int:
    if not began:
        return 0
    length = datetime.fromisoformat(end) - datetime.fromisoformat(began)
    return round(1000 * length.total_seconds())


def _newest(repository: Listing) -> Survey | None:
    """Return the checkpoint that a resume would use, otherwise the newest checkpoint."""
    intact = (survey for survey in repository.surveys if survey.checkpoint == repository.resume)
    return next(intact, next(iter(repository.surveys), None))


def _step(repository: Listing) -> int:
    newest = _newest(repository)
    return newest.checkpoint.step if newest else 0


def _ranks(survey: Survey) -> int:
    size: Any = survey.manifest.world.get("size") if survey.manifest else None
    return size if isinstance(size, int) else 0


def _generation_to_json(repository: Listing, generation: Generation) -> dict[str, Any]:
    surveys = [
        survey for survey in repository.surveys if survey.checkpoint.generation == generation.number
    ]
    first_step = generation.parent.step if generation.parent else 0
    return {
        "life": generation.number,
        "cause": generation.cause,
        "ranks": max(map(_ranks, surveys), default=0),
        "first_step": first_step,
        "last_step": max(
            (saved_survey.checkpoint.step for saved_survey in surveys), default=first_step
        ),
    }


def build_report_result(goodput: GoodputReport, page: str) -> CommandResult:
    """Return the result of ``report``.

    Args:
        goodput: Goodput report of the run.
        page: Path of the HTML page; empty if none was written.
    """
    length_ms_by_class = {kind.value: length for kind, length in goodput.spent_ms.items()}
    rows = tuple(
        (name, duration(length), share(length, goodput.wall_ms))
        for name, length in length_ms_by_class.items()
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
        for cause, repair in goodput.repairs.items()
    )
    blocks: tuple[Table | str, ...] = (
        Table(("CLASS", "TIME", "SHARE"), rows),
        Table(
            ("ATTEMPT", "AFTER", "CAUSE", "WHERE", "DETAIL", "DOWN", "LOST STEPS", "LOST TIME"),
            tuple(_fault_row(goodput, fault) for fault in goodput.faults),
        ),
        Table(("CAUSE", "FAULTS", "MTTR", "LOST STEPS", "LOST TIME"), causes),
        *_summary_lines(goodput),
        *([f"page: {page}"] if page else []),
    )
    return CommandResult("report", "account", _document(goodput, length_ms_by_class, page), blocks)


def _fault_row(goodput: GoodputReport, fault: Fault) -> tuple[str, ...]:
    location = f"{fault.host or '?'} r{fault.rank}" if fault.rank >= 0 else fault.host or NONE
    return (
        str(fault.life),
        duration(fault.at_ms - goodput.began_ms),
        fault.cause,
        location,
        fault.detail or NONE,
        duration(fault.down_ms),
        str(fault.lost_steps),
        duration(fault.lost_ms),
    )


def _summary_lines(goodput: GoodputReport) -> list[str]:
    written_bytes, progress = sum(save.written_bytes for save in goodput.saved), goodput.now
    total_text = f" of {progress.max_steps}" if progress.max_steps else ""
    lines = [
        f"Clock of host {host}: corrected by {-ms} ms." for host, ms in goodput.skew_ms.items()
    ]
    lines.append(
        f"Step {progress.step}{total_text}, {count(len(goodput.doings), 'attempt')}, "
        f"{count(len(goodput.saved), 'checkpoint')}, {human_size(written_bytes)} written."
    )
    lines.append(
        f"Goodput {share(goodput.goodput, 1)} of {duration(goodput.wall_ms)}; "
        f"{count(goodput.lost_steps, 'step')} lost."
    )
    return lines


def _document(
    goodput: GoodputReport, length_ms_by_class: dict[str, int], page: str
) -> dict[str, Any]:
    return {
        "began": moment(goodput.began_ms),
        "ended": moment(goodput.ended_ms),
        "wall_ms": goodput.wall_ms,
        "spent_ms": length_ms_by_class,
        "goodput": goodput.goodput,
        "steps": goodput.now.step,
        "max_steps": goodput.now.max_steps,
        "lost_steps": goodput.lost_steps,
        "lives": [
            {
                "life": attempt.life.number,
                "cause": attempt.life.cause,
                "ranks": attempt.life.world_size,
                "first_step": attempt.first_step,
                "last_step": attempt.last_step,
            }
            for attempt in goodput.doings
        ],
        "faults": [
            {
                **{name: value for name, value in asdict(fault).items() if name != "lost"},
                "at": moment(fault.at_ms),
                "lost_ms": fault.lost_ms,
            }
            for fault in goodput.faults
        ],
        "causes": {cause: asdict(repair) for cause, repair in goodput.repairs.items()},
        "checkpoints": len(goodput.saved),
        "written_bytes": sum(save.written_bytes for save in goodput.saved),
        "intervals": [
            {
                "began_ms": interval.began_ms,
                "length_ms": interval.length_ms,
                "class": interval.spent.value,
            }
            | {"life": interval.life}
            for interval in goodput.intervals
        ],
        "skew_ms": dict(goodput.skew_ms),
        "page": page or None,
    }


def moment(at_ms: int) -> str:
    """Format a time, given in milliseconds since 1970, as ISO 8601 in UTC."""
    at = datetime.fromtimestamp(at_ms / 1000, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
