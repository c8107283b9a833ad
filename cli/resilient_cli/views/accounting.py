"""The answer of ``report``."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from resilient_cli.render import Answer, Table, human_size
from resilient_cli.views.words import NONE, count, duration, share

if TYPE_CHECKING:
    from resilient.accounting.account import Account
    from resilient.accounting.faults import Fault


def reporting(found: Account, page: str) -> Answer:
    """Return the answer of ``report``.

    Args:
        found: the account of the run.
        page: where the page was written to; empty if none was.
    """
    spent = {kind.value: length for kind, length in found.spent_ms.items()}
    rows = tuple(
        (name, duration(length), share(length, found.wall_ms))
        for name, length in spent.items()
        if length
    )
    causes = tuple(
        (cause, str(one.count), duration(one.mttr_ms), str(one.lost_steps), duration(one.lost_ms))
        for cause, one in found.repairs.items()
    )
    blocks: tuple[Table | str, ...] = (
        Table(("CLASS", "TIME", "SHARE"), rows),
        Table(
            ("LIFE", "AFTER", "CAUSE", "WHERE", "DETAIL", "DOWN", "LOST STEPS", "LOST TIME"),
            tuple(_row(found, one) for one in found.faults),
        ),
        Table(("CAUSE", "FAULTS", "MTTR", "LOST STEPS", "LOST TIME"), causes),
        *_closing(found),
        *([f"page: {page}"] if page else []),
    )
    return Answer("report", "account", _document(found, spent, page), blocks)


def _row(found: Account, one: Fault) -> tuple[str, ...]:
    where = f"{one.host or '?'} r{one.rank}" if one.rank >= 0 else one.host or NONE
    return (
        str(one.life),
        duration(one.at_ms - found.began_ms),
        one.cause,
        where,
        one.detail or NONE,
        duration(one.down_ms),
        str(one.lost_steps),
        duration(one.lost_ms),
    )


def _closing(found: Account) -> list[str]:
    written, now = sum(one.written_bytes for one in found.saved), found.now
    of = f" of {now.max_steps}" if now.max_steps else ""
    lines = [f"Clock of host {host}: corrected by {-ms} ms." for host, ms in found.skew_ms.items()]
    lines.append(
        f"Step {now.step}{of}, {count(len(found.doings), 'life', 'lives')}, "
        f"{count(len(found.saved), 'checkpoint')}, {human_size(written)} written."
    )
    lines.append(
        f"Goodput {share(found.goodput, 1)} of {duration(found.wall_ms)}; "
        f"{count(found.lost_steps, 'step')} lost."
    )
    return lines


def _document(found: Account, spent: dict[str, int], page: str) -> dict[str, Any]:
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
                "life": one.life.number,
                "cause": one.life.cause,
                "ranks": one.life.world_size,
                "first_step": one.first_step,
                "last_step": one.last_step,
            }
            for one in found.doings
        ],
        "faults": [
            {
                **{name: one_of for name, one_of in asdict(one).items() if name != "lost"},
                "at": moment(one.at_ms),
                "lost_ms": one.lost_ms,
            }
            for one in found.faults
        ],
        "causes": {cause: asdict(one) for cause, one in found.repairs.items()},
        "checkpoints": len(found.saved),
        "written_bytes": sum(one.written_bytes for one in found.saved),
        "intervals": [
            {"began_ms": one.began_ms, "length_ms": one.length_ms, "class": one.spent.value}
            | {"life": one.life}
            for one in found.intervals
        ],
        "skew_ms": dict(found.skew_ms),
        "page": page or None,
    }


def moment(at_ms: int) -> str:
    """Return a moment as ISO 8601 in UTC."""
    at = datetime.fromtimestamp(at_ms / 1000, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
