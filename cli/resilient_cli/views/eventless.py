"""The answers of ``report`` and ``status`` where a run kept no events: what its repository says."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from resilient.accounting.timeline import Spent
from resilient_cli.render import Answer, Facts, Table, human_size
from resilient_cli.views.words import NONE, age, count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resilient.vault.registry.generations import Generation
    from resilient_cli.survey import Survey
    from resilient_cli.views.listing import Listing

UNTOLD = "No events were kept here, so where the time went is not known. To keep them:"
KEEPS = "resilient train --events FOLDER SCRIPT"


def reporting_stored(found: Listing, page: str) -> Answer:
    """Return the answer of ``report`` about a repository.

    Args:
        found: what it holds.
        page: where the page was written to; empty if none was.
    """
    began, ended = span_of(found)
    lives = [_life(found, one) for one in found.generations]
    document = {
        "events": False,
        "began": began,
        "ended": ended,
        "wall_ms": _milliseconds(began, ended),
        "spent_ms": dict.fromkeys((one.value for one in Spent), 0),
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
    said = f"Step {_step(found)}, {count(len(lives), 'life', 'lives')}, "
    said += f"{count(len(found.surveys), 'checkpoint')}, {human_size(found.size_bytes)}."
    blocks: tuple[Table | str, ...] = (
        Table(("LIFE", "CAUSE", "BEGAN", "RANKS", "FROM STEP", "SAVED UP TO"), rows),
        said,
        f"{UNTOLD} {KEEPS}",
        *([f"page: {page}"] if page else []),
    )
    return Answer("report", "account", document, blocks)


def standing_stored(found: Listing, now: str) -> Answer:
    """Return the answer of ``status`` about a repository.

    Args:
        found: what it holds.
        now: ISO 8601, for ages.
    """
    began, ended = span_of(found)
    newest = _newest(found)
    ranks = max((_ranks(one) for one in found.surveys[:1]), default=0)
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
        ("state", "unknown: no events were kept here"),
        ("step", str(_step(found))),
        ("life", f"{len(found.generations)}" + (f", {count(ranks, 'rank')}" if ranks else "")),
        ("durable", durable),
        ("next", KEEPS),
    )
    return Answer("status", "status", document, (Facts(pairs),), (str(_step(found)),))


def _row(one: dict[str, Any], life: Generation) -> tuple[str, ...]:
    last = (str(one["first_step"]), str(one["last_step"]))
    return (str(one["life"]), one["cause"], life.claimed_at, str(one["ranks"] or NONE), *last)


def span_of(found: Listing) -> tuple[str, str]:
    """Return the first and the last moment that a repository tells of, ISO 8601."""
    told = sorted(_moments(found))
    return (told[0], told[-1]) if told else ("", "")


def _moments(found: Listing) -> Iterator[str]:
    yield from (one.claimed_at for one in found.generations)
    yield from (one.manifest.created_at for one in found.surveys if one.manifest)


def _milliseconds(began: str, ended: str) -> int:
    if not began:
        return 0
    length = datetime.fromisoformat(ended) - datetime.fromisoformat(began)
    return round(1000 * length.total_seconds())


def _newest(found: Listing) -> Survey | None:
    """Return what a resume would take, or else the newest that there is."""
    intact = (one for one in found.surveys if one.checkpoint == found.resume)
    return next(intact, next(iter(found.surveys), None))


def _step(found: Listing) -> int:
    newest = _newest(found)
    return newest.checkpoint.step if newest else 0


def _ranks(one: Survey) -> int:
    size: Any = one.manifest.world.get("size") if one.manifest else None
    return size if isinstance(size, int) else 0


def _life(found: Listing, life: Generation) -> dict[str, Any]:
    saved = [one for one in found.surveys if one.checkpoint.generation == life.number]
    first = life.parent.step if life.parent else 0
    return {
        "life": life.number,
        "cause": life.cause,
        "ranks": max(map(_ranks, saved), default=0),
        "first_step": first,
        "last_step": max((one.checkpoint.step for one in saved), default=first),
    }
