"""The part of the page about the run: where its time went, its lives, loss, faults and saves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient_cli.page.drawing import curve, timeline
from resilient_cli.page.tables import scroll, table, text
from resilient_cli.render import human_size
from resilient_cli.views.words import NONE, count, duration, share

if TYPE_CHECKING:
    from resilient.accounting.account import Account

_SAVED_SHOWN = 50


def run_part(found: Account) -> str:
    """Return what the events of a run say."""
    return "".join(
        [
            _tiles(found),
            "<h3>Where the time went</h3>",
            _bar(found),
            _classes(found),
            "<h3>Lives</h3>",
            "<p>Triangles are faults, notches are checkpoints; rest on anything for its name.</p>",
            scroll(timeline(found)),
            "<h3>Loss</h3>",
            "<p>Lives in turns of two colours; grey is what was rolled back or died.</p>",
            scroll(curve(found)),
            "<h3>Faults</h3>",
            _faults(found),
            "<h3>Saves</h3>",
            _checkpoints(found),
        ]
    )


def _tiles(found: Account) -> str:
    now = found.now
    of = f" / {now.max_steps}" if now.max_steps else ""
    tiles = (
        (share(found.goodput, 1), "goodput"),
        (duration(found.wall_ms), "wall clock"),
        (f"{now.step}{of}", "steps"),
        (str(found.lost_steps), "steps lost"),
        (str(len(found.faults)), "faults"),
        (str(len(found.doings)), "lives"),
    )
    cells = "".join(f'<div class="tile"><b>{text}</b><span>{of}</span></div>' for text, of in tiles)
    return f'<div class="tiles">{cells}</div>'


def _bar(found: Account) -> str:
    cells = "".join(
        f'<i class="c-{kind.value}" style="width:{100 * length / found.wall_ms:.2f}%"'
        f' title="{kind.value} {duration(length)}"></i>'
        for kind, length in found.spent_ms.items()
        if length
    )
    return f'<div class="bar">{cells}</div>'


def _classes(found: Account) -> str:
    rows = [
        (
            f'<i class="dot c-{kind.value}"></i>{kind.value.replace("_", " ")}',
            duration(length),
            share(length, found.wall_ms),
        )
        for kind, length in found.spent_ms.items()
        if length
    ]
    rows.append(("all", duration(found.wall_ms), share(found.wall_ms, found.wall_ms)))
    return table(("class", "time", "share"), rows, numbers=(1, 2))


def _faults(found: Account) -> str:
    if not found.faults:
        return "<p>None.</p>"
    causes = [
        (
            text(cause),
            str(one.count),
            duration(one.mttr_ms),
            str(one.lost_steps),
            duration(one.lost_ms),
        )
        for cause, one in found.repairs.items()
    ]
    rows = [
        (
            str(one.life),
            duration(one.at_ms - found.began_ms),
            text(one.cause),
            text(one.host or NONE) + (f", rank {one.rank}" if one.rank >= 0 else ""),
            text(one.detail or NONE),
            duration(one.down_ms),
            str(one.lost_steps),
            duration(one.lost_ms),
        )
        for one in found.faults
    ]
    head = ("life", "after", "cause", "where", "detail", "down", "lost steps", "lost time")
    return table(
        ("cause", "faults", "mean time to repair", "lost steps", "lost time"),
        causes,
        numbers=(1, 2, 3, 4),
    ) + table(head, rows, numbers=(5, 6, 7))


def _checkpoints(found: Account) -> str:
    if not found.saved:
        return "<p>None.</p>"
    written = sum(one.written_bytes for one in found.saved)
    rows = [
        (
            text(one.checkpoint),
            duration(one.at_ms - found.began_ms),
            human_size(one.size_bytes),
            human_size(one.written_bytes),
            duration(one.commit_ms),
            duration(one.stall_ms),
        )
        for one in found.saved[-_SAVED_SHOWN:]
    ]
    last = f", the last {_SAVED_SHOWN} of them" if len(found.saved) > _SAVED_SHOWN else ""
    said = f"<p>{count(len(found.saved), 'checkpoint')}, {human_size(written)} written{last}.</p>"
    head = ("checkpoint", "after", "size", "written", "durable in", "training waited")
    return said + table(head, rows, numbers=(1, 2, 3, 4, 5))
