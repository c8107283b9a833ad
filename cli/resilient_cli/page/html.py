"""The page of ``resilient report -o``: what the text says, and pictures of it."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from resilient_cli.page.drawing import curve, timeline
from resilient_cli.page.live import foot_of, head_of
from resilient_cli.page.stored import stored_part
from resilient_cli.page.style import style
from resilient_cli.page.tables import scroll, table
from resilient_cli.render import human_size
from resilient_cli.views.accounting import moment
from resilient_cli.views.words import NONE, count, duration, share

if TYPE_CHECKING:
    from resilient.accounting.account import Account
    from resilient_cli.views.listing import Listing

_SAVED_SHOWN = 50


def page_of(found: Account, name: str, stored: Listing | None = None, version: str = "") -> str:
    """Return the page, whole: it refers to nothing.

    Args:
        found: the account of the run.
        name: of the run, as it was given.
        stored: what the repository holds now; None if that is not known.
        version: of a page that is served, and looks for a newer one; empty for one in a file.
    """
    head, foot = (head_of(version), foot_of()) if version else ("", "")
    body = [
        f"<h1>{escape(name)}</h1>",
        f"<p>{moment(found.began_ms)} to {moment(found.ended_ms)}</p>",
        _tiles(found),
        "<h2>Where the time went</h2>",
        _bar(found),
        _classes(found),
        "<h2>Lives</h2>",
        "<p>Triangles are faults, notches are checkpoints; rest on anything for its name.</p>",
        scroll(timeline(found)),
        "<h2>Loss</h2>",
        "<p>Lives in turns of two colours; grey is what was rolled back or died.</p>",
        scroll(curve(found)),
        "<h2>Faults</h2>",
        _faults(found),
        "<h2>Checkpoints</h2>",
        stored_part(stored) if stored else "",
        _checkpoints(found),
    ]
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(name)}</title><style>{style()}</style>{head}</head>"
        f"<body>{''.join(body)}{foot}</body></html>\n"
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
            escape(cause),
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
            escape(one.cause),
            escape(one.host or NONE) + (f", rank {one.rank}" if one.rank >= 0 else ""),
            escape(one.detail or NONE),
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
            escape(one.checkpoint),
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
